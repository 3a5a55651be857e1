"""Replies: one request's answer on its way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from gpt.errors import ServerError, UserError
from gpt.params import Made
from serve.observing import CALL
from serve.results import Delta, Finish, TokenScore

R = TypeVar("R", bound="Reply")


class ImpossibleError(UserError):
    """Nothing that the request allows could come next.

    Attributes:
        violations: `(field, description)` of what it asked.
    """

    def __init__(self, violations: list[tuple[str, str]]) -> None:
        self.violations = violations
        super().__init__("; ".join(f"{field}: {text}" for field, text in violations))


class EngineStoppedError(ServerError):
    """The engine takes no requests any more, or ended while this one was held."""


@dataclass(frozen=True)
class Scored:
    """A text that has been scored.

    Attributes:
        made: one for each of its tokens.
        queue_seconds: from `Engine.score` to the first step.
        prefill_seconds: from there to the last.
    """

    made: list[Made]
    queue_seconds: float
    prefill_seconds: float


class Reply:
    """What all replies have in common. Leaving its context cancels it.

    Belongs to the event loop it was made in; only `cancel` may be called from elsewhere.

    Attributes:
        cancel: stop the work and free what it holds, within one step. Harmless when it is over.
        call: the RPC that it answers.
    """

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self.cancel = cancel
        self.loop = asyncio.get_running_loop()
        self.call = CALL.get()
        self._end: Finish | Scored | Exception | None = None
        self._arrived = asyncio.Event()

    def deliver(self, delta: Delta | None, end: Finish | Scored | Exception | None) -> None:
        """Take what a step made. The engine has this called in the reply's event loop."""
        self._end = end
        self._arrived.set()

    def __enter__(self: R) -> R:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


class TextReply(Reply):
    """An async iterator over the `Delta`s of one or more texts; each ends with one `Finish`.

    What the reader has not taken yet is kept as *one* delta a text: a slow reader gets fewer and
    larger ones, and a request never holds more than its own texts.

    Attributes:
        prompt_scores: those of the prompt's tokens, if they were asked for, once `prompt_read` is
            done.

    Raises (from iteration):
        GenerationFailedError: the model failed on it.
        ImpossibleError: nothing that the request allows could come next.
        EngineStoppedError: the engine ended first.
    """

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        seed: int,
        choices: int,
        cancel: Callable[[], None],
    ) -> None:
        super().__init__(request_id, cancel)
        self.prompt_tokens = prompt_tokens
        self.seed = seed
        self.prompt_scores: list[TokenScore] = []
        self._waiting: dict[int, list[Delta]] = {}
        self._ends: list[Finish] = []
        self._error: Exception | None = None
        self._left = choices
        self._begun: set[int] = set()

    def deliver(self, delta: Delta | None, end: Finish | Scored | Exception | None) -> None:
        if delta is not None:
            self._waiting.setdefault(delta.choice, []).append(delta)
            self._begun.add(delta.choice)
        if isinstance(end, Finish):
            self._ends.append(end)
            self._begun.add(end.choice)
        elif isinstance(end, Exception):
            self._error = self._error or end
        self._arrived.set()

    async def prompt_read(self) -> None:
        """Wait until the first text has begun, or will not."""
        while not (0 in self._begun or self._error):
            self._arrived.clear()
            await self._arrived.wait()

    def __aiter__(self) -> TextReply:
        return self

    async def __anext__(self) -> Delta | Finish:
        if not self._left:
            raise StopAsyncIteration
        while not (self._waiting or self._ends or self._error):
            self._arrived.clear()
            await self._arrived.wait()
        if self._waiting:
            deltas = self._waiting.pop(next(iter(self._waiting)))
            return deltas[0] if len(deltas) == 1 else _merged(deltas)
        if self._ends:
            self._left -= 1
            return self._ends.pop(0)
        self._left = 0
        assert self._error is not None
        raise self._error


def _merged(deltas: list[Delta]) -> Delta:
    return Delta(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        [score for delta in deltas for score in delta.scores],
        [piece for delta in deltas for piece in delta.pieces],
        deltas[0].choice,
    )


class ScoreReply(Reply):
    """The scores of a text, once they are all there."""

    async def scored(self) -> Scored:
        """Wait for them.

        Raises:
            GenerationFailedError: the model failed on it.
            EngineStoppedError: the engine ended first.
        """
        while self._end is None:
            self._arrived.clear()
            await self._arrived.wait()
        if isinstance(self._end, Exception):
            raise self._end
        assert isinstance(self._end, Scored)
        return self._end
