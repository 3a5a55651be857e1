"""What can go wrong with a model at work, and a watch over steps that never end."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol

log = logging.getLogger(__name__)

TICKS = 20
"""How often the watcher looks within its limit: it strikes a twentieth or two too late."""


class GenerationFailedError(Exception):
    """The model failed on this request. Not the caller's mistake."""


class OutOfMemoryFaultError(GenerationFailedError):
    """There was no memory for a step that ran this request. Another time there may be."""


class StuckError(Exception):
    """A step that does not end. Its thread cannot be stopped, only its process."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch or a driver said that there is no memory. They agree on no type: torch
    raises a plain RuntimeError on CPU, and one of its own, derived from it, on a GPU."""
    text = str(error).lower()
    spoken = "out of memory" in text or "allocate memory" in text
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and spoken)


class Watched(Protocol):
    """What a watchdog needs of an engine."""

    ended: Future[None]

    @property
    def pulse(self) -> int | None:
        """A number that changes with every step; None while there is nothing to do."""
        ...


def watch(watched: Watched, seconds: float, strike: Callable[[], None]) -> None:
    """Look, from a thread of its own, whether the steps of an engine go on until it has ended.

    What is counted are the watcher's own ticks, not the clock, so a process that was suspended for
    a night is not stuck when it goes on. No lock of the engine's is taken, and no event loop asked.

    Args:
        seconds: what a step may take; 0: watch nothing.
        strike: called once, in the watcher's thread, when a step takes longer. Where every thread
            stands has been written to standard error by then.
    """

    def body() -> None:
        seen, ticks = None, 0
        while not watched.ended.done():
            wait([watched.ended], seconds / TICKS)  # an engine that is over must not be held here
            pulse = watched.pulse
            ticks = ticks + 1 if pulse is not None and pulse == seen else 0
            seen = pulse
            if ticks > TICKS:
                log.critical("a step has taken longer than %g s; where it is:", seconds)
                with contextlib.suppress(OSError, ValueError):  # standard error is closed
                    faulthandler.dump_traceback(sys.stderr, all_threads=True)
                strike()
                return

    if seconds:
        threading.Thread(target=body, name="antiphon-watchdog", daemon=True).start()
