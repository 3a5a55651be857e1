"""The engine under any interleaving of requests, cancellations, preemptions and failing steps.

A real model, whole pages of NaN wherever nobody may read, and each request gets exactly the tokens
that it gets alone: in double precision, where rounding decides nothing, and in single precision
with `fixed`, where it must not show in the last bit of a log-probability either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule
from torch import Tensor

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.deterministic import make_deterministic
from gpt.model import GPT
from gpt.params import SamplingParams
from gpt.plan import AttentionPlan
from gpt.starter import Starter
from gpt.tokenizer import Tokenizer
from serve.asked import Asked
from serve.engine import Engine
from serve.faults import GenerationFailedError
from serve.reply import TextReply
from serve.results import Delta, Finish, TokenScore
from tests.strategies import build, poison

T = TypeVar("T")

TOKENIZER = Tokenizer.chars("abcdefghijklmnop")  # and end-of-text, so that texts end by themselves
MADE = 6


class FaultyModel:
    """A model whose next forward can be made to fail, after it has written its keys."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.config = model.config
        self.fail_next = False

    def num_params(self) -> int:
        return self.model.num_params()

    def __call__(self, ids: Tensor, plan: AttentionPlan, cache: KVCache) -> Tensor:
        logits: Tensor = self.model(ids, plan, cache)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("it was told to")
        return logits


@cache
def model_of(pattern: tuple[str, ...], fixed: bool) -> GPT:
    """`conv:3` besides patterns: with convolutions of width 3, and value embeddings."""
    widths = [int(each[5:]) for each in pattern if each.startswith("conv:")]
    patterns = [each for each in pattern if not each.startswith("conv:")]
    config = GPTConfig(
        vocab_size=TOKENIZER.n_vocab, block_size=64, n_layer=2, n_head=2, d_model=16,
        pattern=patterns, conv_width=sum(widths), value_embeddings=bool(widths), init_std=0.4,
    )  # fmt: skip
    model = build(config, dtype=torch.float32 if fixed else torch.float64)
    if fixed:
        make_deterministic(model)
    return model


@dataclass
class Text:
    """What has come of one of a request's texts."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    scores: list[TokenScore] = field(default_factory=list)
    reason: str | None = None

    def begins(self, other: Text) -> bool:
        n = len(self.ids)
        return (self.ids, self.scores) == (other.ids[:n], other.scores[:n]) and (
            other.text.startswith(self.text)
        )


@dataclass(eq=False)
class Request:
    """What was asked, and what has come of it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    reply: TextReply
    texts: list[Text]
    task: asyncio.Task[None] | None = None
    cancelled: bool = False

    async def read(self) -> None:
        async for event in self.reply:
            text = self.texts[event.choice]
            if isinstance(event, Delta):
                text.ids += event.token_ids
                text.text += event.text
                text.scores += event.scores
            else:
                assert isinstance(event, Finish)
                text.reason = event.reason


class Driver:
    """An engine without its thread, an event loop without its server: steps when told to."""

    def __init__(self, pattern: tuple[str, ...], fixed: bool, **options: Any) -> None:
        model = model_of(pattern, fixed)
        self.model = FaultyModel(model)
        self.engine = Engine(
            self.model, TOKENIZER, name="tiny", page_size=4, prefill_chunk=6, max_waiting=50,
            dtype=model.dtype, fixed=fixed, check_every_step=True, **options,
        )  # fmt: skip
        self.starter = Starter(model.config, TOKENIZER)
        self.loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def submit(
        self, prompt: tuple[int, ...], params: SamplingParams, choices: range, priority: int = 0
    ) -> Request:
        sequences = [self.starter.start(prompt, params, choice) for choice in choices]
        for sequence in sequences:
            sequence.priority = priority

        async def ask() -> Request:
            reply = self.engine.submit(Asked(sequences))
            request = Request(prompt, params, reply, [Text() for _ in range(choices.stop)])
            request.task = asyncio.ensure_future(request.read())
            return request

        return self.run(ask())

    def turn(self) -> None:
        scheduler = self.engine._scheduler
        poison(self.engine._cache, scheduler.pages)
        self.engine.turn()
        self.run(_settle())

    def close(self) -> None:
        self.run(_settle())
        self.loop.close()


async def _settle() -> None:
    """Let what the engine handed out reach those who read it."""
    for _ in range(4):
        await asyncio.sleep(0)


@cache
def alone(
    pattern: tuple[str, ...], fixed: bool, prompt: tuple[int, ...], params: SamplingParams,
    choice: int,
) -> Text:  # fmt: skip
    """What a request gets in an engine of its own that shares nothing."""
    driver = Driver(pattern, fixed, n_pages=20, max_running=1, prefix_cache=False)
    request = driver.submit(prompt, params, range(choice, choice + 1))
    while driver.engine.held:
        driver.turn()
    driver.close()
    return request.texts[choice]


