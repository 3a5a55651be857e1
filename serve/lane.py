"""Lane: one thread for work that must not be done on the event loop, and a bounded queue to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gpt.errors import ServerError

T = TypeVar("T")


class LaneFullError(ServerError):
    """As much work waits for the lane as may."""


class _UnwantedError(Exception):
    """The caller has gone; nobody sees this."""


class Lane:
    """Runs functions one after another, off the event loop of whoever awaits them.

    What is held counts until the thread has let go of it, not until its caller has: callers who
    give up cannot pile up work. Belongs to one event loop.

    Args:
        name: of the thread.
        capacity: most functions running or waiting; None: its callers see to that.

    Attributes:
        held: functions running or waiting.
    """

    def __init__(self, name: str, capacity: int | None = None) -> None:
        self.held = 0
        self.capacity = capacity
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result.

        If the caller is cancelled, a function that waits is not run, and one that runs ends unseen.

        Raises:
            LaneFullError: come again later.
        """
        if self.capacity is not None and self.held >= self.capacity:
            raise LaneFullError(
                f"{self.held} requests of this kind are running or waiting, as many as may; "
                "try again later"
            )
        wanted = True

        def work() -> T:
            if not wanted:
                raise _UnwantedError
            return function(*arguments)

        self.held += 1
        future = asyncio.wrap_future(self._executor.submit(work))
        try:
            return await asyncio.shield(future)
        finally:
            if future.done():
                self.held -= 1
            else:
                wanted = False
                future.add_done_callback(self._let_go)

    def _let_go(self, future: asyncio.Future[Any]) -> None:
        self.held -= 1
        if not future.cancelled():
            future.exception()  # nobody else will look at it
