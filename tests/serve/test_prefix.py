"""Prompts that begin alike: computed once, and everyone gets the tokens that it gets alone.

A real model in double precision, so that a wrong page shows as a wrong token.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.generate import step
from gpt.model import GPT
from gpt.pages import CachePages
from gpt.params import SamplingParams
from gpt.patterns import Memory
from gpt.sequence import Sequence
from serve.scheduler import Scheduler
from tests.strategies import build, poison

N_VOCAB = 19
PAGE, CHUNK = 4, 6
MADE = 6


@cache
def model_of(pattern: tuple[str, ...]) -> GPT:
    """`conv:4` besides patterns: with convolutions of width 4."""
    widths = [int(each[5:]) for each in pattern if each.startswith("conv:")]
    patterns = [each for each in pattern if not each.startswith("conv:")]
    config = GPTConfig(
        vocab_size=N_VOCAB, block_size=64, n_layer=2, n_head=2, d_model=16, pattern=patterns,
        conv_width=sum(widths), value_embeddings=bool(widths), init_std=0.4,
    )  # fmt: skip
    return build(config)


def start(prompt: list[int], choice: int = 0, **wanted: object) -> Sequence:
    params = SamplingParams(**{"seed": 5, **wanted})  # type: ignore[arg-type]
    return Sequence.start(
        prompt, params, block_size=64, n_vocab=N_VOCAB, eot=None, ends=(), choice=choice
    )


class Machine:
    """The engine's loop around a scheduler, with NaN in every page that nobody may read."""

    def __init__(
        self,
        pattern: tuple[str, ...] = ("causal",),
        pages: int = 60,
        running: int = 4,
        prefix_cache: bool = True,
    ) -> None:
        self.model = model_of(pattern)
        self.cache = KVCache(self.model.config, pages + 1, PAGE, dtype=torch.float64)
        self.pages = CachePages(
            self.cache.spec.memories, pages + 1, PAGE, prefix_cache=prefix_cache
        )
        self.it = Scheduler(self.pages, max_running=running, max_waiting=50, prefill_chunk=CHUNK)
        self.ran: list[tuple[Sequence, int, int]] = []

    def schedule(self) -> list[tuple[Sequence, int]]:
        work = self.it.schedule()
        self.it.check_integrity()
        poison(self.cache, self.pages)
        for sequence, n in work:
            assert (sequence.computed + n) % CHUNK == 0 or n == sequence.pending
            for group, table in enumerate(sequence.tables):
                for numbers in self.cache.paged(group):  # they may have been somebody else's
                    numbers[:, table[-(-sequence.computed // PAGE) :]] = torch.nan
        self.ran = [(sequence, sequence.computed, n) for sequence, n in work]
        return work

    def step(self) -> None:
        work = self.schedule()
        results = step(self.model, self.cache, work, n_vocab=N_VOCAB) if work else []
        for (sequence, n), made in zip(work, results, strict=True):
            assert made is None or made.token != -1, "it read a page that is not its own"
            assert not any(self.cache.broken(self.pages.filled(sequence, n)))
            self.it.publish(sequence, n)
            if sequence.full or (sequence.scoring and not sequence.pending):
                self.it.finish(sequence)
        self.it.check_integrity()

    def finish(self) -> None:
        for _ in range(2000):
            if not len(self.it):
                break
            self.step()
        assert len(self.it) == 0, "somebody starves"
        assert self.pages.used == 0
        assert self.pages.free == self.pages.capacity, "what only the cache keeps is free"

    def text(self, *sequences: Sequence) -> list[list[int]]:
        self.it.add(sequences)
        self.finish()
        return [sequence.ids[sequence.prompt_len :] for sequence in sequences]


@cache
def alone(
    pattern: tuple[str, ...], prompt: tuple[int, ...], choice: int = 0, greedy: bool = False
) -> list[int]:
    """What a prompt gets in a cache of its own that shares nothing."""
    temperature = 0.0 if greedy else 1.0
    sequence = start(list(prompt), choice, temperature=temperature, max_tokens=MADE)
    return Machine(pattern, prefix_cache=False).text(sequence)[0]


PATTERNS = [
    ("causal",),
    ("causal", "window:5"),
    ("window:6+sinks:2", "window:3"),
    ("window:1", "dilated:3:2"),
    ("causal", "conv:4"),
    ("window:6+sinks:2", "window:3", "conv:7"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("length", [12, 13, 29])
def test_the_second_answer_is_the_first(pattern: tuple[str, ...], length: int) -> None:  # S7
    machine = Machine(pattern)
    prompt = [(7 * i) % N_VOCAB for i in range(length)]
    cold, warm = start(prompt, max_tokens=MADE), start(prompt, max_tokens=MADE)
    assert machine.text(cold) == machine.text(warm) == [alone(pattern, tuple(prompt))]
    assert cold.cached == 0
    assert warm.cached == (length - 1) // PAGE * PAGE, "one token at least is computed"


def test_a_chat_goes_on_from_its_answer() -> None:
    machine = Machine()
    first = start([1, 2, 3, 4, 5], max_tokens=10)
    machine.text(first)
    second = start([*first.ids, 6, 7], max_tokens=3)
    machine.text(second)
    assert second.cached == 12, "14 tokens of the first were computed"


@pytest.mark.parametrize("pattern", PATTERNS[:3])
def test_several_texts_of_a_prompt_compute_it_once(pattern: tuple[str, ...]) -> None:
    machine = Machine(pattern, running=5)
    prompt = [(5 * i) % N_VOCAB for i in range(30)]
    texts = [start(prompt, choice, max_tokens=MADE) for choice in range(5)]
    machine.it.add(texts)
    steps = 0
    while any(not text.output_len for text in texts):
        machine.step()
        steps += 1
        ran = [sequence for sequence, _, _ in machine.ran]
        assert steps > 5 or ran == texts[:1], "the others wait for the first"
    assert steps == 6
    # 7 pages of the prompt that are full are held once; each has one of its own besides.
    assert machine.pages.pools[0].used <= 7 + 5 + 1
    machine.finish()
    assert [text.cached for text in texts] == [0, 28, 28, 28, 28]
    for choice, text in enumerate(texts):
        assert text.ids[30:] == alone(pattern, tuple(prompt), choice)


def test_who_waits_for_a_prompt_goes_on_when_its_reader_is_gone() -> None:
    machine = Machine()
    first, second = start([3] * 30, max_tokens=MADE), start([3] * 30, 1, max_tokens=MADE)
    machine.it.add([first, second])
    machine.step()
    machine.step()
    assert second.computed == 0
    machine.it.finish(first)
    machine.finish()
    assert second.cached == 12, "what the first had filled by then"
    assert second.ids[30:] == alone(("causal",), (3,) * 30, 1)


def test_scores_are_of_every_token_and_fill_the_cache() -> None:
    machine = Machine()
    ids = [(3 * i) % N_VOCAB for i in range(20)]
    sizes = {"block_size": 64, "n_vocab": N_VOCAB, "eot": 0}
    found = []
    for _ in range(2):
        scoring = Sequence.score(ids, SamplingParams(logprobs=1), **sizes)  # type: ignore[arg-type]
        machine.text(scoring)
        assert (scoring.cached, len(scoring.scores)) == (0, 20)
        found.append(scoring.scores)
    assert found[0] == found[1]
    after = start([0, *ids], max_tokens=MADE)
    assert machine.text(after) == [alone(("causal",), (0, *ids))]
    assert after.cached == 20
    told = start([0, *ids], max_tokens=MADE, prompt_logprobs=0)
    assert machine.text(told) == [alone(("causal",), (0, *ids))]
    assert (told.cached, len(told.scores)) == (0, 20)
    assert [s.token for s in told.scores] == ids


@pytest.mark.parametrize("pattern", PATTERNS[:3])
def test_after_a_preemption_a_text_starts_from_its_own_pages(pattern: tuple[str, ...]) -> None:
    machine = Machine(pattern)  # S8
    text = start([(5 * i) % N_VOCAB for i in range(26)], max_tokens=MADE)
    machine.it.add([text])
    while text.output_len < MADE - 1:
        machine.step()
    machine.it._preempt({})
    machine.it.check_integrity()
    assert machine.pages.used == 0
    machine.step()
    ((_, begun, ran),) = machine.ran
    assert (begun, ran) == (28, 2), "31 tokens, in chunks that end at multiples of 6"
    machine.finish()
    assert text.ids[26:] == alone(pattern, tuple(text.ids[:26]))
    assert text.cached == 0, "found when it first started"


def test_pages_that_only_the_cache_keeps_are_taken_when_needed() -> None:
    machine = Machine(pages=12)
    prompts = [[i] * 20 for i in range(6)]
    for prompt in prompts:
        machine.text(start(prompt, max_tokens=MADE))
    assert machine.it.preemptions == 0
    assert machine.pages.pools[0].idle > 0
    again = [start(prompt, max_tokens=MADE) for prompt in (prompts[5], prompts[0])]
    for text, prompt in zip(again, (prompts[5], prompts[0]), strict=True):
        assert machine.text(text) == [alone(("causal",), tuple(prompt))]
    assert [text.cached for text in again] == [16, 0]


def test_a_shared_prompt_takes_its_room_once() -> None:
    """Three texts of 7 pages each, in 13 pages: 6 in common and 1 or 2 of each's own."""
    machine = Machine(pages=13)
    machine.it.add([start([2] * 25, choice, max_tokens=4) for choice in range(3)])
    together = 0
    while len(machine.it):
        machine.step()
        together = max(together, len(machine.ran))
    assert together == 3
    assert machine.it.preemptions == 0


def test_the_layers_of_these_tests_remember_different_things() -> None:
    memories = [m for p in PATTERNS for m in Machine(p).cache.spec.memories]
    assert {Memory(), Memory(5), Memory(6, 2), Memory(1)} <= set(memories)
