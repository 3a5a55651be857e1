"""The doctor's trial: imports packages and measures, in a process of its own.

A package whose native part does not fit this processor can kill the process that imports it; here
that costs the trial and not the doctor. Run as `python -m gpt.doctor.trial`, it reads what to try
from its argument and writes one JSON object a line: `{"trying": …}` before each step, and
`{"tried": …, "error": …, "facts": …}` after it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from gpt.doctor.report import reason

TIMEOUT = 180.0
MEASURE = "measure"
MEASURE_SIZES = (128, 256, 512, 1024)
MEASURE_SECONDS = 0.8
ROUNDS = 8


@dataclass(frozen=True)
class Tried:
    """How a step went.

    Attributes:
        error: what went wrong, in one line; None if nothing.
        facts: what it found out.
    """

    error: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def run_trial(steps: list[str], timeout: float = TIMEOUT) -> dict[str, Tried]:
    """Try every step; one that kills the process or hangs is blamed, and the rest still tried.

    Args:
        steps: names of modules to import, or `MEASURE`.
        timeout: seconds for each process.
    """
    done: dict[str, Tried] = {}
    while left := [step for step in steps if step not in done]:
        output, ending = _process(left, timeout)
        current: str | None = None
        for line in output.splitlines():
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if "trying" in said:
                current = said["trying"]
            else:
                done[said["tried"]] = Tried(said["error"], said["facts"])
                current = None
        blamed = current or next((step for step in left if step not in done), None)
        if blamed is not None:
            done[blamed] = Tried(ending)
    return done


def _process(steps: list[str], timeout: float) -> tuple[str, str]:
    """What the process wrote, and how it ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gpt.doctor.trial", json.dumps(steps)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return output, f"did not end within {timeout:g} s"
    except BaseException:
        process.kill()
        raise
    if process.returncode < 0:
        return output, f"killed the process ({signal.Signals(-process.returncode).name})"
    return output, f"ended the process with status {process.returncode}"


# --- In the process ------------------------------------------------------------------------------


def _torch_facts() -> dict[str, Any]:
    import torch

    gpus = [
        {
            "name": torch.cuda.get_device_name(index),
            "bytes": torch.cuda.get_device_properties(index).total_memory,
            "capability": ".".join(map(str, torch.cuda.get_device_capability(index))),
            "bf16": torch.cuda.get_device_capability(index) >= (8, 0),
        }
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    return {
        "threads": torch.get_num_threads(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpus": gpus,
        "mps": torch.backends.mps.is_available(),
    }


def _measure() -> dict[str, Any]:
    """FLOP/s of matrix products on this CPU, with one thread and with all, in under two seconds.

    Precisions take turns and the best of many short products counts, so that other programs, which
    slow all of them down at times, do not decide which is faster.
    """
    import torch

    threads = torch.get_num_threads()
    with torch.no_grad():
        alone = _products(1, MEASURE_SECONDS)
        together = _products(threads, MEASURE_SECONDS) if threads > 1 else alone
    best = {name: max(alone[name], together[name]) for name in alone}
    return {**best, "one_thread": alone, "threads": threads, "load": _load()}


def _products(threads: int, seconds: float) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    best: dict[str, float] = {}
    began = time.perf_counter()
    for size in MEASURE_SIZES:
        # Small whole numbers: the speed must not depend on denormals or overflow.
        whole = (torch.arange(size * size, dtype=torch.float32) % 7 - 3).view(size, size)
        operands = {"float32": whole, "bfloat16": whole.bfloat16()}
        slowest, rounds = 0.0, 0
        while rounds < 2 or time.perf_counter() - began + slowest < seconds:
            slowest, rounds = 0.0, rounds + 1
            for name, operand in operands.items():
                start = time.perf_counter()
                torch.mm(operand, operand)
                last = time.perf_counter() - start
                best[name] = max(best.get(name, 0.0), 2 * size**3 / last)
                slowest += last
            if rounds >= ROUNDS and size != MEASURE_SIZES[-1]:
                break
        if time.perf_counter() - began + 2 * 8 * slowest > seconds:
            break  # what the next size would take, twice
    return best


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


STEPS: dict[str, Callable[[], dict[str, Any]]] = {MEASURE: _measure}
FACTS: dict[str, Callable[[], dict[str, Any]]] = {"torch": _torch_facts}


def _step(name: str) -> dict[str, Any]:
    if name in STEPS:
        return STEPS[name]()
    importlib.import_module(name)
    return FACTS[name]() if name in FACTS else {}


def main(steps: list[str], out: TextIO) -> None:
    def say(**said: Any) -> None:
        print(json.dumps(said), file=out, flush=True)

    for name in steps:
        say(trying=name)
        try:
            facts, error = _step(name), None
        except Exception as caught:  # noqa: BLE001 - whatever an import raises is the finding
            facts, error = {}, reason(caught)
        say(tried=name, error=error, facts=facts)


if __name__ == "__main__":
    # What packages print while they are imported must not get between our lines.
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(json.loads(sys.argv[1]), ours)
