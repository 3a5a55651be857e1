"""Which sequences run in the next step: continuous batching under a token budget. Pure Python.

Every step anew (Yu et al., "Orca", OSDI 2022) the scheduler hands out a budget of tokens: first one
token to each sequence that only has its newest token to run, so that those who are streaming never
wait for somebody's long prompt; then prompt chunks (Agrawal et al., "Sarathi-Serve", arXiv
2403.02310). It knows no prefill or decode phase, only `computed` catching up with `ids`.

A prompt is cut at multiples of `prefill_chunk`, as the local sampler cuts it: a chunk that does not
fit into what is left of the budget waits for the next step. With a pace (`serve.pace`) it is cut
smaller where others stream, so that they hardly notice; without one, whatever the company.

Everybody has a place in one order: that of arrival, in which a priority counts as having come so
much earlier. Who waits rises against all who come later, so nobody starves, and as the places of
two never change, they never take turns in pushing each other out. `running` followed by `waiting`
is always in this order, but for one who has just come and pushes in at the next step.

Pages are handed out step by step. When they run out, the last in the order gives up all of its
pages and goes back to the queue; what it had made is kept and its keys and values are computed
again later (recomputation, Kwon et al., arXiv 2309.06180). The first can always go on.

A sequence starts where a hit of the prefix cache ends (`gpt.pages`), at any full page; its chunks
end at the same multiples as ever. While one before it in the order is about to fill the page that
it would need next, it waits for that: so several texts of one prompt, or a crowd with one system
prompt, compute it once. Who is waited for goes on, or is gone, so nobody waits for ever.

Before each step every sequence gives back the pages that have fallen behind a group's window
(`gpt.pages`), so layers with a window take no more pages for a long text than for a short one.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Seq

from gpt.errors import ServerError
from gpt.pages import NO_HIT, CachePages, pages_for
from gpt.pool import NULL_PAGE
from gpt.sequence import Sequence
from serve.pace import Pace

AGEING_SECONDS = 1.0
"""A step of priority is worth as much as having waited so long."""


class QueueFullError(ServerError):
    """As many requests as the server holds at once are held already."""


class PoolTooSmallError(ServerError):
    """A request that could not run even if it had every page of the cache to itself."""


class Scheduler:
    """Decides the work of each step. Not thread-safe: its owner holds a lock.

    The owner's loop is: `schedule`, run the work, `publish` what it filled as far as it went well,
    then `finish` each sequence that is over.

    Args:
        pages: the pools that block tables are filled from.
        max_running: most sequences in one step.
        max_waiting: how many may wait beyond those; more are refused.
        max_waiting_tokens: most tokens that those who wait may have together; None: any number.
        prefill_chunk: most prompt tokens of one sequence in one step.
        token_budget: most tokens in one step. At least, and by default, `prefill_chunk +
            max_running`: then a whole chunk always fits beside the decodes.
        pace: how much of prompts may be read beside texts that are being made; None: as much as the
            budget holds.
    """

    def __init__(
        self,
        pages: CachePages,
        *,
        max_running: int,
        max_waiting: int,
        prefill_chunk: int,
        max_waiting_tokens: int | None = None,
        token_budget: int | None = None,
        pace: Pace | None = None,
    ) -> None:
        least = prefill_chunk + max_running
        if max_running < 1 or max_waiting < 0 or prefill_chunk < 1:
            raise ValueError(
                "need max_running >= 1, max_waiting >= 0 and prefill_chunk >= 1, "
                f"got {max_running}, {max_waiting}, {prefill_chunk}"
            )
        if token_budget is not None and token_budget < least:
            raise ValueError(f"a token budget of {token_budget} is below chunk + decodes = {least}")
        self.pages = pages
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.max_waiting_tokens = max_waiting_tokens
        self.prefill_chunk = prefill_chunk
        self.token_budget = least if token_budget is None else token_budget
        self.pace = pace
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.preemptions = 0
        self._places: dict[Sequence, tuple[float, int]] = {}
        self._unstarted: set[Sequence] = set()  # those that have never been in a step
        self._arrived = 0

    def __len__(self) -> int:
        """Sequences held, running or waiting."""
        return len(self._places)

    @property
    def capacity(self) -> int:
        """Most sequences held at once."""
        return self.max_running + self.max_waiting

    def add(self, sequences: Seq[Sequence], now: float = 0.0) -> None:
        """Put new sequences into the queue, all of them or none.

        Args:
            now: seconds, by any clock that goes forward.

        Raises:
            PoolTooSmallError: one could never be computed.
            QueueFullError: come again later.
        """
        for sequence in sequences:
            self._check_size(sequence)
        if len(self) + len(sequences) > self.capacity:
            asked = f", and this one asks for {len(sequences)} texts" if len(sequences) > 1 else ""
            raise QueueFullError(
                f"{len(self)} requests are running or waiting and the server holds at most "
                f"{self.capacity}{asked}; try again later"
            )
        if self.max_waiting_tokens is not None and self.waiting:
            tokens = sum(len(sequence.ids) for sequence in (*self.waiting, *sequences))
            if tokens > self.max_waiting_tokens:
                raise QueueFullError(
                    f"with this one {tokens} tokens would wait, and the server lets "
                    f"{self.max_waiting_tokens} wait at most; try again later"
                )
        self._unstarted.update(sequences)
        for sequence in sequences:
            self._places[sequence] = (now - sequence.priority * AGEING_SECONDS, self._arrived)
            self._arrived += 1
            bisect.insort(self.waiting, sequence, key=self._places.__getitem__)

    def _check_size(self, sequence: Sequence) -> None:
        most = self.pages.most(sequence.max_cached, self.prefill_chunk)
        for need, capacity in zip(most, self.pages.capacity, strict=True):
            if need > capacity:
                size = self.pages.page_size
                raise PoolTooSmallError(
                    f"this request may take {min(sequence.max_cached, need * size)} tokens of "
                    f"cache, but the server's holds {capacity * size}; ask for fewer tokens"
                )

    def finish(self, sequence: Sequence) -> bool:
        """Forget a sequence, running or waiting, and free its pages. Not while it is in a step.

        Returns:
            Whether it was held; a second call does nothing.
        """
        if self._places.pop(sequence, None) is None:
            return False
        self._unstarted.discard(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.pages.release(sequence)
        return True

    def schedule(self) -> list[tuple[Sequence, int]]:
        """The next step's work: `(sequence, tokens to run)`, its pages already in its block tables.

        Empty only if no sequence is held.
        """
        for sequence in self.running:
            self.pages.release_behind(sequence)
        self._make_way()
        work: dict[Sequence, int] = {}
        # Granting may preempt from the end of `running`: the loop then simply ends earlier.
        for sequence in self.running:
            if sequence.pending == 1:
                self._grant(sequence, 1, work)
        self._admit()
        budget = self.token_budget - len(work)
        places = [i for i, sequence in enumerate(self.running) if sequence not in work]
        if self.pace is None:
            for place in places:
                budget -= self._read(place, budget, work)
        else:
            budget = min(budget, self.pace.limit(len(work)))
            # Where little is read at a time, a long prompt must not keep short ones waiting: each
            # gets an even share, and what it does not need goes to those that are longer.
            places.sort(key=lambda place: self.running[place].pending)
            for i, place in enumerate(places):
                budget -= self._read(place, -(-budget // (len(places) - i)), work)
        self._unstarted.difference_update(work)
        return list(work.items())

    def publish(self, sequence: Sequence, n: int) -> None:
        """Let others start from the pages that its last `n` computed tokens filled. To be called
        after the step that ran them, if it succeeded and left finite numbers in them."""
        self.pages.publish(sequence, n)

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages, tables and queues fit together."""
        held = [*self.running, *self.waiting]
        if len(held) != len(self._places) or set(held) != set(self._places):
            raise AssertionError("running and waiting are not the sequences held")
        if not self._unstarted <= set(held):
            raise AssertionError("a sequence that is to start is not held")
        for queue in (self.running, self.waiting):
            places = [self._places[sequence] for sequence in queue]
            if places != sorted(places):
                raise AssertionError("running or waiting are not in their order")
        if len(self.running) > self.max_running:
            raise AssertionError(f"{len(self.running)} running, {self.max_running} allowed")
        for sequence in self.waiting:
            if sequence.tables or sequence.computed:
                raise AssertionError("a waiting sequence holds pages or counts computed tokens")
        for sequence in self.running:
            longest = pages_for(sequence.max_cached, self.pages.page_size)
            most = self.pages.most(sequence.max_cached, self.prefill_chunk)
            for table, bound in zip(sequence.tables, most, strict=False):
                kept = len(table) - table.count(NULL_PAGE)
                if len(table) > longest or kept > bound:
                    raise AssertionError(f"{kept} pages held, {bound} allowed")
        self.pages.check_integrity(held)

    def _read(self, place: int, budget: int, work: dict[Sequence, int]) -> int:
        """Put the next chunk of a prompt into the step if it may be; returns its tokens.

        A chunk ends at the next multiple of the chunk size, wherever it starts, or where the pace
        says.
        """
        if place >= len(self.running):  # granting others may have pushed it out
            return 0
        sequence, before = self.running[place], self.running[:place]
        start, hit = sequence.computed, NO_HIT
        if not sequence.tables:
            hit = self.pages.find(sequence, sequence.reusable)
            if self.pages.comes(sequence, hit, sequence.reusable, before):
                return 0
            start = hit.tokens
        n = min(len(sequence.ids) - start, self.prefill_chunk - start % self.prefill_chunk)
        if self.pace is not None:
            n = min(n, budget)
        if n > budget or n < 1:
            return 0
        self.pages.adopt(sequence, hit)
        if sequence in self._unstarted:
            sequence.cached = start
        return n if self._grant(sequence, n, work) else 0

    def _admit(self) -> None:
        """Start waiting sequences, first come first served, while slots and pages last.

        One is admitted only if the pages that its tokens fill now are free and not already needed
        by the prompts being read: else it would be preempted, or preempt, before its first token.
        """
        if not self.waiting:
            return
        free = self._unclaimed()
        while self.waiting and len(self.running) < self.max_running:
            left = self._claim(free, self.waiting[0])
            if min(left) < 0 and self.running:
                break
            free = left
            bisect.insort(self.running, self.waiting.pop(0), key=self._places.__getitem__)

    def _make_way(self) -> None:
        """Stop those who run, last in the order first, for one who waits and is before them."""
        while self.waiting and self.running:
            first, last = self.waiting[0], self.running[-1]
            if self._places[first] > self._places[last]:
                return
            room = min(self._claim(self._unclaimed(), first)) >= 0
            if room and len(self.running) < self.max_running:
                return
            self._preempt({})

    def _unclaimed(self) -> list[int]:
        """Pages of each group that are free and not needed by the prompts being read."""
        free = self.pages.free
        for sequence in self.running:
            free = self._claim(free, sequence)
        return free

    def _claim(self, free: list[int], sequence: Sequence) -> list[int]:
        hit = NO_HIT if sequence.tables else self.pages.find(sequence, sequence.reusable)
        need = self.pages.lacking(sequence, len(sequence.ids), self.prefill_chunk, hit)
        return [left - n for left, n in zip(free, need, strict=True)]

    def _preempt(self, work: dict[Sequence, int]) -> Sequence:
        """Take the last of those who run out of the step, and its pages from it."""
        victim = self.running.pop()
        work.pop(victim, None)
        self.pages.release(victim)
        victim.computed = 0
        bisect.insort(self.waiting, victim, key=self._places.__getitem__)
        self.preemptions += 1
        return victim

    def _grant(self, sequence: Sequence, n: int, work: dict[Sequence, int]) -> bool:
        """Put the sequence into the step, with pages; False if it had to be preempted itself."""
        while not self.pages.grow(sequence, sequence.computed + n):
            if self._preempt(work) is sequence:
                return False
        work[sequence] = n
        return True
