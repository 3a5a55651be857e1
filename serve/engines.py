"""The engines of a server: brought up from their folders, replaced by newer ones, ended.

    something new ─▶ load beside the old one ─▶ self-check ─▶ put in its place
                              └──── fails ────────┘              └─▶ the old one: last text, end

One is loaded at a time, and none while there still is one that the last has replaced: there are
never more than two of a model in memory. Whatever goes wrong before the switch, the old one serves
on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from gpt.errors import CheckpointError, ServerError, UserError
from serve import logs
from serve.faults import GenerationFailedError, StuckError, watch
from serve.folders import Found, ModelSource
from serve.models import Served
from serve.ready import self_check, warm_up

if TYPE_CHECKING:
    from serve.engine import Engine
    from serve.server import Settings

log = logging.getLogger(__name__)
T = TypeVar("T")

Load = Callable[["Settings", ModelSource, "Engine | None"], "Engine"]
"""Makes an engine, not yet started, for what lies there, to replace another or the first."""

POLL_SECONDS = 1.0
"""How often a folder that is followed is looked at. It is loaded once two looks found the same."""

READ_TRIES = 5
"""How often a model is read that changes while it is."""

LAST_STEP_SECONDS = 10.0
"""What the step that is running gets to end when the engine is to end."""

LAST_SECONDS = 5.0
"""What a process with a stuck step gets to tell its clients before it is ended whatever it does."""


@dataclass(eq=False)
class Place:
    """A model that is served, through all its versions.

    Attributes:
        source: where it comes from, with the name that it is served under.
        engine: what serves it now.
        tried: what was last loaded from there, or could not be.
        asked: set when it is to be looked at.
        retiring: sees to the end of the engine before.
    """

    source: ModelSource
    engine: Engine
    tried: Found
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    retiring: asyncio.Task[None] | None = None


class Engines:
    """Belongs to the event loop.

    Args:
        load: runs in a thread of its own.

    Attributes:
        places: the models that are served, in the order of the settings.
        failed: done with the first engine that failed while it was serving.
    """

    def __init__(self, settings: Settings, load: Load) -> None:
        self._settings = settings
        self._load = load
        self.places: list[Place] = []
        self.failed: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._live: list[Engine] = []
        self._stuck = False
        self._read_to_end = threading.Event()
        self._read_to_end.set()
        self._one_at_a_time = asyncio.Lock()
        self._following: list[asyncio.Task[None]] = []

    @property
    def alone(self) -> bool:
        """Whether no thread of ours is left that cannot be waited for."""
        return not self._stuck and self._read_to_end.is_set()

    @property
    def held(self) -> int:
        """Requests running or waiting, in all engines."""
        return sum(engine.held for engine in self._live)

    # Coming

    async def start(self, put: Callable[[Served], object]) -> None:
        """Bring up all models.

        Args:
            put: takes each of them over. Nothing else may keep it: it would stay in memory after it
                has been replaced.

        Raises:
            UserError: one of them cannot be served.
        """
        sources = self._settings.models
        if len(sources) > 1:
            log.info("%d models share threads and the memory for KV caches evenly", len(sources))
        try:
            for source in sources:
                found, served = await self._bring_up(source, None)
                engine = served.engine
                if any(place.engine.name == engine.name for place in self.places):
                    raise ServerError(
                        f"two models are called {engine.name!r}; give {source.path} another name, "
                        f"as in NAME={source.path}"
                    )
                self.places.append(Place(replace(source, name=engine.name), engine, found))
                log.info("model %s: version %s", engine.name, engine.version or "unknown")
                put(served)
        except UserError:
            await self.stop()
            raise

    async def _bring_up(self, source: ModelSource, old: Engine | None) -> tuple[Found, Served]:
        """Load, start and try out an engine. One that fails is ended.

        Raises:
            UserError: it cannot be loaded, or fails its self-check.
            _UnchangedError: it is the version of the old one.
        """
        self._read_to_end.clear()
        reading = in_thread(functools.partial(self._read, source, old))
        reading.add_done_callback(lambda _: self._read_to_end.set())
        found, served = await asyncio.wrap_future(reading)
        engine, seconds = served.engine, self._settings.step_timeout
        self._live.append(engine)
        engine.start()
        # Neither may keep an engine that has been replaced.
        watch(engine, seconds, functools.partial(self._strike, engine, first=old is None))
        loop, ref = asyncio.get_running_loop(), weakref.ref(engine)

        def ended(_: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(self._ended, ref)

        engine.ended.add_done_callback(ended)
        try:
            await self_check(engine)
            if self._settings.warmup:
                await warm_up(engine, self._settings.max_running)
        except Exception:
            await self._stop(engine)
            raise
        return found, served

    def _read(self, source: ModelSource, old: Engine | None) -> tuple[Found, Served]:
        """Load what is there, all of it as it was at one moment. In a thread of its own."""
        if source.expected:
            log.info("waiting for the first checkpoint of %s", source.path)
            while source.expected:
                time.sleep(POLL_SECONDS)
        for _ in range(READ_TRIES):
            found = Found.at(source)
            try:
                version = found.version()
                if old is not None and version == old.version:
                    raise _UnchangedError(found)
                engine = self._load(self._settings, replace(source, path=found.path), old)
            except UserError:
                if Found.at(source) == found:
                    raise
                continue
            if Found.at(source) == found:
                engine.version = version
                return found, Served(engine, self._settings.max_prompt_bytes)
            del engine
        raise CheckpointError(f"{source.path} changes faster than it can be read")

    def _strike(self, engine: Engine, *, first: bool) -> None:
        """A step does not end. In the watchdog's thread. Its own thread cannot be stopped, so if it
        is what serves, the process must end; if not, the others go on beside it."""
        seconds = self._settings.step_timeout
        told = GenerationFailedError(f"a step of the model took longer than {seconds:g} s")
        reason = f"a step took longer than {seconds:g} s (--step-timeout)"
        self._stuck = True
        serving = first or any(place.engine is engine for place in self.places)
        engine.give_up(reason, told)
        if serving:
            time.sleep(LAST_SECONDS)
            log.critical("the process does not end by itself and is ended")
            logs.flush()
            os._exit(1)

    def _ended(self, ref: weakref.ref[Engine]) -> None:
        for place in self.places:
            engine = place.engine
            if engine is ref() and engine.ended.exception() and not self.failed.done():
                self.failed.set_result(engine)

    # Changing

    def ask(self) -> None:
        """Look at all models now."""
        if not self.places:
            log.info("asked for new models while the first are being loaded: nothing to do")
        for place in self.places:
            place.asked.set()

    def follow(
        self, put: Callable[[Served], Served | None], detach: Callable[[Engine], None]
    ) -> None:
        """From here on, take over what is new: in folders that are watched as it comes, in all when
        asked.

        Args:
            put: serves it, and returns what it replaces.
            detach: is told of an engine that has been replaced and has ended.
        """
        for place in self.places:
            task = asyncio.ensure_future(self._follow(place, put, detach))
            self._following.append(task)

    async def _follow(
        self,
        place: Place,
        put: Callable[[Served], Served | None],
        detach: Callable[[Engine], None],
    ) -> None:
        seen, watched = place.tried, place.source.watched
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(place.asked.wait(), POLL_SECONDS if watched else None)
            asked = place.asked.is_set()
            place.asked.clear()
            name, version = place.source.name, place.engine.version
            found = await asyncio.to_thread(Found.at, place.source)
            settled, seen = found == seen, found
            if not asked and (not settled or not found.marks or found == place.tried):
                continue
            if place.retiring is not None:
                if not place.retiring.done():
                    log.info("model %s: what is new waits for the end of the one before", name)
                await asyncio.wait([place.retiring])
            try:
                async with self._one_at_a_time:
                    await self._replace(place, put, detach)
            except _UnchangedError as unchanged:
                place.tried = unchanged.found
                log.info("model %s: nothing new, it stays at version %s", name, version)
            except UserError as error:
                place.tried = found
                log.error("model %s: version %s serves on: %s", name, version, error)
            except Exception:  # the next change is still to be seen
                place.tried = found
                log.exception("model %s: version %s serves on", name, version)

    async def _replace(
        self,
        place: Place,
        put: Callable[[Served], Served | None],
        detach: Callable[[Engine], None],
    ) -> None:
        began, name, before = time.monotonic(), place.source.name, place.engine
        place.tried, served = await self._bring_up(place.source, before)
        old = put(served)
        place.engine = served.engine
        assert old is not None
        assert old.engine is before
        log.info(
            "model %s: version %s takes over from %s after %.1f s; %d requests end on the old one",
            name,
            place.engine.version,
            before.version,
            time.monotonic() - began,
            old.users,
        )
        place.retiring = asyncio.ensure_future(self._retire(old, detach))

    # Going

    async def _retire(self, old: Served, detach: Callable[[Engine], None]) -> None:
        """End an engine that nobody new is given to, once the last has got his answer."""
        engine, seconds = old.engine, self._settings.retire_seconds
        title = f"model {engine.name}: version {engine.version}"
        try:
            await asyncio.wait_for(old.unused(), seconds)
        except asyncio.TimeoutError:
            log.warning(
                "%s still has %d requests after %g s (--retire-seconds), which are cut off",
                title,
                old.users,
                seconds,
            )
        await self._stop(
            engine,
            "the model was replaced by a newer one, and the text was not complete within "
            f"{seconds:g} s",
        )
        detach(engine)
        if engine.ended.exception() is None:
            if pages := engine.pages_used:
                log.error(
                    "%s has ended and %d pages of its cache were never given back", title, pages
                )
            log.info("%s has ended", title)

    async def _stop(self, engine: Engine, because: str = "") -> None:
        """End an engine that does not serve."""
        if not engine.ended.done():
            await asyncio.wrap_future(in_thread(lambda: engine.stop(LAST_STEP_SECONDS, because)))
        self._live.remove(engine)
        if error := engine.ended.exception():
            self._stuck = self._stuck or isinstance(error, StuckError)
            log.error("an engine that does not serve has failed: %r", error)

    def stop_following(self) -> None:
        """Take over nothing more."""
        for task in self._following:
            task.cancel()

    async def stop(self) -> BaseException | None:
        """End all engines. Returns what one of them failed with."""
        self.stop_following()
        live = list(self._live)
        running = [engine for engine in live if not engine.ended.done()]
        stops = [functools.partial(engine.stop, LAST_STEP_SECONDS) for engine in running]
        await asyncio.gather(*(asyncio.wrap_future(in_thread(stop)) for stop in stops))
        errors = (engine.ended.exception() for engine in live)
        return next((error for error in errors if error is not None), None)


class _UnchangedError(Exception):
    """What lies there is the version that is served."""

    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found = found


def in_thread(function: Callable[[], T]) -> Future[T]:
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
