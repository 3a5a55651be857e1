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

TRIES, RETRIES = 2, 8
FEW = 16
"""Rows up to which ours is tried again often: with none at all every text would be slow."""

Way = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


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


def plainly(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a forward asks for nothing but the numbers that x and weights of `dtype` make, one of
    those that the kernels know."""
    if x.dtype != dtype or dtype not in DTYPES or x.device.type != "cpu":
        return False
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


class RoutedLinear(nn.Linear):
    """`nn.Linear` that takes the fastest way while no gradients are asked for."""

    routes: Routes

    def forward(self, x: Tensor) -> Tensor:
        weight, routes = self.weight, self.routes
        if not plainly(x, weight.dtype):
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
    large enough to gain. Compiles them the first time, and measures for about a second.

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
    """Have the products of a model take these ways, and its blocks that of few calls."""
    from gpt.native.blocks import route_blocks  # which knows RoutedLinear

    route_blocks(model, routes.kernels, routes.own_until)
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.is_contiguous():
            module.__class__ = RoutedLinear
            cast(RoutedLinear, module).routes = routes


@torch.inference_mode()
def measure(kernels: Kernels, dtype: torch.dtype) -> Routes:
    """Try the ways on matrices that do not fit into a cache together, by rising number of rows
    until ours is no longer the fastest; it takes about a second.

    A model is served by what is found here for as long as the process lives, so a way that loses
    is tried again before that is believed: something else may have had the processor.
    """
    weights = [torch.full((1536, 1024), 0.01, dtype=dtype) for _ in range(6)]
    ways: dict[str, Way] = {"own": kernels.linear, "torch": F.linear}
    if dtype == torch.bfloat16:
        ways["wide"] = widened
    own_until, wide = 0, False
    for rows in ROWS:
        race = _Race(ways, torch.full((rows, 1024), 0.01, dtype=dtype), weights)
        race.run(TRIES)
        for _ in range(RETRIES if rows <= FEW else 2):
            if race.loses("own"):
                race.run(TRIES)
        torchs = race.best.get("torch", torch.inf)
        wide = race.best.get("wide", torch.inf) < torchs
        if wide and torchs > 2 * race.best["wide"]:
            ways.pop("torch", None)  # behind by more at more rows, and that would take seconds
        if race.loses("own"):
            break
        own_until = rows
    if dtype == torch.bfloat16:
        kernels.wide = wide
    return Routes(kernels, own_until, wide)


class _Race:
    """Ways of one product, in turn.

    Attributes:
        best: seconds of each way's best pass over the weights.
    """

    def __init__(self, ways: dict[str, Way], x: Tensor, weights: list[Tensor]) -> None:
        self._ways, self._x, self._weights = dict(ways), x, weights
        self.best = dict.fromkeys(ways, torch.inf)
        for way in ways.values():  # threads and memory of a first call are not counted
            way(x, weights[0], None)

    def run(self, tries: int) -> None:
        for _ in range(tries):
            for name, way in self._ways.items():
                began = time.perf_counter()
                for weight in self._weights:
                    way(self._x, weight, None)
                self.best[name] = min(self.best[name], time.perf_counter() - began)

    def loses(self, name: str) -> bool:
        return self.best[name] > min(self.best.values()) * 1.05
