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
from dataclasses import dataclass
from typing import Protocol

from gpt.patterns import Memory
from gpt.pool import NULL_PAGE, PageAllocator


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


class Holder(Protocol):
    """Who holds pages; `gpt.sequence.Sequence` is one."""

    computed: int
    """Tokens in the cache: the next query stands at this position."""
    tables: list[list[int]]
    """A block table for each group; no tables: no pages."""
    ids: list[int]

    def page_keys(self, page_size: int) -> Seq[bytes]:
        """By what its full pages are known to others (`gpt.prefix`)."""


@dataclass(frozen=True)
class Hit:
    """The beginning of a text that is in the cache already.

    Attributes:
        tokens: how long it is; whole pages.
        tables: the pages in each group, with the null page for those that need not be there; empty
            if there is no hit.
    """

    tokens: int = 0
    tables: tuple[list[int], ...] = ()


NO_HIT = Hit()


class CachePages:
    """The pages of all groups, and who gets them.

    The owner's loop is: `release_behind` for every sequence, `grow` for those that are to run, a
    step; `release` for one that is over. With a prefix cache besides: `adopt` what `find` has found
    for one that starts, and `publish` what a step has filled.

    Args:
        memories: what each group must remember (`gpt.cachespec.CacheSpec.memories`).
        n_pages: pages of each group's pool, its null page included; a number is that of every pool.
        page_size: tokens a page holds.
        prefix_cache: whether full pages can be found by others.
    """

    def __init__(
        self,
        memories: Seq[Memory],
        n_pages: int | Seq[int],
        page_size: int,
        *,
        prefix_cache: bool = False,
    ) -> None:
        sizes = [n_pages] * len(memories) if isinstance(n_pages, int) else list(n_pages)
        if not memories or len(sizes) != len(memories):
            raise ValueError(f"{len(sizes)} pools for {len(memories)} groups")
        self.memories = tuple(memories)
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.pools = tuple(PageAllocator(n, page_size) for n in sizes)

    @property
    def used(self) -> int:
        """Pages that somebody holds, over all groups."""
        return sum(pool.used for pool in self.pools)

    @property
    def free(self) -> list[int]:
        """Pages that can still be handed out, of each group; what only the prefix cache keeps is
        among them."""
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

    def lacking(self, holder: Holder, tokens: int, chunk: int, hit: Hit = NO_HIT) -> list[int]:
        """Most pages of each group that it takes from the free ones on its way to `tokens` tokens,
        in chunks of up to `chunk`. After `release_behind`.

        Args:
            hit: where it would start. Pages of it that others hold are not taken from the free.
        """
        chunk = min(chunk, max(1, tokens - holder.computed))
        held = self._held(holder)
        if hit.tables:
            held = [
                sum(map(pool.is_used, table))
                for table, pool in zip(hit.tables, self.pools, strict=True)
            ]
        return [max(0, m - h) for m, h in zip(self.most(tokens, chunk), held, strict=True)]

    def find(self, holder: Holder, limit: int) -> Hit:
        """The longest beginning of its text, up to `limit` tokens, that every group can serve.
        Takes nothing."""
        if not self.prefix_cache or limit < self.page_size:
            return NO_HIT
        keys = holder.page_keys(self.page_size)[: limit // self.page_size]
        found: list[list[int]] = []
        for memory, pool in zip(self.memories, self.pools, strict=True):
            pages: list[int] = []
            for key in keys:
                page = pool.find(key)
                if page is None and memory.window is None:
                    break  # none of the later ones is of use to anybody
                pages.append(NULL_PAGE if page is None else page)
            keys = keys[: len(pages)]
            found.append(pages)
        runs = [_runs(pages) for pages in found]
        for end in range(len(keys), 0, -1):
            splits = [split_table(m, end * self.page_size, self.page_size) for m in self.memories]
            if all(
                run[end] >= end - first and run[sinks] >= sinks
                for run, (sinks, first) in zip(runs, splits, strict=True)
            ):
                tables = [
                    [*pages[:sinks], *[NULL_PAGE] * (first - sinks), *pages[first:end]]
                    for pages, (sinks, first) in zip(found, splits, strict=True)
                ]
                return Hit(end * self.page_size, tuple(tables))
        return NO_HIT

    def comes(self, holder: Holder, hit: Hit, limit: int, others: Iterable[Holder]) -> bool:
        """Whether one of the others is about to fill the page that would make the hit longer."""
        if not self.prefix_cache:
            return False
        end = hit.tokens + self.page_size
        if end > limit:
            return False
        place = hit.tokens // self.page_size
        key = holder.page_keys(self.page_size)[place]
        return any(
            other.computed < end <= len(other.ids) and other.page_keys(self.page_size)[place] == key
            for other in others
        )

    def adopt(self, holder: Holder, hit: Hit) -> None:
        """Start a holder without pages where a hit ends that was found just now."""
        if not hit.tables:
            return
        for table, pool in zip(hit.tables, self.pools, strict=True):
            pool.share(page for page in table if page != NULL_PAGE)
        holder.tables = [list(table) for table in hit.tables]
        holder.computed = hit.tokens

    def filled(self, holder: Holder, n: int) -> list[list[int]]:
        """The pages of each group that its last `n` computed tokens filled up."""
        first = (holder.computed - n) // self.page_size
        return [table[first : holder.computed // self.page_size] for table in holder.tables]

    def publish(self, holder: Holder, n: int) -> None:
        """Let the pages be found that its last `n` computed tokens filled up."""
        if not self.prefix_cache:
            return
        first = (holder.computed - n) // self.page_size
        keys = holder.page_keys(self.page_size)[first:]
        for pages, pool in zip(self.filled(holder, n), self.pools, strict=True):
            for page, key in zip(pages, keys, strict=False):
                pool.publish(page, key)

    def check_integrity(self, holders: Iterable[Holder]) -> None:
        """Raise AssertionError unless the holders' tables name exactly the pages that are out and
        have every page that a query from `computed` on needs, and what can be found is full and of
        the text that it is known by."""
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
                self._check_keys(holder, table, pool)
            pool.check_integrity(tables)

    def _check_keys(self, holder: Holder, table: list[int], pool: PageAllocator) -> None:
        known = [pool.key_of(page) for page in table]
        full = holder.computed // self.page_size
        if any(key is not None for key in known[full:]):
            raise AssertionError("a page that is not full can be found")
        if self.prefix_cache:
            keys = holder.page_keys(self.page_size)
            if any(a not in (None, b) for a, b in zip(known[:full], keys, strict=False)):
                raise AssertionError("a page is known by another text than its holder's")

    def _held(self, holder: Holder) -> list[int]:
        """Pages of each group that it holds, known without looking at the tables."""
        if not holder.tables:
            return [0] * len(self.pools)
        held = []
        for table, memory in zip(holder.tables, self.memories, strict=True):
            sinks, first = split_table(memory, holder.computed, self.page_size)
            held.append(len(table) - (first - sinks))
        return held


def _runs(pages: Seq[int]) -> list[int]:
    """For each number of leading pages, how many of them at their end are there without a gap."""
    runs = [0]
    for page in pages:
        runs.append(0 if page == NULL_PAGE else runs[-1] + 1)
    return runs
