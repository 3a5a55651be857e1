"""What every benchmark needs: interleaved rounds, medians with spread, and the machine's facts."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpt.machine import cpu_name


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


def interleave(subjects: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Time each subject once a round, in turn, after a warm-up: a slow spell hits them all."""
    for subject in subjects.values():
        subject()
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            began = time.perf_counter()
            subject()
            seconds[name].append(time.perf_counter() - began)
    return {name: Timing(values) for name, values in seconds.items()}


def machine() -> str:
    """Processor, threads and versions, for the head of every table."""
    return (
        f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
