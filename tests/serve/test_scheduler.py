"""The scheduler alone: its "model" is a loop that counts tokens as computed and adds new ones."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from gpt.pages import CachePages
from gpt.params import SamplingParams
from gpt.patterns import Memory
from gpt.pool import NULL_PAGE
from gpt.sequence import Sequence
from serve.pace import Pace
from serve.scheduler import PoolTooSmallError, QueueFullError, Scheduler

EOT = 0


FULL = (Memory(),)


def sequence(prompt: int, max_tokens: int, priority: int = 0) -> Sequence:
    made = Sequence.start(
        [1] * prompt,
        SamplingParams(max_tokens=max_tokens, seed=0),
        block_size=1000,
        n_vocab=10,
        eot=EOT,
        endless=True,
    )
    made.priority = priority
    return made


def scheduler(
    *,
    pages: int | list[int] = 100,
    page_size: int = 4,
    running: int = 4,
    waiting: int = 100,
    chunk: int = 8,
    memories: tuple[Memory, ...] = FULL,
) -> Scheduler:
    sizes = [pages] * len(memories) if isinstance(pages, int) else pages
    return Scheduler(
        CachePages(memories, [n + 1 for n in sizes], page_size),
        max_running=running,
        max_waiting=waiting,
        prefill_chunk=chunk,
    )


def run(it: Scheduler) -> dict[Sequence, int]:
    """One step as the engine does it; returns what was run."""
    work = it.schedule()
    it.check_integrity()
    assert sum(n for _, n in work) <= it.token_budget
    for seq, n in work:
        assert 1 <= n <= seq.pending
        for table, memory in zip(seq.tables, it.pages.memories, strict=True):
            assert len(table) * it.pages.page_size >= seq.computed + n
            # Whatever a query of this step may see is there: the first positions and the window's.
            for position in range(seq.computed + n):
                if position < memory.sinks or position >= memory.first(seq.computed):
                    assert table[position // it.pages.page_size] != NULL_PAGE
        seq.computed += n
        if seq.pending == 0:
            seq.ids.append(1)
            if seq.full:
                assert it.finish(seq)
    it.check_integrity()
    return dict(work)


def test_a_lone_prompt_is_cut_at_multiples_of_the_chunk() -> None:
    it = scheduler(chunk=8)
    seq = sequence(prompt=19, max_tokens=3)
    it.add([seq])
    assert [run(it)[seq] for _ in range(5)] == [8, 8, 3, 1, 1]
    assert len(it) == 0
    assert it.schedule() == []


def test_decodes_come_first_and_prompts_keep_their_borders_in_company() -> None:
    it = scheduler(chunk=8, running=4)
    streaming = sequence(prompt=1, max_tokens=50)
    it.add([streaming])
    run(it)
    long, longer = sequence(prompt=20, max_tokens=1), sequence(prompt=30, max_tokens=1)
    it.add([long])
    it.add([longer])
    steps = [run(it) for _ in range(7)]
    assert all(step[streaming] == 1 for step in steps), "a stream never waits for a prompt"
    # Budget 12: beside a decode and a chunk of 8, no second whole chunk fits until `long` is done.
    assert [step.get(long) for step in steps] == [8, 8, 4, None, None, None, None]
    assert [step.get(longer) for step in steps] == [None, None, None, 8, 8, 8, 6]


def test_small_prompts_share_a_step() -> None:
    it = scheduler(chunk=8, running=4)
    small = [sequence(prompt=3, max_tokens=2) for _ in range(4)]
    for seq in small:
        it.add([seq])
    assert run(it) == dict.fromkeys(small, 3)


def test_no_more_than_max_running_run_and_the_rest_come_in_order() -> None:
    it = scheduler(running=2)
    seqs = [sequence(prompt=2, max_tokens=2) for _ in range(5)]
    for seq in seqs:
        it.add([seq])
    order = []
    while len(it):
        work = run(it)
        assert len(work) <= 2
        order += [seq for seq in work if seq not in order]
    assert order == seqs


def test_the_queue_is_bounded() -> None:
    it = scheduler(running=2, waiting=3)
    for _ in range(5):
        it.add([sequence(1, 5)])
    with pytest.raises(QueueFullError, match=r"5 requests .* at most 5"):
        it.add([sequence(1, 5)])
    it.finish(it.waiting[0])
    it.add([sequence(1, 5)])


def test_the_tokens_that_wait_are_bounded() -> None:
    it = scheduler(running=1)
    it.max_waiting_tokens = 10
    it.add([sequence(50, 5)])  # nobody waits, so it may, whatever its length
    run(it)
    it.add([sequence(7, 5)])
    with pytest.raises(QueueFullError, match=r"11 tokens would wait, .* lets 10"):
        it.add([sequence(4, 5)])
    it.add([sequence(3, 5)])


def test_texts_of_one_request_are_taken_together_or_not_at_all() -> None:
    it = scheduler(running=2, waiting=3, pages=3, page_size=4)
    it.add([sequence(1, 2) for _ in range(3)])
    with pytest.raises(QueueFullError, match="asks for 3 texts"):
        it.add([sequence(1, 2) for _ in range(3)])
    with pytest.raises(PoolTooSmallError):
        it.add([sequence(1, 2), sequence(4, 20)])
    assert len(it) == 3
    it.check_integrity()


def test_the_higher_priority_goes_first_among_those_who_wait() -> None:
    it = scheduler(running=1)
    seqs = [sequence(2, 2, priority) for priority in (0, 0, 5, 1)]
    for now, seq in enumerate(seqs):
        it.add([seq], now=now / 10)
    order: list[Sequence] = []
    while len(it):
        order += [seq for seq in run(it) if seq not in order]
    assert order == [seqs[2], seqs[3], seqs[0], seqs[1]]


def test_who_waits_rises_against_all_who_come_later() -> None:
    it = scheduler(running=1)
    low, high = sequence(2, 9), sequence(2, 9, 3)
    it.add([sequence(2, 2)])
    it.add([low], now=0.0)
    it.add([high], now=3.5)  # 3 steps of priority are 3 seconds
    order: list[Sequence] = []
    while len(it):
        order += [seq for seq in run(it) if seq not in order]
    assert order.index(low) < order.index(high)


@pytest.mark.parametrize("pages", [100, 6])
def test_a_higher_priority_takes_the_place_of_the_lowest_that_runs(pages: int) -> None:
    it = scheduler(running=2 if pages == 100 else 4, pages=pages)
    old, young = sequence(8, 8), sequence(8, 8)
    it.add([old], now=0.0)
    it.add([young], now=0.1)
    run(it)
    urgent = sequence(12, 8, 50)
    it.add([urgent], now=0.2)
    work = run(it)
    assert urgent in work
    assert old in work
    assert young not in work
    assert (young.computed, young.tables) == (0, [])
    while len(it):
        run(it)
    assert young.full
    assert it.preemptions >= 1


def test_without_priorities_nobody_who_runs_makes_way() -> None:
    it = scheduler(running=2, pages=100)
    for now in range(6):
        it.add([sequence(5, 5)], now=now)
    while len(it):
        run(it)
    assert it.preemptions == 0


def test_a_request_that_could_never_fit_is_refused_at_once() -> None:
    it = scheduler(pages=3, page_size=4)
    it.add([sequence(prompt=4, max_tokens=9)])  # 12 tokens in the cache: the last is never stored
    with pytest.raises(PoolTooSmallError, match=r"13 tokens of cache.*holds 12"):
        it.add([sequence(prompt=4, max_tokens=10)])
    assert len(it) == 1


def test_out_of_pages_the_latest_is_preempted_and_comes_back() -> None:
    it = scheduler(pages=4, page_size=4, chunk=8)
    old, young = sequence(prompt=6, max_tokens=8), sequence(prompt=6, max_tokens=8)
    it.add([old])
    it.add([young])
    assert run(it) == {old: 6, young: 6}
    while old in it.running:
        run(it)
        if young in it.waiting:
            assert (young.computed, young.tables) == (0, [])
    assert it.preemptions == 1
    made = young.output_len
    assert made > 0
    work = run(it)
    assert work == {young: min(8, 6 + made)}, "what it had made is computed again with the prompt"
    while len(it):
        run(it)
    assert old.full
    assert young.full
    assert it.pages.used == 0


def test_finish_is_idempotent_and_frees_waiting_and_running_alike() -> None:
    it = scheduler(running=1)
    first, second = sequence(9, 5), sequence(9, 5)
    it.add([first])
    it.add([second])
    run(it)
    assert it.finish(first)
    assert it.finish(second)
    assert not it.finish(first)
    assert (len(it), it.pages.used) == (0, 0)
    it.check_integrity()


WINDOWS = (Memory(5), Memory(3, 2))
"""Two groups of layers that forget. In chunks of 3 over pages of 2 each holds at most 4 pages of a
text: 5 - 1 + 3 positions touch 4; 3 - 1 + 3 touch 3, and the first two stand in another."""


def test_a_long_text_with_windows_takes_no_more_pages_than_a_short_one() -> None:
    it = scheduler(pages=[4, 4], page_size=2, chunk=3, memories=WINDOWS)
    seq = sequence(prompt=40, max_tokens=200)
    it.add([seq])
    used = set()
    while len(it):
        run(it)
        used.add(it.pages.used)
    assert seq.full
    assert it.preemptions == 0
    assert max(used) <= 8
    with pytest.raises(PoolTooSmallError, match=r"8 tokens of cache.*holds 6"):
        scheduler(pages=[3, 4], page_size=2, chunk=3, memories=WINDOWS).add([sequence(40, 1)])


def test_prompts_with_windows_run_side_by_side_where_whole_prompts_would_not_fit() -> None:
    """Admission counts what a group takes of a prompt at once, not its length."""
    it = scheduler(pages=[8, 8], page_size=2, chunk=3, memories=WINDOWS)
    seqs = [sequence(prompt=40, max_tokens=5) for _ in range(2)]
    for seq in seqs:
        it.add([seq])
    assert set(run(it)) == set(seqs)
    while len(it):
        run(it)
    assert it.preemptions == 0
    assert all(seq.full for seq in seqs)


def test_a_preempted_text_gives_back_every_group_and_takes_its_windows_again() -> None:
    it = scheduler(pages=[7, 16], page_size=2, chunk=3, memories=(Memory(5), Memory()))
    old, young = sequence(prompt=4, max_tokens=26), sequence(prompt=4, max_tokens=20)
    it.add([old])
    it.add([young])
    while not it.preemptions:
        run(it)
    assert (young.computed, young.tables) == (0, [])
    assert young.output_len > 0
    while len(it):
        run(it)
    assert old.full
    assert young.full
    assert it.pages.used == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"max_running": 0}, "max_running"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"token_budget": 11}, "budget"),
    ],
)
def test_settings_that_could_stall_are_refused(bad: dict[str, int], message: str) -> None:
    settings = {"max_running": 4, "max_waiting": 4, "prefill_chunk": 8, **bad}
    with pytest.raises(ValueError, match=message):
        Scheduler(CachePages(FULL, 9, 4), **settings)


class Interleavings(RuleBasedStateMachine):
    """Any order of add, cancel and step, on a pool small enough to preempt all the time."""

    held = Bundle("held")
    memories = FULL
    pages: int | list[int] = 7

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.it = scheduler(
            pages=self.pages, page_size=2, running=3, waiting=4, chunk=3, memories=self.memories
        )

    @rule(
        target=held,
        prompt=st.integers(1, 9),
        max_tokens=st.integers(1, 9),
        priority=st.sampled_from([0, 0, 0, 1, 5, -3]),
        later=st.floats(0, 2),
    )
    def add(self, prompt: int, max_tokens: int, priority: int, later: float) -> object:
        self.now += later
        seq = sequence(prompt, max_tokens, priority)
        most = self.it.pages.most(prompt + max_tokens - 1, 3)
        fits = all(a <= b for a, b in zip(most, self.it.pages.capacity, strict=True))
        room = len(self.it) < 7
        try:
            self.it.add([seq], self.now)
        except PoolTooSmallError:
            assert not fits
        except QueueFullError:
            assert fits
            assert not room
        else:
            assert fits
            assert room
            return seq
        return multiple()

    @rule(seq=held)
    def cancel(self, seq: Sequence) -> None:
        was_held = seq in self.it.running or seq in self.it.waiting
        assert self.it.finish(seq) == was_held

    @rule()
    def step(self) -> None:
        held = [*self.it.running, *self.it.waiting]
        first = min(held, key=self.it._places.__getitem__, default=None)
        work = run(self.it)
        assert first is None or first in work, "the first in the order goes on in every step"

    @invariant()
    def nothing_leaks(self) -> None:
        self.it.check_integrity()

    def teardown(self) -> None:
        left = [*self.it.running, *self.it.waiting]
        for _ in range(9 * 9 * 9):
            if not len(self.it):
                break
            run(self.it)
        assert all(seq.full for seq in left), "everyone finishes"
        assert self.it.pages.used == 0


Interleavings.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
TestInterleavings = Interleavings.TestCase


class PacedInterleavings(Interleavings):
    """The same where prompts are read as fast as steps of any length allow."""

    def __init__(self) -> None:
        super().__init__()
        self.it.pace = Pace(1.5, 3)

    @rule(seconds=st.floats(0.1, 10))
    def step(self, seconds: float) -> None:
        assert self.it.pace is not None
        streaming = [seq for seq in self.it.running if seq.pending == 1]
        work = run(self.it)
        assert all(seq in work or seq in self.it.waiting for seq in streaming)
        texts = sum(n == 1 for n in work.values())
        self.it.pace.ran(texts, sum(work.values()) - texts, seconds)


PacedInterleavings.TestCase.settings = Interleavings.TestCase.settings
TestPacedInterleavings = PacedInterleavings.TestCase


class WindowedInterleavings(Interleavings):
    """The same over layers of which some forget: pages come back in mid-text, too."""

    memories = (Memory(3), Memory(), Memory(2, 3))
    pages = [5, 8, 7]  # noqa: RUF012 - never changed


WindowedInterleavings.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
TestWindowedInterleavings = WindowedInterleavings.TestCase
