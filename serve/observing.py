"""What is told of requests while they are served, and whom: the engine and the calls know no more
of metrics and traces than this.

Nothing here imports torch, gRPC or a library of metrics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from serve.results import Finish

if TYPE_CHECKING:
    from gpt.sequence import Sequence

log = logging.getLogger(__name__)

SCORED, FAILED, LEFT = "scored", "error", "abort"
"""Ends of a text beside those of `gpt.stream.FinishReason`: it was scored, it failed, or whoever
asked for it left."""


@dataclass(eq=False)
class Call:
    """An RPC that is being answered.

    Attributes:
        request_id: what its caller calls it (`x-request-id`), or what it was named here. Callers
            may name two calls alike, so nothing is found by it.
        method: the RPC's name without its service.
        started: when it came, by `time.monotonic`.
        parent: where its spans belong, for who makes spans.
        texts: what came of its texts so far.
        peer: the address it came from, if that is to be logged.
        label: whom it is from, as far as that is known; never a secret.
    """

    request_id: str
    method: str
    started: float = field(default_factory=time.monotonic)
    parent: Any = None
    texts: list[TextEnd] = field(default_factory=list)
    peer: str = ""
    label: str = ""


CALL: ContextVar[Call | None] = ContextVar("antiphon_call", default=None)
"""The call in whose context code runs. Tasks of a call have it too; threads do not."""


@dataclass(frozen=True)
class Load:
    """What an engine holds at this moment.

    Attributes:
        running, waiting: texts.
        waiting_tokens: tokens of those that wait.
        pages_used, pages: of each group of layers: held now, and all there are.
        page_size: tokens a page holds.
        preemptions: how often a text gave its pages up, since the start.
    """

    running: int
    waiting: int
    waiting_tokens: int
    pages_used: Seq[int]
    pages: Seq[int]
    page_size: int
    preemptions: int

    @property
    def kv_usage(self) -> float:
        """Share of the cache that is held, 0 to 1: that of the group that has least left."""
        return max(used / all_ for used, all_ in zip(self.pages_used, self.pages, strict=True))


class Source(Protocol):
    """A reply, as far as it says whose it is."""

    request_id: str
    call: Call | None


class Text(Protocol):
    """A text that the engine holds (`serve.held.Held`). Times are of `time.monotonic`."""

    @property
    def sequence(self) -> Sequence: ...
    @property
    def reply(self) -> Source: ...

    arrived: float
    started: float | None
    first: float | None
    last_token: float


@dataclass(frozen=True)
class TextEnd:
    """A text that is over.

    Attributes:
        model: name of the model that made it.
        request_id: the server's own id.
        reason: a `gpt.stream.FinishReason`, or one of the ends above.
        cached_tokens: those of the prompt that were found in the cache.
        arrived, started, first_token, ended: times of `time.monotonic`; it was never computed
            if `started` is 0, and has no token if `first_token` is.
    """

    model: str
    request_id: str
    choice: int
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    arrived: float
    started: float
    first_token: float
    ended: float
    call: Call | None = field(repr=False, compare=False)

    @property
    def queue_seconds(self) -> float:
        return (self.started or self.ended) - self.arrived

    @property
    def prefill_seconds(self) -> float:
        return (self.first_token or self.ended) - self.started if self.started else 0.0

    @property
    def decode_seconds(self) -> float:
        return self.ended - self.first_token if self.first_token else 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.arrived


def reason_of(end: object) -> str:
    """What the end that a reply is given counts as; None: nobody waits for one any more."""
    if end is None:
        return LEFT
    if isinstance(end, Finish):
        return end.reason
    return FAILED if isinstance(end, Exception) else SCORED


def text_end(model: str, text: Text, end: object, now: float) -> TextEnd:
    sequence, reply = text.sequence, text.reply
    return TextEnd(
        model=model,
        request_id=reply.request_id,
        choice=sequence.choice,
        reason=reason_of(end),
        prompt_tokens=sequence.prompt_len,
        completion_tokens=sequence.output_len,
        cached_tokens=sequence.cached,
        arrived=text.arrived,
        started=text.started or 0.0,
        first_token=text.first or 0.0,
        ended=now,
        call=reply.call,
    )


class Observer:
    """Watches an engine. Its methods are called in the engine's thread, between steps: they must be
    quick, and must not wait. This one looks at nothing."""

    def stepped(self, tokens: int, made: Seq[Text], began: float, now: float) -> None:
        """A step is over.

        Args:
            tokens: how many it ran.
            made: the texts that got a token by it. `last_token` is still that of the token before;
                the engine sets it when all have looked.
            began, now: when it began and ended, by `time.monotonic`.
        """

    def ended(self, end: TextEnd) -> None:
        """A text is over, and its reply does not know it yet."""


NOBODY = Observer()


class Several(Observer):
    """Hands on to others what it is told, and the end of each text to its call.

    One that fails is left out from then on: who looks on must not take the engine down.
    """

    def __init__(self, *observers: Observer) -> None:
        self._observers = list(observers)

    def stepped(self, tokens: int, made: Seq[Text], began: float, now: float) -> None:
        for observer in list(self._observers):
            try:
                observer.stepped(tokens, made, began, now)
            except Exception:  # noqa: BLE001 - see above
                self._leave_out(observer)

    def ended(self, end: TextEnd) -> None:
        if end.call is not None:
            end.call.texts.append(end)
        for observer in list(self._observers):
            try:
                observer.ended(end)
            except Exception:  # noqa: BLE001 - see above
                self._leave_out(observer)

    def _leave_out(self, observer: Observer) -> None:
        log.exception("%s failed and sees nothing any more", type(observer).__name__)
        self._observers.remove(observer)
