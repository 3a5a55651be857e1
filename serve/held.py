"""What the engine holds for a sequence, and what becomes of a step's results: text, scores, ends.

The engine decides what runs; here it is decided what whoever asked is told of it.
"""

from __future__ import annotations

import logging
import math
from asyncio import AbstractEventLoop
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from gpt.params import NO_TOKEN, NOT_FINITE, SCORED, Made
from gpt.sequence import Sequence
from gpt.stream import FinishReason, TextStream
from gpt.tokenizer import Tokenizer
from serve.faults import GenerationFailedError
from serve.logs import of as of_call
from serve.reply import ImpossibleError, Reply, Scored, TextReply
from serve.results import Delta, Finish, TokenScore, token_score

log = logging.getLogger(__name__)


class Spans(NamedTuple):
    """Seconds that a request spent waiting, until its first result, and from there on."""

    queue: float
    prefill: float
    decode: float


@dataclass(eq=False)
class Held:
    """A sequence and where what it gives goes. Times are of `time.monotonic`.

    Attributes:
        text: what its tokens make.
        ends_by: when a text ends with what there is.
        started: when its first step began; None: it has had none.
        first: when its first token was made, or its scores were complete.
        last_token: when its newest token was made; 0: it has none.
    """

    sequence: Sequence
    tokenizer: Tokenizer
    text: TextStream
    reply: Reply
    arrived: float
    ends_by: float = math.inf
    started: float | None = None
    first: float | None = None
    last_token: float = 0.0

    def spans(self, now: float) -> Spans:
        """How long each part of its life has been. What has not begun has taken no time yet."""
        started = now if self.started is None else self.started
        first = now if self.first is None else self.first
        return Spans(started - self.arrived, first - started, now - first)

    def take(self, made: Made, now: float) -> Event:
        """What a step made for it, as its reply wants it."""
        sequence = self.sequence
        if made.token == NOT_FINITE:
            log.error(
                "request %s: its logits are not finite",
                self.reply.request_id,
                extra=of_call(self.reply.call),
            )
            reason = "the model's logits for this request are not finite numbers"
            return Event(self, end=GenerationFailedError(reason))
        if made.token == NO_TOKEN:
            constraint = sequence.params.constraint
            name = "allowed_tokens" if constraint is None else constraint.kind
            reason = (
                f"after {sequence.output_len} tokens the model gives no chance to anything that "
                "may come next, or its vocabulary lacks it; allow other texts"
            )
            return Event(self, end=ImpossibleError([(f"spec.{name}", reason)]))
        if self.first is None:
            self.first = now
        if made.token == SCORED:
            spans = self.spans(now)
            return Event(self, end=Scored(sequence.scores, spans.queue, spans.prefill))
        try:
            text = self.text.push(made.token, last=sequence.full, complete=sequence.complete)
            prompt = (
                [token_score(self.tokenizer, made) for made in sequence.scores]
                if sequence.output_len == 1
                else []
            )
            scores = [] if made.logprob is None else [token_score(self.tokenizer, made)]
        except BaseException:  # a panic of the tokenizer is no Exception
            log.exception(
                "request %s: token %d has no text",
                self.reply.request_id,
                made.token,
                extra=of_call(self.reply.call),
            )
            return Event(self, end=GenerationFailedError(f"token {made.token} has no text"))
        piece = b"" if made.token in sequence.ends else self.tokenizer.token_bytes(made.token)
        delta = Delta(text, [made.token], scores, [piece], sequence.choice)
        over = self.text.finish_reason is not None
        return Event(self, delta, self._finish(now) if over else None, prompt)

    def time_is_over(self, now: float) -> Event:
        """The end of a text for which no more time is given."""
        text = self.text.close(FinishReason.TIME_LIMIT)
        delta = Delta(text, [], choice=self.sequence.choice) if text else None
        return Event(self, delta, self._finish(now))

    def _finish(self, now: float) -> Finish:
        """How its text, which is over, has ended."""
        sequence, text, spans = self.sequence, self.text, self.spans(now)
        assert text.finish_reason is not None
        return Finish(
            reason=text.finish_reason.value,
            matched_stop=text.matched_stop,
            prompt_tokens=sequence.prompt_len,
            completion_tokens=sequence.output_len,
            seed=sequence.params.seed,
            queue_seconds=spans.queue,
            prefill_seconds=spans.prefill,
            decode_seconds=spans.decode,
            cached_tokens=sequence.cached,
            matched_stop_token=text.matched_stop_token,
            choice=sequence.choice,
        )


@dataclass(frozen=True)
class Event:
    """What a step made for one sequence; `end` when that was the last."""

    held: Held
    delta: Delta | None = None
    end: Finish | Scored | Exception | None = None
    prompt_scores: list[TokenScore] = field(default_factory=list)


def emit(events: Iterable[Event]) -> None:
    """Hand out events: one wake-up an event loop and step, however many requests it concerns."""
    loops: dict[AbstractEventLoop, list[Event]] = {}
    for event in events:
        loops.setdefault(event.held.reply.loop, []).append(event)
    for loop, batch in loops.items():
        try:
            loop.call_soon_threadsafe(_deliver, batch)
        except RuntimeError:  # the loop is closed: nobody is left to read these
            for event in batch:
                event.held.reply.cancel()


def _deliver(events: list[Event]) -> None:
    for event in events:
        if event.prompt_scores and isinstance(event.held.reply, TextReply):
            event.held.reply.prompt_scores = event.prompt_scores
        event.held.reply.deliver(event.delta, event.end)
