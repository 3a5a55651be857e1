"""The life of a server process: bind, load, serve, drain, exit.

bind ─▶ load ─▶ warm up ─▶ serve ─▶ drain ─▶ exit 0
 │       └ NOT_SERVING ┘  SERVING  NOT_SERVING
 └ port taken: exit at once
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gpt.errors import ServerError
from gpt.params import SamplingParams
from gpt.starter import Starter
from serve import logs
from serve.asked import Asked
from serve.faults import GenerationFailedError, StuckError, watch
from serve.health import Health
from serve.malformed import RefuseMalformed
from serve.service import NAME, GenerationService
from serve.v1 import generation_pb2_grpc
from serve.watching import Watching

if TYPE_CHECKING:
    from serve.engine import Engine
    from serve.server import Settings

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_MESSAGE_BYTES = 4 * 2**20
"""Largest request; a prompt of 500,000 token ids fits."""

GOODBYE_SECONDS = 1.0
"""What connections get to close by themselves once no generation is running."""

KEEP_SECONDS, REBIND_TRIES = 0.2, 50
"""How often it is seen to that the port is still ours, and how often it is tried again if not."""

LAST_STEP_SECONDS = 10.0
"""What the step that is running gets to end when the process is to end."""

LAST_SECONDS = 5.0
"""What a process with a stuck step gets to tell its clients before it is ended whatever it does."""


class Listener:
    """A bound port with all services on it, not yet serving.

    Args:
        port: 0 takes a free one.
        watching: what is told of calls and of the engine; the listener closes it.

    Attributes:
        kept: done, with an exception, if the port was lost and could not be had again.

    Raises:
        ServerError: the port cannot be had.
    """

    def __init__(self, host: str, port: int, watching: Watching | None = None) -> None:
        self.watching = watching or Watching()
        self.service = GenerationService()
        self.health = Health(NAME)
        if host.partition(":")[0] in ("unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6"):
            # gRPC would take these for other kinds of address, and HOST:PORT for a path.
            raise ServerError(
                f"{host!r} is no address to listen on; give a host name or IP address"
            )
        self._host = f"[{host}]" if ":" in host else host
        self._server, bound = self._bind(port)
        self.address = f"{self._host}:{bound}"
        self._port = bound

    def _bind(self, port: int) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(
            interceptors=[self.watching.calls, RefuseMalformed()],
            options=[
                ("grpc.so_reuseport", 0),  # else a second server would silently share the port
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ],
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        names = (NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            bound = server.add_insecure_port(f"{self._host}:{port}")
        except RuntimeError:
            bound = 0
        if not bound:
            raise ServerError(
                f"cannot listen on {self._host}:{port}: the port is taken, or the address is not "
                "this machine's; stop what uses it, or choose another with --port (0 takes a free "
                "one)"
            )
        return server, bound

    async def start(self) -> None:
        """Answer: health NOT_SERVING, everything else UNAVAILABLE."""
        asyncio.get_running_loop().set_exception_handler(_unless_no_text)
        await self._server.start()
        self.kept = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        """Take the port again if gRPC gives it up. Its loop over calls ends with an exception, and
        with it all that listens, when the path of a call is not UTF-8: anybody can send that."""
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            if self.listening:
                continue
            log.warning("gRPC has dropped its connections and the port; listening anew")
            with contextlib.suppress(Exception):  # what had ended its loop
                await self._server.stop(None)
            for attempt in range(REBIND_TRIES):
                try:
                    self._server, _ = self._bind(self._port)
                    break
                except ServerError:  # it closes its sockets in its own time
                    if attempt == REBIND_TRIES - 1:
                        raise
                    await asyncio.sleep(KEEP_SECONDS)
            await self._server.start()

    @property
    def listening(self) -> bool:
        """Whether calls are taken. Told by a private part of gRPC's: what it offers to wait for
        waits for calls that nobody ends."""
        return bool(self._server._server.is_running())

    def open(self, engine: Engine) -> None:
        """SERVING from here on."""
        self.watching.attach(engine)
        self.service.open(engine)
        self.health.set_serving(True)

    async def drain(self, seconds: float) -> bool:
        """Turn NOT_SERVING, refuse new requests, and let running ones end.

        Returns:
            Whether all ended within the limit.
        """
        self.health.set_serving(False)
        self.service.close("the server is shutting down")
        try:
            await asyncio.wait_for(self.service.idle(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Close the port and all connections."""
        self.kept.cancel()
        await self._server.stop(GOODBYE_SECONDS)
        await asyncio.get_running_loop().run_in_executor(None, self.watching.close)


