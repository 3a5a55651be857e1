"""A lane: work off the event loop, and no more of it than allowed."""

from __future__ import annotations

import asyncio
import threading

import pytest

from serve.lane import Lane, LaneFullError


def test_it_gives_results_and_errors_and_lets_go_of_both() -> None:
    async def body() -> None:
        lane = Lane("test", 1)
        assert await lane.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await lane.run(divmod, 7, 0)
        assert lane.held == 0

    asyncio.run(body())


def test_the_loop_goes_on_while_it_works() -> None:
    async def body() -> None:
        lane, gate = Lane("test"), threading.Event()
        waiting = asyncio.ensure_future(lane.run(gate.wait, 20))
        await asyncio.sleep(0)
        assert lane.held == 1
        gate.set()
        assert await waiting

    asyncio.run(body())


def test_callers_who_give_up_make_no_room_until_the_thread_has_let_go() -> None:
    ran = []

    async def body() -> None:
        lane, gate, entered = Lane("test", 2), threading.Event(), threading.Event()

        def work() -> bool:
            entered.set()
            return gate.wait(20)

        callers = [
            asyncio.ensure_future(lane.run(work)),
            asyncio.ensure_future(lane.run(ran.append, "unwanted")),
        ]
        while not entered.is_set():
            await asyncio.sleep(0.001)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        assert lane.held == 2
        with pytest.raises(LaneFullError, match="2 requests of this kind"):
            await lane.run(ran.append, "refused")
        gate.set()
        while lane.held:
            await asyncio.sleep(0.001)
        await lane.run(ran.append, "wanted")

    asyncio.run(body())
    assert ran == ["wanted"]


def test_work_that_outlives_the_loop_ends_quietly(caplog: pytest.LogCaptureFixture) -> None:
    gate, lane = threading.Event(), Lane("test")

    async def body() -> None:
        asyncio.ensure_future(lane.run(gate.wait, 20))  # noqa: RUF006 - cancelled with the loop
        await asyncio.sleep(0)

    asyncio.run(body())
    gate.set()
    lane._executor.shutdown(wait=True)
    assert not caplog.records
