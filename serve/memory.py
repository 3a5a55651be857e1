"""How many pages the KV cache gets: enough for every running sequence, within a byte budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.errors import ServerError
from gpt.pages import pages_for

DEFAULT_SHARE = 0.25
"""Part of the free memory that the cache may take unless a budget is given."""

GIB = 2**30


@dataclass(frozen=True)
class Pool:
    """A sized cache.

    Attributes:
        n_pages: pages in all, the null page included.
        page_size: tokens a page holds.
        page_bytes: bytes of one page over all layers.
        budget: the bytes it was allowed.
    """

    n_pages: int
    page_size: int
    page_bytes: int
    budget: int

    def __str__(self) -> str:
        return (
            f"{self.n_pages - 1} pages of {self.page_size} tokens, "
            f"{self.n_pages * self.page_bytes / 2**20:.1f} MiB "
            f"(budget {self.budget / 2**20:.1f} MiB)"
        )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had: of the GPU, or of the machine or container, if that is less."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [_meminfo(Path("/proc/meminfo")), _cgroup(Path("/sys/fs/cgroup"))]
    return min((value for value in found if value is not None), default=4 * GIB)


def size_pool(
    config: GPTConfig,
    *,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_running: int,
    budget: int | None = None,
) -> Pool:
    """A pool for `max_running` full contexts, or for as many as the budget holds.

    Args:
        budget: bytes; None takes `DEFAULT_SHARE` of the free memory.

    Raises:
        ServerError: not even one full context fits.
    """
    given = budget is not None
    if budget is None:
        budget = int(DEFAULT_SHARE * free_memory(device))
    page_bytes = KVCache.page_bytes(config, page_size, dtype)
    context = pages_for(config.block_size, page_size)
    n_pages = min(1 + max_running * context, budget // page_bytes)
    if n_pages < 1 + context:
        allowed = "the budget given" if given else f"{DEFAULT_SHARE:.0%} of the free memory"
        raise ServerError(
            f"{allowed} is {budget / GIB:.3g} GiB, but the KV cache of one full context of "
            f"{config.block_size} tokens takes {(1 + context) * page_bytes / GIB:.3g} GiB; "
            "set --kv-cache-gb to that or more"
        )
    return Pool(n_pages, page_size, page_bytes, budget)


def _meminfo(path: Path) -> int | None:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup(folder: Path) -> int | None:
    """What a container's limit leaves (cgroup v2, as seen from inside)."""
    try:
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        return max(0, limit - used)
    except (OSError, ValueError):  # no container, or "max"
        return None
