"""Keeps a load up and notes what callers see. Knows neither gRPC nor the engine: `ask` does.

Time is measured from when a request is due. In a closed loop that is when the stream's last one has
ended; in an open loop when its arrival was drawn, also if the loader itself is late. What begins in
the warm-up is not counted, nor what arrives in it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from serve.bench.asking import Ask

PAUSE_SECONDS = 0.1
"""What a stream waits after a request that failed, so that a server that is gone is not flooded."""


class RefusedError(Exception):
    """A request failed; its status is the message."""


class Message(NamedTuple):
    """What arrived at once.

    Attributes:
        prompt: tokens of the prompt, in the message that tells them, else 0.
        made: how many tokens it holds.
    """

    prompt: int
    made: int


AskServer = Callable[[Ask], AsyncIterator[Message]]
"""Sends a request and yields what arrives. Raises RefusedError if the request fails."""


@dataclass(frozen=True)
class Load:
    """How much is asked.

    Attributes:
        streams: requests under way all the time (closed loop); None: open loop.
        rate: arrivals a second (open loop), with exponentially distributed gaps.
        seconds: what is measured.
        warm_up: seconds before that.
        drain: seconds after that in which no request begins but those under way may end.
        seed: of the arrivals.
        long_rate: arrivals a second of long prompts, beside the others and counted with none.
    """

    streams: int | None
    rate: float | None
    seconds: float
    warm_up: float
    drain: float
    seed: str
    long_rate: float = 0.0


@dataclass
class Seen:
    """What was seen. Times in seconds.

    Attributes:
        tokens: that arrived while it was measured.
        prompt_tokens: of the prompts that were answered, if only by one token, meanwhile.
        first: from due to the first token, of the requests due while it was measured.
        gaps: between messages with tokens, of those that arrived meanwhile.
        whole: from due to the end.
        texts: of each of these requests time to the first token, and from there a token.
        errors: how many ended with which status.
        cut: how many had not ended when nothing more was waited for.
        long: long prompts that were answered.
    """

    seconds: float
    tokens: int = 0
    messages: int = 0
    prompt_tokens: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    texts: list[tuple[float, float]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    long: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Seen:
        return cls(**{**values, "errors": Counter(values["errors"])})


class Drive:
    """One run of a load.

    Args:
        requests: what is asked, in the order in which it becomes due.
        long: the long prompts, likewise.
        say: called about once a second with what has been seen and the seconds since the start.
    """

    def __init__(
        self,
        load: Load,
        ask: AskServer,
        requests: Iterator[Ask],
        long: Iterator[Ask],
        say: Callable[[Seen, float], None],
    ) -> None:
        self._load, self._ask, self._requests, self._long, self._say = (
            load, ask, requests, long, say,
        )  # fmt: skip
        self.seen = Seen(load.seconds)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> Seen:
        load = self._load
        self._start = time.perf_counter()
        self._begin = self._start + load.warm_up
        self._end = self._begin + load.seconds
        sources = [asyncio.ensure_future(self._progress())]
        if load.long_rate:
            sources.append(asyncio.ensure_future(self._disturb(load.long_rate)))
        if load.streams is None:
            assert load.rate is not None
            sources.append(asyncio.ensure_future(self._arrivals(load.rate)))
        else:
            for _ in range(load.streams):
                self._add(asyncio.ensure_future(self._stream()))
        await asyncio.sleep(load.warm_up + load.seconds)
        deadline = time.perf_counter() + load.drain
        for source in sources:
            source.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(0.0, deadline - time.perf_counter()))
        left = [*sources, *self._tasks]
        for task in left:
            task.cancel()
        for result in await asyncio.gather(*left, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        return self.seen

    def _add(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:  # else it is kept, and raised at the end
            self._tasks.discard(task)

    async def _stream(self) -> None:
        while (now := time.perf_counter()) < self._end:
            if not await self._one(next(self._requests), now):
                await asyncio.sleep(PAUSE_SECONDS)

    async def _arrivals(self, rate: float) -> None:
        async for due in self._poisson(rate, "arrivals"):
            self._add(asyncio.ensure_future(self._count(next(self._requests), due)))

    async def _count(self, ask: Ask, due: float) -> None:
        await self._one(ask, due)

    async def _disturb(self, rate: float) -> None:
        async for due in self._poisson(rate, "long"):
            self._add(asyncio.ensure_future(self._one_long(next(self._long), due)))

    async def _poisson(self, rate: float, what: str) -> AsyncIterator[float]:
        numbers = random.Random(f"{self._load.seed}:{what}")
        due = self._start
        while True:
            due += numbers.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            yield due

    async def _one(self, ask: Ask, due: float) -> bool:
        """Ask and note; whether it went well."""
        seen, counted = self.seen, self._begin <= due < self._end
        first = last = None
        tokens = prompt = 0
        try:
            async for told, n in self._ask(ask):
                now = time.perf_counter()
                prompt += told
                if not n:
                    continue
                inside = self._begin <= now < self._end
                if inside:
                    seen.tokens += n
                    seen.messages += 1
                if first is None:
                    first = now
                    if inside:
                        seen.prompt_tokens += prompt
                    if counted:
                        seen.first.append(now - due)
                elif inside and last is not None:
                    seen.gaps.append(now - last)
                last = now
                tokens += n
        except RefusedError as error:
            if counted:
                seen.errors[str(error)] += 1
            return False
        except asyncio.CancelledError:
            seen.cut += counted
            raise
        if counted and first is not None and last is not None:
            seen.whole.append(time.perf_counter() - due)
            seen.texts.append((first - due, (last - first) / max(1, tokens - 1)))
        return True

    async def _one_long(self, ask: Ask, due: float) -> None:
        try:
            async for _, n in self._ask(ask):
                self.seen.long += bool(n) and self._begin <= time.perf_counter() < self._end
        except RefusedError as error:
            if self._begin <= due < self._end:
                self.seen.errors[f"long prompts: {error}"] += 1

    async def _progress(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._say(self.seen, time.perf_counter() - self._start)
