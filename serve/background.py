"""A server inside a Python program, on a thread of its own: for tests, notebooks and demos."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from serve.life import Listener
from serve.settings import ListenSettings

if TYPE_CHECKING:
    from types import TracebackType

    from serve.engine import Engine
    from serve.watching import Watching


class BackgroundServer:
    """A context manager: inside it the engines answer on `target`, by default a free port of this
    machine.

    Args:
        engines: one or several, not yet started; the server starts and stops them. None: health
            says NOT_SERVING, as while a model is being loaded.
        settings: of the network.
        watching: what is told of calls and of the engine.

    Attributes:
        target: `host:port`, for `serve.client.Client`.
        loop: the server's event loop, running in its thread.
        listener: what listens there, once it does.
    """

    def __init__(
        self,
        engines: Engine | Sequence[Engine] | None,
        settings: ListenSettings | None = None,
        watching: Watching | None = None,
    ) -> None:
        if engines is None:
            engines = []
        self._engines = engines if isinstance(engines, Sequence) else [engines]
        self._watching = watching
        self._settings = settings or ListenSettings()
        self._ready: Future[str] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="antiphon-server", daemon=True
        )
        self.target = ""

    def __enter__(self) -> BackgroundServer:
        self._thread.start()
        self.target = self._ready.result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            self.listener = Listener(self._settings, self._watching)
            await self.listener.start()
            for engine in self._engines:
                engine.start()
            if self._engines:
                self.listener.open(*self._engines)
        except BaseException as error:  # noqa: BLE001 - raised where the server was asked for
            self._ready.set_exception(error)
            return
        self._ready.set_result(self.listener.address)
        await self._stop.wait()
        await self.listener.drain(0)
        for engine in self._engines:
            await self.loop.run_in_executor(None, engine.stop)
        await self.listener.stop()
