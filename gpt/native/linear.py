"""Matrix products by the fastest way for their number of rows, which is measured.

    own      `Kernels.linear`: reads each weight once, at the memory's speed
    torch    `F.linear`
    wide     bf16 weights as float32 ones, made anew each time: where the processor has no bf16
             products, torch's take ten times as long as its float32 ones

Which is fastest differs between processors and types, and by the number of rows: one for a decode
step alone, hundreds for a prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.native.kernels import DTYPES, Kernels, load

log = logging.getLogger(__name__)

WORTH_BYTES = 32 * 2**20
"""Models of fewer bytes stay in the processor's caches, where torch is as fast."""

ROWS = (1, 4, 16, 32, 64, 128, 256)
"""Numbers of rows that are tried."""

Product = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


@dataclass(frozen=True)
class Routes:
    """Which way products of one dtype take.

    Attributes:
        kernels: whose `linear` is meant.
        own_until: most rows for which that is fastest.
        wide: whether more rows go through float32.
    """

    kernels: Kernels
    own_until: int
    wide: bool

    def __str__(self) -> str:
        rest = "torch in float32" if self.wide else "torch"
        return f"own products up to {self.own_until} rows, {rest} beyond"


class RoutedLinear(nn.Linear):
    """`nn.Linear` that takes the fastest way while no gradients are asked for."""

    routes: Routes

    def forward(self, x: Tensor) -> Tensor:
        weight, routes = self.weight, self.routes
        if torch.is_grad_enabled() or x.dtype != weight.dtype or x.device.type != "cpu":
            return super().forward(x)
        if x.numel() <= routes.own_until * weight.shape[1]:
            return routes.kernels.linear(x, weight, self.bias)
        return widened(x, weight, self.bias) if routes.wide else super().forward(x)


def widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of bf16 numbers by float32 products."""
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return y.to(x.dtype)


def speed_up(model: nn.Module) -> Routes | None:
    """Have a model's products on the CPU take the fastest way, if kernels can be had and it is
    large enough to gain. Compiles them the first time, and measures for half a second.

    Returns:
        None if nothing was changed.
    """
    weights = [p for p in model.parameters() if p.dim() == 2]
    if not weights or any(p.device.type != "cpu" or p.dtype not in DTYPES for p in weights):
        return None
    if sum(p.numel() * p.element_size() for p in weights) < WORTH_BYTES:
        return None
    kernels = load()
    if kernels is None:
        return None
    routes = measure(kernels, weights[0].dtype)
    route(model, routes)
    log.info("kernels of our own (%s): %s", kernels.instructions, routes)
    return routes


def route(model: nn.Module, routes: Routes) -> None:
    """Have the products of a model take these ways."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.is_contiguous():
            module.__class__ = RoutedLinear
            cast(RoutedLinear, module).routes = routes


@torch.inference_mode()
def measure(kernels: Kernels, dtype: torch.dtype, seconds: float = 0.5) -> Routes:
    """Try the ways on matrices that do not fit into a cache together, in turn, by falling number of
    rows; it takes about so many seconds."""
    weights = [torch.full((1536, 1024), 0.01, dtype=dtype) for _ in range(6)]
    ways: dict[str, Product] = {"own": kernels.linear, "torch": F.linear}
    if dtype == torch.bfloat16:
        ways["wide"] = widened
    own_until, wide = 0, False
    began = time.perf_counter()
    for rows in ROWS:
        x = torch.full((rows, 1024), 0.01, dtype=dtype)
        took = {name: _time(way, x, weights) for name, way in ways.items()}
        wide = took.get("wide", torch.inf) < took["torch"]
        if took["own"] > min(took.values()) * 1.05:
            break
        own_until = rows
        if time.perf_counter() - began > seconds:
            break
    if dtype == torch.bfloat16:
        kernels.wide = wide
    return Routes(kernels, own_until, wide)


def _time(way: Product, x: Tensor, weights: list[Tensor], tries: int = 2) -> float:
    """Seconds of the best of some passes over the weights."""
    best = float("inf")
    for _ in range(tries):
        began = time.perf_counter()
        for weight in weights:
            way(x, weight, None)
        best = min(best, time.perf_counter() - began)
    return best
