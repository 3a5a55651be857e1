"""How many pages the KV cache gets: enough for every running sequence, within a byte budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.errors import ServerError
from gpt.machine import GIB, free_memory
from gpt.pages import pages_for

DEFAULT_SHARE = 0.25
"""Part of the free memory that the cache may take unless a budget is given."""


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
