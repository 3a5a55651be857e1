"""What a run ran on: the facts without which its numbers cannot be compared or repeated."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata

import torch

from gpt.machine import cpu_name, device_memory
from gpt.native import kernels as native

PACKAGES = ("antiphon", "torch", "lightning", "numpy", "tiktoken")
GIT_SECONDS = 5.0


def environment(device: torch.device, precision: str) -> dict[str, str]:
    """Names and values for people, in the order in which they are read."""
    found = {name: version for name in PACKAGES if (version := _version(name))}
    memory = device_memory(device.type, device.index)
    total = "" if memory.total is None else f"{memory.total / 2**30:.3g} GiB"
    found |= {
        "Python": platform.python_version(),
        "system": platform.platform(),
        "processor": f"{cpu_name()}, {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
        **({"kernels": native.instructions()} if device.type == "cpu" else {}),
        "device": memory.name if device.type == "cuda" else device.type,
        "memory": f"{total} ({memory.name})" if total else memory.name,
        "precision": precision,
    }
    commit = _commit()
    return found | ({"git commit": commit} if commit else {})


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the repository that the run was started in, and whether files differ."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return commit + (", with changes" if changes else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
