"""What gRPC's core was asked for stays in memory until it has answered."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest

from serve.life import Listener
from serve.outstanding import ASKING, KeepAsking, keep_asking
from serve.settings import ListenSettings
from tests.serve.nonsense import HEADERS, PREFACE, SETTINGS, frame, headers


async def until(true: Callable[[], bool], what: str) -> None:
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what}: grpc.aio's coroutines that do it may not be {set(ASKING)}")


def test_after_a_fall_of_grpcs_the_core_answers_all_that_was_asked_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It writes into what is then still there. What was cancelled would have been freed."""
    caplog.set_level(logging.CRITICAL)
    asking: list[asyncio.Task[Any]] = []

    def noted(loop: asyncio.AbstractEventLoop, coro: Any, **settings: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=loop, **settings)
        if coro.__qualname__ in ASKING:
            asking.append(task)
        return task

    def send(address: str) -> None:
        host, _, port = address.rpartition(":")
        call = frame(HEADERS, 4, 1, headers(b"/\xff"))
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + call)
            while connection.recv(65536):
                pass

    async def body() -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(noted)
        listener = Listener(ListenSettings(port=0))
        await listener.start()
        await until(lambda: len(asking) > 5, "it asks for each method")
        fallen = list(asking)
        await loop.run_in_executor(None, send, listener.address)
        done, waiting = await asyncio.wait(fallen, timeout=30)
        assert not waiting
        assert not any(task.cancelled() for task in done)
        ended = [task.exception() for task in done]
        assert ended.count(None) == 1, "the call that it fell over"
        assert {type(error).__name__ for error in ended if error} == {"_RequestCallError"}
        await until(lambda: len(asking) == 2 * len(fallen), "it listens anew")
        assert listener.listening
        await listener.stop()

    asyncio.run(body())


def test_other_tasks_are_as_they_were() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    async def body() -> None:
        loop = asyncio.get_running_loop()
        keep_asking(loop)
        keep_asking(loop)
        factory = loop.get_task_factory()
        assert isinstance(factory, KeepAsking)
        assert not isinstance(factory._before, KeepAsking), "once"
        task = asyncio.create_task(answer(), name="named")
        assert isinstance(task, asyncio.Task)
        assert (task.get_name(), await task) == ("named", 42)
        cancelled = asyncio.create_task(answer())
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    asyncio.run(body())


@pytest.mark.parametrize("ending", ["result", "error", "cancelled"])
def test_who_waits_is_told_how_it_ended(ending: str) -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        keep_asking(loop)
        core = loop.create_future()

        async def _request_call() -> Any:
            return await core

        _request_call.__qualname__ = "AioServer._request_call"
        told = loop.create_task(_request_call())
        told.set_name(None)  # type: ignore[arg-type]  # loops of Python 3.13 do so
        given_up = asyncio.ensure_future(_request_call())
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert not core.cancelled(), "others wait for it, too"
        if ending == "result":
            core.set_result(7)
            assert await told == 7
        elif ending == "error":
            core.set_exception(KeyError("no"))
            with pytest.raises(KeyError):
                await told
        else:
            core.cancel()
            with pytest.raises(asyncio.CancelledError):
                await told

    asyncio.run(body())
