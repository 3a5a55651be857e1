"""Which pages of the KV cache are free: the host's side of the cache. Pure Python, no torch.

`gpt.cache.KVCache` holds the tensors; this holds the numbers. A scheduler needs only this half.
"""

from __future__ import annotations

NULL_PAGE = 0
"""Never handed out: block tables of unequal length are padded with it."""


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` tokens fill (the last one perhaps in part)."""
    return -(-tokens // page_size)


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

    def release(self, pages: list[int]) -> None:
        """Give pages back. Raises ValueError for one that is not out: it would be owned twice."""
        for page in pages:
            if page not in self._used:
                raise ValueError(f"page {page} is released but not in use")
            self._used.remove(page)
            self._free.append(page)

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Raise AssertionError unless the block tables own exactly the pages that are out."""
        owned = [page for table in tables for page in table]
        if len(owned) != len(set(owned)):
            raise AssertionError("a page is owned by two sequences")
        if set(owned) != self._used:
            raise AssertionError(f"pages leaked or lost: {sorted(self._used ^ set(owned))}")
        if sorted([*self._free, *self._used]) != list(range(1, self.n_pages)):
            raise AssertionError("free and used pages do not add up to the pool")
