"""A model's weights in huge pages of memory, so that fewer addresses are looked up to read them.

Linux hands out memory in pages of 4 KiB, and the processor keeps the places of a few thousand at
hand; a decode step reads a hundred thousand of them. In pages of 2 MiB all have room. A program
must ask for those where `/sys/kernel/mm/transparent_hugepage/enabled` says `madvise`.
"""

from __future__ import annotations

import itertools
import logging
import mmap
from pathlib import Path

import torch
from torch import nn

from gpt.native.linear import WORTH_BYTES

log = logging.getLogger(__name__)

PAGE_BYTES = 2 * 2**20
LINE_BYTES = 64
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@torch.no_grad()
def take_out(model: nn.Module, *, huge: bool = True) -> None:
    """Copy a model's numbers into memory of its own, in huge pages if they are many. What was read
    from a file may be the file itself, mapped into memory: whoever writes over that would change
    the model at work.

    Args:
        huge: whether huge pages are wanted at all.
    """
    settled = huge and sum(p.nbytes for p in model.parameters()) >= WORTH_BYTES and settle(model)
    for tensor in (*(() if settled else model.parameters()), *model.buffers()):
        tensor.data = tensor.data.clone()


@torch.no_grad()
def settle(model: nn.Module) -> bool:
    """Move a model's parameters into huge pages, each to a cache line of its own. Whoever holds a
    view of one is left behind.

    Memory is taken as it is filled, and given back where a parameter had its own, so only one is
    there twice then.

    Returns:
        False if nothing was changed: no such pages here, or not all is on the CPU, or parameters
        are parts of one another or have gaps.
    """
    parameters = list(model.parameters())  # each once, though layers may share it
    if not parameters or any(p.device.type != "cpu" for p in parameters) or not offered():
        return False
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in parameters)
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        return False
    if not all(p.is_contiguous() for p in parameters):
        return False
    room = sum(p.nbytes + LINE_BYTES for p in parameters) + 2 * PAGE_BYTES
    try:
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError) as error:
        log.info("no huge pages for the weights: %s", error)
        return False
    # The tensors keep the mapping alive.
    place = torch.frombuffer(memory, dtype=torch.uint8)
    at = -place.data_ptr() % PAGE_BYTES
    for p in parameters:
        own = place[at : at + p.nbytes].view(p.dtype).view(p.shape)
        own.copy_(p)
        p.data = own
        at += -(-p.nbytes // LINE_BYTES) * LINE_BYTES
    return True


def offered() -> bool:
    """Whether a program that asks may get huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        return "[never]" not in SETTING.read_text()
    except OSError:
        return False
