"""Keeps in memory what gRPC's core has yet to write to.

grpc.aio asks its core for the next call of each method in a task, and hands over the address of an
object that the task holds. If its loop over calls ends with an exception, which anybody can bring
about (`Listener._keep`), it cancels these tasks, and with them go the objects. Only then it has the
core end what was asked of it, and the core writes to all of them: to memory that is another
object's by then. Some of these processes ended with a segmentation fault (grpcio 1.85.3).

So those tasks are not cancelled here. Who cancels one is told that it is, and the task itself goes
on until the core has answered it, as long as the loop runs: a listener is to be stopped first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

ASKING = frozenset({"AioServer._request_call", "AioServer._request_registered_call"})
"""Coroutines of grpc.aio that wait for a call."""


class _Told(asyncio.Future[Any]):
    """What a task is taken for. A loop of Python 3.13 names all that a factory makes."""

    def get_name(self) -> str:
        return "told"

    def set_name(self, name: object) -> None:
        """It has the one name."""


class KeepAsking:
    """A task factory (`loop.set_task_factory`) that makes these tasks last.

    Args:
        before: the factory of before, which makes the tasks; None: asyncio's own.
    """

    def __init__(self, before: Any = None) -> None:
        self._before = before or _plain
        self._kept: set[asyncio.Task[Any]] = set()  # a loop has only weak references

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **settings: Any
    ) -> asyncio.Future[Any]:
        task: asyncio.Task[Any] = self._before(loop, coro, **settings)
        if getattr(coro, "__qualname__", "") not in ASKING:
            return task
        told = _Told(loop=loop)

        def tell(task: asyncio.Task[Any]) -> None:
            self._kept.discard(task)
            # Who asks for the exception has seen it: asyncio complains of none that nobody saw.
            error = None if task.cancelled() else task.exception()
            if told.done():
                return
            if task.cancelled():
                told.cancel()
            elif error is not None:
                told.set_exception(error)
            else:
                told.set_result(task.result())

        self._kept.add(task)
        task.add_done_callback(tell)
        return told


def keep_asking(loop: asyncio.AbstractEventLoop) -> None:
    """Have the loop's tasks made so. Once is enough."""
    before = loop.get_task_factory()
    if not isinstance(before, KeepAsking):
        # Its type asks for tasks; asyncio itself uses what comes as a future with a name.
        loop.set_task_factory(KeepAsking(before))  # type: ignore[arg-type]


def _plain(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **settings: Any
) -> asyncio.Task[Any]:
    return asyncio.Task(coro, loop=loop, **settings)
