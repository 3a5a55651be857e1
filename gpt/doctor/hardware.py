"""Processor, memory, threads, measured speed, GPU and compiler."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpt.doctor.report import Finding, count
from gpt.doctor.trial import MEASURE, Tried
from gpt.machine import host_memory

TOPIC = "Machine"
LITTLE_MEMORY = 2e9  # bytes: torch alone takes a fifth of it

FEATURES = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512f",),
    "bf16": ("avx512_bf16", "avx_ne_convert", "bf16"),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "AMX": ("amx_tile",),
    "NEON": ("asimd",),
    "SVE": ("sve",),
    "i8mm": ("i8mm",),
}
"""What matters to matrix products, and how Linux calls it on x86-64 and on ARM."""

FASTER = 1.2
SLOWER = 0.8


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Processors that this process may use: by affinity, or what a container's quota gives."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no container, or "max"
        return cores


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Iterator[Finding]:
    """Model, cores and the instructions that matter."""
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    named = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    model = named[1].strip() if named else platform.processor() or platform.machine()
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    there = [feature for feature, names in FEATURES.items() if known & set(names)]
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    wanted = ("AVX2", "AVX-512", "bf16", "VNNI", "AMX") if x86 else ("NEON", "SVE", "bf16", "i8mm")
    missing = [feature for feature in wanted if feature not in there]
    cores = usable_cores()
    found = f"{model}, {cores:g} of {os.cpu_count()} cores usable"
    if known:
        found += f"; {', '.join(there) or 'no vector instructions'}"
        found += f" (not {', '.join(missing)})" if missing else ""
    slow = bool(known) and not {"AVX2", "NEON"} & set(there)
    yield Finding(
        TOPIC,
        "processor",
        "note" if slow else "ok",
        found,
        "without AVX2 or NEON everything is several times slower; use another machine to train"
        if slow
        else "",
        {"model": model, "cores": cores, "features": there},
    )


def memory() -> Iterator[Finding]:
    found = host_memory()
    total = "" if found.total is None else f" of {count(found.total, 'B')}"
    little = found.free < LITTLE_MEMORY
    yield Finding(
        TOPIC,
        "memory",
        "note" if little else "ok",
        f"{count(found.free, 'B')} free{total} ({found.name})",
        "end other programs, or take a small model (--model.preset nano) and a small batch"
        if little
        else "",
        {"free": found.free, "total": found.total, "of": found.name},
    )


def threads(tried: Mapping[str, Tried]) -> Iterator[Finding]:
    """Torch's threads against the cores that there are."""
    given = os.environ.get("OMP_NUM_THREADS")
    cores = max(1, round(usable_cores()))
    facts = tried["torch"].facts if "torch" in tried else {}
    environment = f"OMP_NUM_THREADS={given}" if given else "OMP_NUM_THREADS is not set"
    if not facts:
        yield Finding(TOPIC, "threads", "ok", f"{cores} cores, {environment}")
        return
    number = int(facts["threads"])
    advice = ""
    if number > cores:
        advice = f"more threads than cores get into each other's way: OMP_NUM_THREADS={cores}"
    elif number < cores and given:
        advice = f"one process can use all cores: OMP_NUM_THREADS={cores}, or unset it"
    yield Finding(
        TOPIC,
        "threads",
        "note" if advice else "ok",
        f"torch uses {number} for {cores} {'core' if cores == 1 else 'cores'} "
        f"({environment}), with its kernels for {facts['kernels']}",
        advice,
        {"torch": number, "cores": cores},
    )


def speed(tried: Mapping[str, Tried]) -> Iterator[Finding]:
    """Measured matrix products in both precisions, and which of them to use."""
    outcome = tried.get(MEASURE)
    if outcome is None:
        yield Finding(TOPIC, "speed", "ok", "not measured (--fast)")
        return
    if outcome.error is not None:
        yield Finding(TOPIC, "speed", "note", f"could not be measured: {outcome.error}")
        return
    single, half = outcome.facts["float32"], outcome.facts["bfloat16"]
    one, number = outcome.facts["one_thread"], outcome.facts["threads"]
    # With one thread, other programs matter least.
    ratio = one["bfloat16"] / one["float32"]
    if ratio < SLOWER:
        verdict = f"bf16 is {1 / ratio:.3g} times slower here and must not be used on this CPU"
        advice = "leave --trainer.precision at 32-true and --dtype at float32"
    elif ratio > FASTER:
        verdict = f"bf16 is {ratio:.2g} times faster here"
        advice = "use it: --trainer.precision bf16-mixed to train, --dtype bfloat16 to serve"
    else:
        verdict = "both are alike here; bf16 saves memory only"
        advice = ""
    load = outcome.facts["load"]
    busy = load is not None and load > max(1.0, usable_cores())
    company = f". Other programs run (load {load:.2g}): it could be more" if busy else ""
    yield Finding(
        TOPIC,
        "speed",
        "ok",
        f"matrix products: float32 {count(single, 'FLOP/s')} ({count(one['float32'], 'FLOP/s')} "
        f"with one thread of {number}), bf16 {count(half, 'FLOP/s')}; {verdict}{company}",
        advice,
        outcome.facts,
    )


def gpu(tried: Mapping[str, Tried]) -> Iterator[Finding]:
    """What torch sees; and a driver without a torch that fits it."""
    facts = tried["torch"].facts if "torch" in tried else {}
    driver = any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
    if not facts:
        found = "there is a driver" if driver else "no driver"
        yield Finding(TOPIC, "GPU", "ok", f"{found}; torch was not asked")
        return
    for each in facts["gpus"]:
        halves = "bf16" if each["bf16"] else "no bf16"
        yield Finding(
            TOPIC,
            "GPU",
            "ok",
            f"{each['name']}, {count(each['bytes'], 'B')}, compute {each['capability']}, {halves}",
            "the trainer takes it by itself; --device cuda makes sample and serve use it"
            + ("" if each["bf16"] else "; keep --trainer.precision at 32-true"),
            each,
        )
    if facts["gpus"]:
        return
    if facts["mps"]:
        yield Finding(TOPIC, "GPU", "ok", "Apple's, through mps", "sample and serve: --device mps")
    elif driver:
        built = facts["cuda"] or facts["hip"]
        yield Finding(
            TOPIC,
            "GPU",
            "note",
            "there is a driver, but torch sees no GPU: "
            + (f"it is built for {built}" if built else "it is built for CPUs alone"),
            "install the build of torch that fits the driver, or update the driver"
            if built
            else "install a build of torch with CUDA",
        )
    else:
        yield Finding(TOPIC, "GPU", "ok", "none; everything runs on the CPU")


def compiler() -> Iterator[Finding]:
    """The C++ compiler that torch.compile calls on a CPU."""
    asked = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name]
    path = next(filter(None, map(shutil.which, asked)), None)
    if path is None:
        yield Finding(
            TOPIC,
            "compiler",
            "note",
            "no C++ compiler; only --model.compile true needs one",
            "install g++ (apt-get install g++, xcode-select --install), or name one in CXX",
        )
        return
    done = subprocess.run(
        [path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20
    )
    lines = done.stdout.splitlines() or ["it does not tell its version"]
    yield Finding(
        TOPIC,
        "compiler",
        "ok" if done.returncode == 0 else "note",
        f"{path} ({lines[0]}), for --model.compile true",
        "" if done.returncode == 0 else f"{path} --version fails; mend it or name another in CXX",
        {"path": path},
    )
