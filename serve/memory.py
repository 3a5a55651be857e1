"""How many pages the KV cache gets: enough for every running sequence, within a byte budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gpt.cachespec import CacheSpec
from gpt.config import GPTConfig
from gpt.errors import ServerError
from gpt.machine import GIB, free_memory

if TYPE_CHECKING:
    from serve.engine import Engine

DEFAULT_SHARE = 0.25
"""Part of the free memory that the caches of all models may take unless a budget is given."""


@dataclass(frozen=True)
class Pool:
    """A sized cache, by groups of layers that remember the same.

    Attributes:
        n_pages: pages of each group in all, the null page included.
        page_size: tokens a page holds.
        page_bytes: bytes of one page of each group, over its layers.
        groups: what each group is, in words.
        budget: the bytes it was allowed.
    """

    n_pages: list[int]
    page_size: int
    page_bytes: list[int]
    groups: list[str]
    budget: int

    @property
    def bytes(self) -> int:
        return sum(n * each for n, each in zip(self.n_pages, self.page_bytes, strict=True))

    def __str__(self) -> str:
        if len(self.groups) == 1:
            takes = f"{self.n_pages[0] - 1} pages of {self.page_size} tokens, {_mib(self.bytes)}"
            if self.groups[0]:
                takes += f" for {self.groups[0]}"
        else:
            each = [
                f"{n - 1} for {group}, {_mib(n * size)}"
                for n, size, group in zip(self.n_pages, self.page_bytes, self.groups, strict=True)
            ]
            takes = (
                f"pages of {self.page_size} tokens: {'; '.join(each)}; {_mib(self.bytes)} in all"
            )
        return f"{takes} (budget {_mib(self.budget)})"


def size_pool(
    config: GPTConfig,
    *,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_running: int,
    prefill_chunk: int,
    budget: int | None = None,
    share: float = DEFAULT_SHARE,
) -> Pool:
    """A pool for `max_running` full contexts, or for as many as the budget holds.

    A group of layers that forget what is behind a window gets pages for the window alone, and for
    the chunk that is read beside it.

    Args:
        prefill_chunk: most prompt tokens of one sequence in one step.
        budget: bytes; None takes a share of the free memory.
        share: which, from 0 to 1.

    Raises:
        ServerError: not even one full context fits, or there is not the memory that was asked for.
    """
    given = budget is not None
    if budget is None:
        budget = int(share * free_memory(device))
    spec = CacheSpec.of(config)
    page_bytes = spec.page_bytes(page_size, dtype.itemsize)

    def pools(texts: int, budget: float) -> list[int] | None:
        return spec.pool_sizes(
            config.block_size,
            page_size=page_size,
            itemsize=dtype.itemsize,
            texts=texts,
            chunk=prefill_chunk,
            budget=budget,
        )

    n_pages = pools(max_running, budget)
    if n_pages is None:
        allowed = "the budget given" if given else f"{share:.0%} of the free memory"
        least = pools(1, math.inf)
        assert least is not None, "without a budget there is always room"
        needed = sum(n * each for n, each in zip(least, page_bytes, strict=True))
        raise ServerError(
            f"{allowed} is {budget / GIB:.3g} GiB, but the KV cache of one full context of "
            f"{config.block_size} tokens takes {needed / GIB:.3g} GiB; "
            "set --kv-cache-gb to that or more"
        )
    plain = len(spec.groups) == 1 and spec.memories[0].window is None
    groups = [""] if plain else [str(group) for group in spec.groups]
    pool = Pool(n_pages, page_size, page_bytes, groups, budget)
    if pool.bytes > (free := free_memory(device)):
        # The system would promise the memory, and end the process once it is used.
        raise ServerError(
            f"the KV cache of {pool.bytes / GIB:.3g} GiB does not fit: {free / GIB:.3g} GiB are "
            "free; set --kv-cache-gb or --max-running lower"
        )
    return pool


def check_room_beside(engine: Engine, device: torch.device) -> None:
    """Raises ServerError unless there is memory for a second engine of this one's size: what takes
    its place is loaded while it goes on."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the last that was replaced has left counts as taken
    weights = engine.model.num_params() * engine.dtype.itemsize
    needed = weights + (0 if engine.pool is None else engine.pool.bytes)
    if needed > (free := free_memory(device)):
        raise ServerError(
            f"a second model beside the one that serves takes some {needed / GIB:.3g} GiB, and "
            f"{free / GIB:.3g} GiB are free; lower --kv-cache-gb or --max-running, or start the "
            "server anew"
        )


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"
