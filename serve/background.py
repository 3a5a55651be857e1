"""A server inside a Python program, on a thread of its own: for tests, notebooks and demos."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from serve.life import Listener
from serve.settings import ListenSettings

if TYPE_CHECKING:
    from types import TracebackType

    from serve.engine import Engine
    from serve.watching import Watching


class BackgroundServer:
    """A context manager: inside it the engine answers on `target`, by default a free port of this
    machine.

    Args:
        engine: not yet started; the server starts and stops it. None: health says NOT_SERVING, as
            while a model is being loaded.
        settings: of the network.
        watching: what is told of calls and of the engine.

    Attributes:
        target: `host:port`, for `serve.client.Client`.
        loop: the server's event loop, running in its thread.
        listener: what listens there, once it does.
    """

    def __init__(
        self,
        engine: Engine | None,
        settings: ListenSettings | None = None,
        watching: Watching | None = None,
    ) -> None:
        self._engine = engine
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
            if self._engine is not None:
                self._engine.start()
                self.listener.open(self._engine)
        except BaseException as error:  # noqa: BLE001 - raised where the server was asked for
            self._ready.set_exception(error)
            return
        self._ready.set_result(self.listener.address)
        await self._stop.wait()
        await self.listener.drain(0)
        if self._engine is not None:
            await self.loop.run_in_executor(None, self._engine.stop)
        await self.listener.stop()
