"""The life of a server process: bind, load, serve, drain, exit.

bind ─▶ load ─▶ warm up ─▶ serve ─▶ drain ─▶ exit 0
 │       └ NOT_SERVING ┘  SERVING  NOT_SERVING
 └ port taken: exit at once
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gpt.errors import ServerError
from serve import logs
from serve.address import UnixSocket, host_of
from serve.auth import Authenticate, Keys
from serve.connection import NEAR
from serve.engines import Engines, Load
from serve.faults import StuckError
from serve.health import Health
from serve.limits import Limits
from serve.malformed import RefuseMalformed
from serve.models import Models, Served
from serve.outstanding import keep_asking
from serve.reload import follow
from serve.service import NAME, GenerationService
from serve.tls import Certificates
from serve.v1 import generation_pb2_grpc
from serve.watching import Watching

if TYPE_CHECKING:
    from serve.engine import Engine
    from serve.server import Settings
    from serve.settings import ListenSettings

log = logging.getLogger(__name__)

PONG_SECONDS = 20.0
"""What a client that is pinged gets to answer."""

NEVER_MS = 2**31 - 1

MAX_FILES = 65_536
"""File descriptors that the process asks for, if it may have so many."""

GOODBYE_SECONDS = 1.0
"""What connections get to close by themselves once no generation is running."""

KEEP_SECONDS, REBIND_TRIES = 0.2, 50
"""How often it is seen to that the port is still ours, and how often it is tried again if not."""


class Listener:
    """A bound port, or socket, with all services on it, not yet serving.

    Args:
        watching: what is told of calls and of the engine; the listener closes it.

    Attributes:
        models: what is served there.
        address: for clients, with the port that was found.
        kept: done, with an exception, if the port was lost and could not be had again.

    Raises:
        ServerError: the port cannot be had, or certificate and key cannot be used.
        ConfigError: the API keys cannot be used.
    """

    def __init__(self, settings: ListenSettings, watching: Watching | None = None) -> None:
        self.watching = watching or Watching()
        self.models = Models()
        self.service = GenerationService(self.models)
        self.health = Health(NAME)
        self._settings = settings
        self._certificates: Certificates | None = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            self._certificates = Certificates(
                settings.tls_cert, settings.tls_key, settings.tls_client_ca
            )
        self._interceptors: list[grpc.aio.ServerInterceptor] = [RefuseMalformed()]
        self._keys: Keys | None = None
        if settings.api_keys_file is not None or settings.api_keys:
            limits = Limits(settings.key_concurrent, settings.key_per_minute)
            self._keys = Keys(settings.api_keys_file, settings.api_keys, limits)
            self._interceptors.insert(0, Authenticate(self._keys))
            log.info("callers need an API key; there are: %s", ", ".join(self._keys.labels))
        if self._certificates is None and not settings.host.startswith(NEAR):
            log.warning("no TLS: texts%s travel in the clear", " and keys" if self._keys else "")
        self._interceptors.insert(0, self.watching.calls)  # who is refused is counted, too
        self._socket: UnixSocket | None = None
        if settings.host.startswith("unix:"):
            path = Path(settings.host.removeprefix("unix:").removeprefix("//"))
            self._socket = UnixSocket(path, settings.socket_mode)
            self.address = self._socket.address
            self._server, _ = self._bind(self.address)
        else:
            host = host_of(settings.host)
            self._server, bound = self._bind(f"{host}:{settings.port}")
            self.address = f"{host}:{bound}"
        self._following: list[asyncio.Task[None]] = []

    def _bind(self, address: str) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(interceptors=self._interceptors, options=_options(self._settings))
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        if self._settings.reflection:
            names = (NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        try:
            with self._socket.binding() if self._socket else contextlib.nullcontext():
                bound = (
                    server.add_insecure_port(address)
                    if self._certificates is None
                    else server.add_secure_port(address, self._certificates.credentials())
                )
        except RuntimeError:
            bound = 0
        if not bound:
            raise ServerError(
                f"cannot listen on {address}: the port is taken, or the address is not "
                "this machine's; stop what uses it, or choose another with --port (0 takes a free "
                "one)"
                if self._socket is None
                else f"cannot listen on {address}; may this user make files there?"
            )
        return server, bound

    async def start(self) -> None:
        """Answer: health NOT_SERVING, everything else UNAVAILABLE."""
        asyncio.get_running_loop().set_exception_handler(_unless_no_text)
        await self._take_calls()
        self.kept = asyncio.ensure_future(self._keep())
        for each in (self._certificates, self._keys):
            if each is not None and each.paths:
                self._following.append(asyncio.ensure_future(follow(each.paths, each.reload)))

    async def _take_calls(self) -> None:
        keep_asking(asyncio.get_running_loop())
        await self._server.start()

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
                    self._server, _ = self._bind(self.address)
                    break
                except ServerError:  # it closes its sockets in its own time
                    if attempt == REBIND_TRIES - 1:
                        raise
                    await asyncio.sleep(KEEP_SECONDS)
            await self._take_calls()

    @property
    def listening(self) -> bool:
        """Whether calls are taken. Told by a private part of gRPC's: what it offers to wait for
        waits for calls that nobody ends."""
        return bool(self._server._server.is_running())

    def put(self, served: Served) -> Served | None:
        """Serve a model under its name; returns what it replaces, which gets no new requests."""
        self.watching.attach(served.engine)
        return self.models.put(served)

    def open(self, *engines: Engine) -> None:
        """SERVING from here on, these and what has been put before; the first is the default."""
        for engine in engines:
            self.put(Served(engine, self._settings.max_prompt_bytes))
        self.service.open()
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
        for task in (self.kept, *self._following):
            task.cancel()
        self.health.end()
        await self._server.stop(GOODBYE_SECONDS)
        if self._socket is not None:
            self._socket.remove()
        await asyncio.get_running_loop().run_in_executor(None, self.watching.close)


def _unless_no_text(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report what nobody caught, but for the traceback of a path that took gRPC down: `_keep` has a
    line for that, and anybody could fill the disk with more."""
    if not isinstance(context.get("exception"), UnicodeDecodeError):
        loop.default_exception_handler(context)


