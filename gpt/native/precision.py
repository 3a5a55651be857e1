"""`--dtype auto`: bf16 weights where they make this machine faster.

A decode step takes as long as its weights take to be read, so half the bytes are half the time, if
the processor (or a kernel of ours) can multiply them as it reads. That is measured, not known.
What bf16 costs is measured, too, in tests/test_native.py: the mean Kullback-Leibler divergence of
the next token's distribution from that of float32 weights, and how often the likeliest one is
another.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from gpt.checkpoint import LoadedModel, load_model
from gpt.native.hugepages import take_out
from gpt.native.kernels import load
from gpt.native.linear import WORTH_BYTES, Way, speed_up

CHOICES = ("auto", "float32", "bfloat16", "float64")
GAIN = 1.25
"""What bf16 must be faster by, in a step of a single text."""


def open_model(
    path: Path | str, name: str, device: torch.device, *, exact: bool = False
) -> tuple[LoadedModel, torch.dtype, str]:
    """Open a model for decoding: in the dtype that a `--dtype` flag means, with the kernels that
    suit the machine, and on a processor in memory of its own.

    Args:
        name, exact: see `resolve`; what is exact keeps torch's kernels, too.

    Returns:
        The model, its dtype, and why that one.

    Raises:
        UserError: as `gpt.checkpoint.load_model`.
    """
    auto = name == "auto"
    loaded = load_model(path, device=device, dtype=None if auto else getattr(torch, name))
    dtype, why = resolve(name, loaded.model.num_params(), device, exact=exact)
    if loaded.model.dtype != dtype:
        loaded.model.to(dtype)
    if device.type == "cpu":
        take_out(loaded.model, huge=not exact)
    if not exact:
        speed_up(loaded.model)
    return loaded, dtype, why


def resolve(
    name: str, params: int, device: torch.device, *, exact: bool = False
) -> tuple[torch.dtype, str]:
    """The dtype that a `--dtype` flag means, and why, for the log.

    Args:
        name: one of `CHOICES`.
        params: how many numbers the model has.
        exact: results must not depend on how fast the machine is: float32.
    """
    if name != "auto":
        return getattr(torch, name), "as asked for"
    if exact:
        return torch.float32, "for texts that are always the same"
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
        return (torch.bfloat16, "native there") if fast else (torch.float32, "no bf16 there")
    if device.type != "cpu":
        return torch.float32, "bf16 is not tried there"
    if 4 * params < WORTH_BYTES:
        return torch.float32, "the model is small"
    gains = measure()
    shown = ", ".join(f"{gain:.1f}x at {rows} rows" for rows, gain in gains.items())
    single, several = gains[1], gains[16]
    chosen = torch.bfloat16 if single >= GAIN and several > 0.9 else torch.float32
    return chosen, f"bf16 measured at {shown}; --dtype sets another"


@torch.inference_mode()
def measure(seconds: float = 0.4) -> dict[int, float]:
    """How many times faster products of a decode step are with bf16 weights than with float32
    ones, by rows; each by the best of its ways."""
    kernels = load()
    ways: list[Way] = [torch.nn.functional.linear]
    if kernels is not None:
        ways.append(kernels.linear)
    exact = [torch.full((2048, 2048), 0.01) for _ in range(4)]
    half = [weight.bfloat16() for weight in exact]
    gains = {}
    for rows in (1, 16):
        best: dict[torch.dtype, float] = {}
        began = time.perf_counter()
        while not best or time.perf_counter() - began < seconds / 2:
            for weights in (exact, half):
                dtype = weights[0].dtype
                x = torch.full((rows, 2048), 0.01, dtype=dtype)
                for way in ways:
                    start = time.perf_counter()
                    for weight in weights:
                        way(x, weight, None)
                    took = time.perf_counter() - start
                    best[dtype] = min(took, best.get(dtype, took))
        gains[rows] = best[torch.float32] / best[torch.bfloat16]
    return gains
