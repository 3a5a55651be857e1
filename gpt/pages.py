"""Which pages of the KV cache are whose: the host's side of the cache. Pure Python, no torch.

`gpt.cache.KVCache` holds the tensors; this holds the numbers. A scheduler needs only this half.

Layers that must remember the same positions form a group (`gpt.cachespec`). Each group has a pool
of its own, and a sequence a block table for each: page `table[i]` holds positions `i * page_size`
and up, whatever has been given back since. Nothing is renumbered and there is no ring: once the
window has left a page for good, its entry becomes the null page and the page is somebody else's.

    window:5+sinks:1, pages of 4         position  0   4   8   12  16  20
    after 21 tokens                      table     7   ∅   ∅   ∅   2   5      the next query is 21:
                                                   ▪·······────────▪▪▪▪▪      it needs 0 and 17 on
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from gpt.patterns import Memory

NULL_PAGE = 0
"""Never handed out: stands in a block table for a page that was given back, and pads tables of
unequal length."""


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` tokens fill (the last one perhaps in part)."""
    return -(-tokens // page_size)


def split_table(memory: Memory, query: int, page_size: int) -> tuple[int, int]:
    """`(sinks, first)`: what a query at `query` or later needs stands in the pages before `sinks`
    and in those from `first` on; the pages between may go. (0, 0) if there are none between."""
    first = memory.first(query) // page_size
    sinks = pages_for(memory.sinks, page_size)
    return (sinks, first) if first > sinks else (0, 0)


def most_pages(memory: Memory, tokens: int | None, chunk: int, page_size: int) -> int:
    """Most pages that a sequence holds at once on its way to `tokens` tokens in chunks of up to
    `chunk`. None: it goes on without end, which only a memory with a bound can."""
    most = None if tokens is None else pages_for(tokens, page_size)
    if memory.window is None:
        if most is None:
            raise ValueError("a memory of every position has no bound")
        return most
    # The first query of a chunk looks `window - 1` back, and that many and the chunk touch one page
    # more than they fill if they lie badly.
    touched = pages_for(memory.window + chunk - 2, page_size) + 1
    held = pages_for(memory.sinks, page_size) + touched
    return held if most is None else min(held, most)


class PageAllocator:
    """A free list over pages 1 to `n_pages - 1`; page 0 is the null page.

    Freed pages are handed out again last-in first-out, so a small working set stays in the
    processor's cache.
    """

    def __init__(self, n_pages: int, page_size: int) -> None:
        if n_pages < 2 or page_size < 1:
            raise ValueError(f"need n_pages >= 2 and page_size >= 1, got {n_pages}, {page_size}")
        self.n_pages = n_pages
        self.page_size = page_size
        self._free = list(range(n_pages - 1, NULL_PAGE, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        """Pages that can still be handed out."""
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    @property
    def capacity(self) -> int:
        """Pages in all, the null page left out."""
        return self.n_pages - 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def release(self, pages: Seq[int]) -> None:
        """Give pages back. Raises ValueError for one that is not out: it would be owned twice."""
        for page in reversed(pages):  # they come out again in their order, side by side as before
            if page not in self._used:
                raise ValueError(f"page {page} is released but not in use")
            self._used.remove(page)
            self._free.append(page)

    def check_integrity(self, tables: Iterable[Seq[int]]) -> None:
        """Raise AssertionError unless the block tables own exactly the pages that are out."""
        owned = [page for table in tables for page in table if page != NULL_PAGE]
        if len(owned) != len(set(owned)):
            raise AssertionError("a page is owned by two sequences")
        if set(owned) != self._used:
            raise AssertionError(f"pages leaked or lost: {sorted(self._used ^ set(owned))}")
        if sorted([*self._free, *self._used]) != list(range(1, self.n_pages)):
            raise AssertionError("free and used pages do not add up to the pool")


class Holder(Protocol):
    """Who holds pages; `gpt.sequence.Sequence` is one."""

    computed: int
    """Tokens in the cache: the next query stands at this position."""
    tables: list[list[int]]
    """A block table for each group; no tables: no pages."""


class CachePages:
    """The pages of all groups, and who gets them.

    The owner's loop is: `release_behind` for every sequence, `grow` for those that are to run, a
    step; `release` for one that is over.

    Args:
        memories: what each group must remember (`gpt.cachespec.CacheSpec.memories`).
        n_pages: pages of each group's pool, its null page included; a number is that of every pool.
        page_size: tokens a page holds.
    """

    def __init__(self, memories: Seq[Memory], n_pages: int | Seq[int], page_size: int) -> None:
        sizes = [n_pages] * len(memories) if isinstance(n_pages, int) else list(n_pages)
        if not memories or len(sizes) != len(memories):
            raise ValueError(f"{len(sizes)} pools for {len(memories)} groups")
        self.memories = tuple(memories)
        self.page_size = page_size
        self.pools = tuple(PageAllocator(n, page_size) for n in sizes)

    @property
    def used(self) -> int:
        """Pages that are out, over all groups."""
        return sum(pool.used for pool in self.pools)

    @property
    def free(self) -> list[int]:
        """Pages that can still be handed out, of each group."""
        return [pool.free for pool in self.pools]

    @property
    def capacity(self) -> list[int]:
        """Pages of each group in all."""
        return [pool.capacity for pool in self.pools]

    def most(self, tokens: int, chunk: int) -> list[int]:
        """Most pages of each group that a sequence holds at once: see `most_pages`."""
        return [most_pages(memory, tokens, chunk, self.page_size) for memory in self.memories]

    def grow(self, holder: Holder, tokens: int) -> bool:
        """Room for the first `tokens` tokens in every group; False, and nothing taken in any, if a
        pool has too few pages left."""
        tables = holder.tables or [[] for _ in self.pools]
        stop = pages_for(tokens, self.page_size)
        missing = [max(0, stop - len(table)) for table in tables]
        if any(n > pool.free for n, pool in zip(missing, self.pools, strict=True)):
            return False
        for table, n, pool in zip(tables, missing, self.pools, strict=True):
            if n:
                pages = pool.allocate(n)
                assert pages is not None
                table.extend(pages)
        holder.tables = tables
        return True

    def release_behind(self, holder: Holder) -> None:
        """Give back the pages that no query from `computed` on can see. Costs the pages given back,
        however long the table is."""
        for table, memory, pool in zip(holder.tables, self.memories, self.pools, strict=False):
            sinks, first = split_table(memory, holder.computed, self.page_size)
            # All before the last released page, down to the sinks, went in earlier calls.
            start = first
            while start > sinks and table[start - 1] != NULL_PAGE:
                start -= 1
            if start < first:
                pool.release(table[start:first])
                table[start:first] = [NULL_PAGE] * (first - start)

    def release(self, holder: Holder) -> None:
        """Give back all of its pages."""
        for table, pool in zip(holder.tables, self.pools, strict=False):
            pool.release([page for page in table if page != NULL_PAGE])
        holder.tables = []

    def lacking(self, holder: Holder, tokens: int, chunk: int) -> list[int]:
        """Most pages of each group that it takes besides those it holds on its way to `tokens`
        tokens, in chunks of up to `chunk`. After `release_behind`."""
        chunk = min(chunk, max(1, tokens - holder.computed))
        return [
            max(0, most - held)
            for most, held in zip(self.most(tokens, chunk), self._held(holder), strict=True)
        ]

    def check_integrity(self, holders: Iterable[Holder]) -> None:
        """Raise AssertionError unless the holders' tables own exactly the pages that are out, and
        have every page that a query from `computed` on needs."""
        holders = list(holders)
        for group, (memory, pool) in enumerate(zip(self.memories, self.pools, strict=True)):
            tables = []
            for holder in holders:
                if not holder.tables:
                    if holder.computed:
                        raise AssertionError(f"{holder.computed} tokens in no pages")
                    continue
                table = holder.tables[group]
                sinks, first = split_table(memory, holder.computed, self.page_size)
                if len(table) < pages_for(holder.computed, self.page_size):
                    raise AssertionError(f"{holder.computed} tokens in {len(table)} pages")
                if NULL_PAGE in table[:sinks] + table[first:]:
                    raise AssertionError("a page that is still needed was given back")
                tables.append(table)
            pool.check_integrity(tables)

    def _held(self, holder: Holder) -> list[int]:
        """Pages of each group that it holds, known without looking at the tables."""
        if not holder.tables:
            return [0] * len(self.pools)
        held = []
        for table, memory in zip(holder.tables, self.memories, strict=True):
            sinks, first = split_table(memory, holder.computed, self.page_size)
            held.append(len(table) - (first - sinks))
        return held