class Interleavings(RuleBasedStateMachine):
    """On a pool that is too small, so that texts are preempted all the time."""

    pattern: tuple[str, ...] = ("causal",)
    fixed = False
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(self.pattern, self.fixed, n_pages=17, max_running=3)
        self.scheduler = self.driver.engine._scheduler
        self.asked: list[Request] = []

    @rule(
        target=requests,
        shared=st.sampled_from([0, 5, 12, 19, 26]),
        tail=st.sampled_from([(), (0,), (1, 2)]),
        n=st.sampled_from([1, 1, 2, 3]),
        greedy=st.booleans(),
        logprobs=st.sampled_from([None, 1]),
        scored=st.sampled_from([None, None, None, 0]),
        priority=st.sampled_from([0, 0, 0, 5]),
    )
    def add(
        self, shared: int, tail: tuple[int, ...], n: int, greedy: bool, logprobs: int | None,
        scored: int | None, priority: int,
    ) -> object:  # fmt: skip
        if self.driver.engine.held > 6:
            return multiple()
        prompt = (*((5 * i) % 16 for i in range(shared)), *tail) or (1,)
        params = SamplingParams(
            temperature=0.0 if greedy else 1.0, max_tokens=MADE, seed=5, logprobs=logprobs,
            prompt_logprobs=scored,
        )  # fmt: skip
        self.asked.append(self.driver.submit(prompt, params, range(n), priority))
        return self.asked[-1]

    @rule(request=requests)
    def cancel(self, request: Request) -> None:
        request.cancelled = True
        request.reply.cancel()

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            cancelled = self.driver.engine._cancelled
            held = (*self.scheduler.running, *self.scheduler.waiting)
            left = [sequence for sequence in held if sequence not in cancelled]
            if not left:  # the engine would wait for the next request
                return
            first = min(left, key=self.scheduler._places.__getitem__)
            before = len(first.ids), first.computed
            self.driver.turn()
            gone = first not in self.scheduler._places
            assert gone or (len(first.ids), first.computed) != before, "the first always goes on"

    @rule()
    def a_step_fails(self) -> None:
        self.driver.model.fail_next = True

    @rule()
    def preempt(self) -> None:
        if self.scheduler.running:
            self.scheduler._preempt({})

    @invariant()
    def fits_together(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        # One more, at whose turn those that were cancelled leave; and it must come through, too.
        self.asked.append(
            self.driver.submit((3, 1), SamplingParams(max_tokens=3, seed=1), range(1))
        )
        for _ in range(1000):
            if not self.driver.engine.held:
                break
            self.driver.turn()
        assert self.driver.engine.held == 0, "somebody starves"
        assert self.driver.engine.pages_used == 0
        for request in self.asked:
            self.check(request)
        self.driver.close()

    def check(self, request: Request) -> None:
        assert request.task is not None
        failed = request.task.done() and request.task.exception() is not None
        if failed:
            assert isinstance(request.task.exception(), GenerationFailedError)
        if not request.task.done():
            assert request.cancelled
            request.task.cancel()
        for choice, text in enumerate(request.texts):
            wanted = alone(self.pattern, self.fixed, request.prompt, request.params, choice)
            assert text.begins(wanted)
            if not (failed or request.cancelled):
                assert text == wanted


class Windowed(Interleavings):
    """The same over layers that remember different things."""

    pattern = ("causal", "window:6+sinks:2")


class Forgetting(Interleavings):
    """And over layers that all forget, so that hits have gaps."""

    pattern = ("window:6+sinks:2", "window:3")


class Convolving(Interleavings):
    """And with a state besides, of which a page keeps a part."""

    pattern = ("causal", "window:3", "conv:3")


class Fixed(Interleavings):
    """To the last bit."""

    fixed = True


class FixedWindowed(Windowed):
    """To the last bit, over layers that remember different things, and convolutions."""

    pattern = ("causal", "window:6+sinks:2", "conv:3")
    fixed = True


FEW = settings(max_examples=7, stateful_step_count=20, deadline=None, derandomize=True)
for machine in (Interleavings, Windowed, Forgetting, Convolving, Fixed, FixedWindowed):
    machine.TestCase.settings = FEW
TestInterleavings = Interleavings.TestCase
TestWindowed = Windowed.TestCase
TestForgetting = Forgetting.TestCase
TestConvolving = Convolving.TestCase
TestFixed = Fixed.TestCase
TestFixedWindowed = FixedWindowed.TestCase