def _unless_no_text(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report what nobody caught, but for the traceback of a path that took gRPC down: `_keep` has a
    line for that, and anybody could fill the disk with more."""
    if not isinstance(context.get("exception"), UnicodeDecodeError):
        loop.default_exception_handler(context)


async def warm_up(engine: Engine) -> None:
    """Run a prompt and a few tokens, so that the first caller does not pay for first uses.

    Raises:
        ServerError: the model cannot even do that.
    """
    params = SamplingParams(max_tokens=2, temperature=0, seed=0)
    prompt = [engine.tokenizer.start] * min(8, engine.model.config.block_size)
    starter = Starter(engine.model.config, engine.tokenizer)
    try:
        async for _ in engine.submit(Asked([starter.start(prompt, params)])):
            pass
    except GenerationFailedError as error:
        raise ServerError(
            f"the model failed on its first prompt ({error}); is the checkpoint damaged, or did "
            "its training diverge?"
        ) from None


def run(settings: Settings, load: Callable[[Settings], Engine]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Args:
        load: makes the engine, not yet started; runs in a thread of its own.

    Raises:
        UserError: what kept it from serving.
    """
    try:
        finished = asyncio.run(_life(settings, load))
    except ServerError as error:
        if not isinstance(error.__cause__, StuckError):
            raise
        logs.flush()
        print(f"antiphon serve: error: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # as below: the stuck thread is still there
    finally:
        logs.flush()  # what is printed besides comes after it
    if not finished:
        # Loading cannot be interrupted, and leaving the interpreter under it may crash.
        sys.stdout.flush()
        logs.flush()
        os._exit(0)
    return 0


async def _life(settings: Settings, load: Callable[[Settings], Engine]) -> bool:
    """Returns False if it was told to stop while the model was still being loaded."""
    stop = _stop_on_signals()
    listener = Listener(settings.host, settings.port, Watching(settings.watch))
    await listener.start()
    log.info("listening on %s, loading %s", listener.address, settings.model)
    stopping = asyncio.ensure_future(stop.wait())
    bringing_up = asyncio.ensure_future(_bring_up(settings, load))
    await _either(bringing_up, stopping)
    if not bringing_up.done():
        await listener.stop()
        return False
    try:
        engine = bringing_up.result()
        listener.open(engine)
        print(f"serving {engine.name} on {listener.address}", flush=True)
        ended = asyncio.wrap_future(engine.ended)
        await _either(ended, stopping, listener.kept)
        if listener.kept.done():
            listener.kept.result()
        if not ended.done():
            log.info("draining %d requests, up to %g s", engine.held, settings.drain_seconds)
            if not await listener.drain(settings.drain_seconds):
                log.warning("%d requests did not end in time and are cut off", engine.held)
            stop_engine = functools.partial(engine.stop, LAST_STEP_SECONDS)
            await asyncio.get_running_loop().run_in_executor(None, stop_engine)
        await listener.drain(GOODBYE_SECONDS)
        if error := engine.ended.exception():
            raise ServerError(f"the engine failed, so the server ends: {error!r}") from error
    finally:
        await listener.stop()
    log.info("stopped")
    return True


async def _either(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _bring_up(settings: Settings, load: Callable[[Settings], Engine]) -> Engine:
    engine = await asyncio.wrap_future(_in_thread(lambda: load(settings)))
    engine.start()
    watch(engine, settings.step_timeout, lambda: _abandon(engine, settings.step_timeout))
    await warm_up(engine)
    return engine


def _abandon(engine: Engine, seconds: float) -> None:
    """End a process whose engine is stuck: it cannot be stopped, and others cannot be served."""
    told = GenerationFailedError(f"a step of the model took longer than {seconds:g} s")
    engine.give_up(f"a step took longer than {seconds:g} s (--step-timeout)", told)
    time.sleep(LAST_SECONDS)
    log.critical("the process does not end by itself and is ended")
    logs.flush()
    os._exit(1)


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """Run in a daemon thread: unlike an executor's, it does not hold up the end of the process."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def body() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=body, name="antiphon-load", daemon=True).start()
    return future


def _stop_on_signals() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second ends the process at once."""
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("%s again: exiting at once", number.name)
            logs.flush()
            os._exit(128 + number)
        log.info("%s: stopping", number.name)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop
