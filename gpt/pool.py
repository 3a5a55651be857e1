"""A pool of pages: which are free, which are out, and which are out no more but still known.

A page that is full never changes again, so others whose text begins alike may read it, too. It is
known by a key that stands for all that its contents depend on (`gpt.prefix`), and has as many
references as block tables name it. Without any it is idle: it keeps its contents, counts as free,
and is found by its key until somebody needs a page and no blank one is left. The idle page that was
given back first is taken then.

    allocate ─▶ used (1 reference) ──────── release ───────▶ blank
                  │ publish                                    ▲
                  ▼                                            │ allocate, when no blank one is
                used, known ◀── share ──▶ release ──▶ idle ────┘ left: its key is forgotten

Pure Python, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

NULL_PAGE = 0
"""Never handed out: stands in a block table for a page that was given back, and pads tables of
unequal length."""


class PageAllocator:
    """Pages 1 to `n_pages - 1`; page 0 is the null page.

    Blank pages are handed out again last-in first-out, so a small working set stays in the
    processor's cache.
    """

    def __init__(self, n_pages: int, page_size: int) -> None:
        if n_pages < 2 or page_size < 1:
            raise ValueError(f"need n_pages >= 2 and page_size >= 1, got {n_pages}, {page_size}")
        self.n_pages = n_pages
        self.page_size = page_size
        self._blank = list(range(n_pages - 1, NULL_PAGE, -1))
        self._used: dict[int, int] = {}  # references of each page that is out
        self._idle: dict[int, None] = {}  # in the order in which they were given back
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Pages that can still be handed out."""
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that somebody holds, each counted once."""
        return len(self._used)

    @property
    def idle(self) -> int:
        """Pages that nobody holds and that can still be found."""
        return len(self._idle)

    @property
    def capacity(self) -> int:
        """Pages in all, the null page left out."""
        return self.n_pages - 1

    @property
    def blank_pages(self) -> Seq[int]:
        """Pages that nobody holds and nobody can find: what stands in them matters to no one."""
        return self._blank

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) if fewer are free."""
        if count > self.free:
            return None
        pages = [self._blank.pop() for _ in range(min(count, len(self._blank)))]
        evicted = [self._evict() for _ in range(count - len(pages))]
        pages += sorted(evicted)  # a text whose pages lie side by side is read without a copy
        self._used.update(dict.fromkeys(pages, 1))
        return pages

    def _evict(self) -> int:
        page = next(iter(self._idle))
        del self._idle[page]
        del self._page_of[self._key_of.pop(page)]
        return page

    def release(self, pages: Seq[int]) -> None:
        """Give pages back, each by one reference. Raises ValueError for one that is not out: it
        would be owned twice."""
        # They come out again in their order, side by side as before; and of those that are known
        # the last go first, which nobody finds without the ones before.
        for page in reversed(pages):
            count = self._used.get(page)
            if count is None:
                raise ValueError(f"page {page} is released but not in use")
            if count > 1:
                self._used[page] = count - 1
                continue
            del self._used[page]
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._blank.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Let a page that is out be found. Nothing changes if another of the same contents is
        known already: this one stays its holder's own.

        Raises:
            ValueError: it is not in use, or known by another key.
        """
        if page not in self._used or self._key_of.get(page, key) != key:
            raise ValueError(f"page {page} is not in use, or known by another key")
        if self._page_of.setdefault(key, page) == page:
            self._key_of[page] = key

    def find(self, key: bytes) -> int | None:
        """The page known by the key. Takes nothing."""
        return self._page_of.get(key)

    def is_used(self, page: int) -> bool:
        """Whether somebody holds the page."""
        return page in self._used

    def key_of(self, page: int) -> bytes | None:
        """By what the page can be found, if it can."""
        return self._key_of.get(page)

    def share(self, pages: Iterable[int]) -> None:
        """Take known pages, each by one more reference. Raises ValueError for one that is not."""
        for page in pages:
            if page not in self._key_of:
                raise ValueError(f"page {page} is shared but not known")
            self._idle.pop(page, None)
            self._used[page] = self._used.get(page, 0) + 1

    def check_integrity(self, tables: Iterable[Seq[int]]) -> None:
        """Raise AssertionError unless references are those of the block tables, each page is
        blank, used or idle, and keys and pages name each other."""
        owned = Counter(page for table in tables for page in table if page != NULL_PAGE)
        for page, count in owned.items():
            if count > 1 and page not in self._key_of:
                raise AssertionError("a page is owned by two sequences")
        if owned.keys() != self._used.keys():
            raise AssertionError(f"pages leaked or lost: {sorted(self._used.keys() ^ owned)}")
        if owned != self._used:
            wrong = {page: n for page, n in self._used.items() if n != owned[page]}
            raise AssertionError(f"references that no table has, or too few: {wrong}")
        if sorted([*self._blank, *self._used, *self._idle]) != list(range(1, self.n_pages)):
            raise AssertionError("blank, used and idle pages do not add up to the pool")
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            raise AssertionError("keys and pages do not name each other")
        if not self._idle.keys() <= self._key_of.keys():
            raise AssertionError("an idle page is known by no key")
        if not self._key_of.keys().isdisjoint(self._blank):
            raise AssertionError("a blank page can be found")
