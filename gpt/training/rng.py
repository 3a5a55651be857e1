"""Every stream of random numbers that training may draw from, as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of Python's, numpy's and torch's generators, and of the device's own.

    Plain data and tensors: a checkpoint with it in loads without running code.
    """
    legacy: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = legacy
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "cpu": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def rng_states(device: torch.device) -> list[dict[str, Any]]:
    """`rng_state` of every process, by rank. All of them must call it."""
    mine = rng_state(device)
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, mine)
    return states


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on from `state`. What it lacks, and devices that are not in use here, are left alone."""
    torch.set_rng_state(state["cpu"])
    if "python" in state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])
