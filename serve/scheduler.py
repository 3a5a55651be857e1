"""Which sequences run in the next step: continuous batching under a token budget. Pure Python.

Every step anew (Yu et al., "Orca", OSDI 2022) the scheduler hands out a budget of tokens: first one
token to each sequence that only has its newest token to run, so that those who are streaming never
wait for somebody's long prompt; then prompt chunks (Agrawal et al., "Sarathi-Serve", arXiv
2403.02310). It knows no prefill or decode phase, only `computed` catching up with `ids`.

A prompt is always cut at multiples of `prefill_chunk`, whatever the company, as the local sampler
cuts it: a chunk that does not fit into what is left of the budget waits for the next step.

Pages are handed out step by step. When they run out, the sequence admitted last gives up all of its
pages and goes back to the front of the queue; what it had made is kept and its keys and values are
computed again later (recomputation, Kwon et al., arXiv 2309.06180). `running` followed by `waiting`
is therefore always the order of arrival, and the oldest sequence can always go on: nobody starves.

Before each step every sequence gives back the pages that have fallen behind a group's window
(`gpt.pages`), so layers with a window take no more pages for a long text than for a short one.
"""

from __future__ import annotations

from collections import deque

from gpt.errors import ServerError
from gpt.pages import NULL_PAGE, CachePages, pages_for
from gpt.sequence import Sequence


class QueueFullError(ServerError):
    """As many requests as the server holds at once are held already."""


class PoolTooSmallError(ServerError):
    """A request that could not run even if it had every page of the cache to itself."""


class Scheduler:
    """Decides the work of each step. Not thread-safe: its owner holds a lock.

    The owner's loop is: `schedule`, run the work, then `finish` each sequence that is over.

    Args:
        pages: the pools that block tables are filled from.
        max_running: most sequences in one step.
        max_waiting: how many may wait beyond those; more are refused.
        prefill_chunk: most prompt tokens of one sequence in one step.
        token_budget: most tokens in one step. At least, and by default, `prefill_chunk +
            max_running`: then a whole chunk always fits beside the decodes.
    """

    def __init__(
        self,
        pages: CachePages,
        *,
        max_running: int,
        max_waiting: int,
        prefill_chunk: int,
        token_budget: int | None = None,
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
        self.prefill_chunk = prefill_chunk
        self.token_budget = least if token_budget is None else token_budget
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        self._arrivals: dict[Sequence, int] = {}
        self._arrived = 0

    def __len__(self) -> int:
        """Sequences held, running or waiting."""
        return len(self._arrivals)

    @property
    def capacity(self) -> int:
        """Most sequences held at once."""
        return self.max_running + self.max_waiting

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the queue.

        Raises:
            PoolTooSmallError: it could never be computed.
            QueueFullError: come again later.
        """
        most = self.pages.most(sequence.max_cached, self.prefill_chunk)
        for need, capacity in zip(most, self.pages.capacity, strict=True):
            if need > capacity:
                size = self.pages.page_size
                raise PoolTooSmallError(
                    f"this request may take {min(sequence.max_cached, need * size)} tokens of "
                    f"cache, but the server's holds {capacity * size}; ask for fewer tokens"
                )
        if len(self) >= self.capacity:
            raise QueueFullError(
                f"{len(self)} requests are running or waiting and the server holds at most "
                f"{self.capacity}; try again later"
            )
        self._arrivals[sequence] = self._arrived
        self._arrived += 1
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> bool:
        """Forget a sequence, running or waiting, and free its pages. Not while it is in a step.

        Returns:
            Whether it was held; a second call does nothing.
        """
        if self._arrivals.pop(sequence, None) is None:
            return False
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
        work: dict[Sequence, int] = {}
        # Granting may preempt from the end of `running`: both loops then simply end earlier.
        for sequence in self.running:
            if sequence.pending == 1:
                self._grant(sequence, 1, work)
        self._admit()
        budget = self.token_budget - len(work)
        for sequence in self.running:
            n = self._next_chunk(sequence)
            if sequence not in work and n <= budget and self._grant(sequence, n, work):
                budget -= n
        return list(work.items())

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages, tables and queues fit together."""
        held = [*self.running, *self.waiting]
        order = [self._arrivals.get(sequence, -1) for sequence in held]
        if len(held) != len(self._arrivals) or -1 in order or order != sorted(set(order)):
            raise AssertionError("running and waiting are not the sequences held, in their order")
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

    def _next_chunk(self, sequence: Sequence) -> int:
        """Tokens up to the next multiple of the chunk size, or all that are pending."""
        border = self.prefill_chunk - sequence.computed % self.prefill_chunk
        return min(sequence.pending, border)

    def _admit(self) -> None:
        """Start waiting sequences, first come first served, while slots and pages last.

        One is admitted only if the pages that its tokens fill now are free and not already needed
        by the prompts being read: else it would be preempted, or preempt, before its first token.
        """
        free = self.pages.free

        def claim(sequence: Sequence) -> list[int]:
            need = self.pages.lacking(sequence, len(sequence.ids), self.prefill_chunk)
            return [left - n for left, n in zip(free, need, strict=True)]

        for sequence in self.running:
            free = claim(sequence)
        while self.waiting and len(self.running) < self.max_running:
            left = claim(self.waiting[0])
            if min(left) < 0 and self.running:
                break
            free = left
            self.running.append(self.waiting.popleft())

    def _grant(self, sequence: Sequence, n: int, work: dict[Sequence, int]) -> bool:
        """Put the sequence into the step, with pages; False if it had to be preempted itself."""
        while not self.pages.grow(sequence, sequence.computed + n):
            victim = self.running.pop()
            work.pop(victim, None)
            self.pages.release(victim)
            victim.computed = 0
            self.waiting.appendleft(victim)
            self.preemptions += 1
            if victim is sequence:
                return False
        work[sequence] = n
        return True
