"""Things that are compared take turns: medians and spread of interleaved rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of several rounds."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        low, high = min(self.seconds), max(self.seconds)
        return f"{self.median * 1e3:9.2f} ms  (min {low * 1e3:.2f}, max {high * 1e3:.2f})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "median_s": self.median,
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
            "rounds_s": self.seconds,
        }


def waiter(device: torch.device) -> Callable[[], None]:
    """A function that returns when the device has done all it was given."""
    import torch

    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return nothing


def nothing() -> None:
    """What there is to wait for on a CPU."""


def interleave(
    subjects: Mapping[str, Callable[[], object]],
    rounds: int,
    wait: Callable[[], None] = nothing,
) -> dict[str, Timing]:
    """Time each subject once a round, in turn, after a warm-up: a slow spell hits them all.

    Args:
        wait: see `waiter`; for work on a CPU there is nothing to wait for.
    """
    for subject in subjects.values():
        subject()
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            wait()
            began = time.perf_counter()
            subject()
            wait()
            seconds[name].append(time.perf_counter() - began)
    return {name: Timing(values) for name, values in seconds.items()}
