"""Lane: one thread for work that must not be done on the event loop, and a bounded queue to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from gpt.errors import ServerError

T = TypeVar("T")


class LaneFullError(ServerError):
    """As much work waits for the lane as may."""


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
        self._next_end: asyncio.Future[None] | None = None

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
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            self.held -= 1
            if self._next_end is not None:
                self._next_end.set_result(None)
                self._next_end = None
            if answer.cancelled():
                return
            if error is None:
                answer.set_result(cast(T, result))
            else:
                answer.set_exception(error)
                answer.exception()  # if the caller goes in this very moment, nobody looks at it

        def work() -> None:
            result, error = None, None
            try:
                if not answer.cancelled():
                    result = function(*arguments)
            except BaseException as raised:  # noqa: BLE001 - raised again where it is awaited
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(settle, result, error)

        self.held += 1
        self._executor.submit(work)
        return await answer

    async def one_ends(self) -> None:
        """Wait until the thread has let go of a function; there must be one."""
        if self._next_end is None:
            self._next_end = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_end)  # several may wait for it, and one may give up
