"""What the machine has: memory that is free, and how fast it multiplies matrices.

Importing this loads no torch; only what asks a GPU or measures does.
"""

from __future__ import annotations

import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GIB = 2**30
UNKNOWN_MEMORY = 4 * GIB
"""Taken for free where the system does not say."""

MEASURE_SECONDS = 0.6
MEASURE_TRIES = 4
MEASURE_SIZES = (256, 512, 1024)


# --- Memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of one kind of memory.

    Attributes:
        name: whose it is: `this machine`, or the GPU's name.
        free: bytes that can still be had.
        total: bytes in all; None if not known.
    """

    name: str
    free: int
    total: int | None


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had: of the GPU, or of the machine or container, if that is less."""
    return device_memory(device.type, device.index).free


def device_memory(kind: str, index: int | None = None) -> Memory:
    """Memory of the device that computes: `cuda`, or anything else that shares the machine's."""
    if kind == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(index)
        return Memory(torch.cuda.get_device_name(index), int(free), int(total))
    return host_memory()


def host_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> Memory:
    """The machine's, or what the container's limit leaves of it, if that is less."""
    found = [
        (_meminfo(meminfo, "MemAvailable"), _meminfo(meminfo, "MemTotal"), "this machine"),
        (*_cgroup(cgroup), "this container"),
    ]
    known = [(free, total, name) for free, total, name in found if free is not None]
    free, total, name = min(
        known, key=lambda each: each[0], default=(UNKNOWN_MEMORY, None, "this machine")
    )
    return Memory(name, free, total)


def gpu_memory() -> Memory | None:
    """The first GPU's, or None. Asks torch only where a driver is."""
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return None
    import torch

    return device_memory("cuda", 0) if torch.cuda.is_available() else None


def _meminfo(path: Path, wanted: str) -> int | None:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == wanted:
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup(folder: Path) -> tuple[int | None, int | None]:
    """What a container's limit leaves, and the limit (cgroup v2, as seen from inside).

    Cached files count as used there but are given up on demand.
    """
    try:
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no container, or "max"
        return None, None
    try:
        stat = dict(
            line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines()
        )
        used -= int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        pass
    return max(0, limit - used), limit


# --- Processor ----------------------------------------------------------------------------------


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(line.split(":")[1].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# --- Speed --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limit:
    """How many FLOP/s a device can do at best in one precision.

    Attributes:
        flops: per second, one device.
        what: how that is known, for people.
    """

    flops: float
    what: str


@dataclass(frozen=True)
class Peak:
    """Dense peaks of a GPU in TFLOP/s: fp16 and bf16 alike, TF32, and float32 proper."""

    half: float
    tf32: float
    float32: float


PEAKS: dict[str, Peak] = {
    # As torch names the device, whole: a laptop's or a cut-down part has another name and another
    # speed, and no MFU is better than an invented one. NVIDIA's datasheets and architecture white
    # papers, without sparsity, accumulating in float32.
    r"NVIDIA A100-(SXM4|PCIE|PCIe)-(40|80)GB|NVIDIA A100 80GB PCIe": Peak(312, 156, 19.5),
    r"NVIDIA H100 80GB HBM3": Peak(989.4, 494.7, 66.9),  # SXM5
    r"NVIDIA H100 PCIe": Peak(756, 378, 51),
    r"NVIDIA H200": Peak(989.4, 494.7, 66.9),
    r"NVIDIA L4": Peak(121, 60.5, 30.3),
    r"NVIDIA L40S": Peak(362, 183, 91.6),
    r"NVIDIA GeForce RTX 3090": Peak(71, 35.6, 35.6),
    r"NVIDIA GeForce RTX 4090": Peak(165.2, 82.6, 82.6),
}


def datasheet(gpu: str, precision: str, *, tf32: bool = False) -> Limit | None:
    """The datasheet's peak of a GPU, or None if it is not in our table.

    Args:
        gpu: as torch names it.
        precision: `float32`, `bfloat16` or `float16`.
        tf32: whether float32 products may be taken in TF32.
    """
    for pattern, peak in PEAKS.items():
        if re.fullmatch(pattern, gpu):
            half = precision in ("bfloat16", "float16")
            tera = peak.half if half else peak.tf32 if tf32 else peak.float32
            if precision not in ("bfloat16", "float16", "float32"):
                return None
            shown = "TF32" if precision == "float32" and tf32 else precision
            return Limit(tera * 1e12, f"the datasheet's {tera:.4g} TFLOP/s ({gpu}, {shown})")
    return None


def measured(precision: torch.dtype, seconds: float = MEASURE_SECONDS) -> Limit:
    """The speed of a square matrix product on this CPU, the best of many, in about `seconds`.

    No theory says what a CPU can do under the clock and the company it has today; its own fastest
    product does. Other programs only make it slower and come and go, so there are several tries
    with a pause between them. Draws no random numbers.
    """
    best = 0.0
    for attempt in range(MEASURE_TRIES):
        if attempt:
            time.sleep(seconds / 4)
        best = max(best, _fastest_product(precision, seconds / MEASURE_TRIES))
    return Limit(best, f"the matrix product measured here, {best / 1e9:.3g} GFLOP/s")


def _fastest_product(precision: torch.dtype, seconds: float) -> float:
    """FLOP/s."""
    import torch

    began = time.perf_counter()
    best = 0.0
    for size in MEASURE_SIZES:
        # Small whole numbers: the speed must not depend on denormals or overflow.
        a = (torch.arange(size * size, dtype=torch.float32) % 7 - 3).view(size, size)
        a = a.to(precision)
        spent = 0.0
        while True:
            start = time.perf_counter()
            a @ a.t()  # the second operand lies as a linear layer's weight does
            last = time.perf_counter() - start
            best, spent = max(best, 2 * size**3 / last), spent + last
            left = seconds - (time.perf_counter() - began)
            if spent > seconds / 4 or last > left:
                break
        if 8 * last > left:  # what the next size would take
            break
    return best


def speed_limit(device: torch.device, precision: torch.dtype) -> Limit | None:
    """What MFU is a share of on this device, or None if it is not known."""
    import torch

    if device.type == "cpu":
        with torch.no_grad():
            return measured(precision)
    if device.type == "cuda":
        tf32 = torch.get_float32_matmul_precision() != "highest"
        name = str(precision).removeprefix("torch.")
        return datasheet(torch.cuda.get_device_name(device), name, tf32=tf32)
    return None
