"""Where to run: the names that users give devices, checked."""

from __future__ import annotations

import torch

from gpt.errors import ConfigError


def check_device(name: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:1`, `mps`. Raises ConfigError if unknown or not on this machine."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; there are cpu, cuda, cuda:N and mps") from None
    present = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not present.get(device.type, False):
        raise ConfigError(f"this machine (or this build of torch) has no device {name!r}; use cpu")
    return device