def _options(settings: ListenSettings) -> list[tuple[str, int]]:
    """Of the transport, in gRPC's words."""
    keepalive = int(settings.keepalive_seconds * 1000) or NEVER_MS
    age = int(settings.max_connection_age * 1000) or NEVER_MS
    grace = int(settings.max_connection_age_grace * 1000) or NEVER_MS
    return [
        ("grpc.so_reuseport", 0),  # else a second server would silently share the port
        ("grpc.max_receive_message_length", settings.max_receive_bytes),
        ("grpc.max_send_message_length", settings.max_send_bytes),
        ("grpc.keepalive_time_ms", keepalive),
        ("grpc.keepalive_timeout_ms", int(PONG_SECONDS * 1000)),
        # At that age a connection gets GOAWAY: no new calls, and those that run go on.
        ("grpc.max_connection_age_ms", age),
        ("grpc.max_connection_age_grace_ms", grace),
        # gRPC's own policy takes a client that pings more than every five minutes for an attacker,
        # and one that has no call open, whatever it does.
        ("grpc.http2.min_ping_interval_without_data_ms", int(settings.min_ping_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def run(settings: Settings, load: Load) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

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


async def _life(settings: Settings, load: Load) -> bool:
    """Returns False if a thread is left that is not to be waited for: a model was still being
    loaded when it was told to stop."""
    engines = Engines(settings, load)
    stop = _stop_on_signals(engines)
    _allow_many_connections()
    listener = Listener(settings, Watching(settings))
    await listener.start()
    models = ", ".join(str(source.path) for source in settings.models)
    log.info("listening on %s, loading %s", listener.address, models)
    stopping = asyncio.ensure_future(stop.wait())
    bringing_up = asyncio.ensure_future(engines.start(listener.put))
    await _either(bringing_up, stopping)
    if not bringing_up.done():
        await listener.stop()
        return False
    try:
        bringing_up.result()
        listener.open()
        names = ", ".join(place.source.name for place in engines.places)
        print(f"serving {names} on {listener.address}", flush=True)
        engines.follow(listener.put, listener.watching.detach)
        await _either(engines.failed, stopping, listener.kept)
        if listener.kept.done():
            listener.kept.result()
        if not engines.failed.done():
            engines.stop_following()
            log.info("draining %d requests, up to %g s", engines.held, settings.drain_seconds)
            if not await listener.drain(settings.drain_seconds):
                log.warning("%d requests did not end in time and are cut off", engines.held)
        error = await engines.stop()
        await listener.drain(GOODBYE_SECONDS)
        if error is not None:
            raise ServerError(f"the engine failed, so the server ends: {error!r}") from error
    finally:
        await listener.stop()
    log.info("stopped")
    return engines.alone


async def _either(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _allow_many_connections() -> None:
    """Each takes a file descriptor, and many systems give a process 1,024 unless it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _stop_on_signals(engines: Engines) -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second ends the process at once. SIGHUP
    asks for what is new, unless it says that the terminal is gone: then it ends the server, too."""
    stop = asyncio.Event()
    at_terminal = _has_terminal()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("%s again: exiting at once", number.name)
            logs.flush()
            os._exit(128 + number)
        log.info("%s: stopping", number.name)
        stop.set()

    loop = asyncio.get_running_loop()

    def on_hangup() -> None:
        if at_terminal and not _has_terminal():
            on_signal(signal.SIGHUP)
        else:
            log.info("SIGHUP: looking for new models")
            engines.ask()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    return stop


def _has_terminal() -> bool:
    """Whether the process belongs to a terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
