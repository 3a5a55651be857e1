"""Reply: one request's text on its way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gpt.errors import ServerError
from gpt.stream import FinishReason


class GenerationFailedError(Exception):
    """The model failed on this request. Not the caller's mistake."""


class EngineStoppedError(ServerError):
    """The engine takes no requests any more, or ended while this one was held."""


@dataclass(frozen=True)
class Delta:
    """Text that is now certain, and the tokens made since the last delta."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Finish:
    """How a text ended.

    Attributes:
        completion_tokens: all tokens made, end-of-text and those of a stop string included.
        queue_seconds: from `Engine.submit` to the first step.
        prefill_seconds: from there to the first token.
        decode_seconds: from the first token to the last.
    """

    reason: FinishReason
    matched_stop: str | None
    prompt_tokens: int
    completion_tokens: int
    seed: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


class Reply:
    """An async iterator over `Delta`s that ends with one `Finish`, or raises.

    What the reader has not taken yet is kept as *one* delta: a slow reader gets fewer and larger
    ones, and a request never holds more than its own text. Belongs to the event loop it was made
    in; only `cancel` may be called from elsewhere.

    Raises (from iteration):
        GenerationFailedError: the model failed on it.
        EngineStoppedError: the engine ended first.
    """

    def __init__(
        self, request_id: str, prompt_tokens: int, seed: int, cancel: Callable[[], None]
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.seed = seed
        self.cancel = cancel
        """Stop making it and free what it holds, within one step. Harmless when it is over."""
        self.loop = asyncio.get_running_loop()
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._end: Finish | Exception | None = None
        self._over = False
        self._arrived = asyncio.Event()

    def deliver(self, text: str, token: int | None, end: Finish | Exception | None) -> None:
        """Take what a step made. The engine has this called in the reply's event loop."""
        if token is not None:
            self._text.append(text)
            self._token_ids.append(token)
        self._end = end
        self._arrived.set()

    def __aiter__(self) -> Reply:
        return self

    async def __anext__(self) -> Delta | Finish:
        if self._over:
            raise StopAsyncIteration
        while not self._token_ids and self._end is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._token_ids:
            delta = Delta("".join(self._text), self._token_ids)
            self._text, self._token_ids = [], []
            return delta
        self._over = True
        if isinstance(self._end, Finish):
            return self._end
        assert self._end is not None
        raise self._end
