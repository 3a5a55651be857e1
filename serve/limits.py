"""What one caller may use: requests at once, and requests in a minute."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpt.errors import ServerError

BUSY_SECONDS = 1.0
"""When to come again if all places are taken: about what a short request takes."""


@dataclass(frozen=True)
class Limits:
    """Attributes:
    concurrent: most requests at once; None: any number.
    per_minute: most requests in the long run; one who was idle may use a minute's worth at once.
    """

    concurrent: int | None = None
    per_minute: int | None = None


class OverLimitError(ServerError):
    """Attributes:
    retry_after: seconds after which there may be room again.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Quota:
    """What one caller uses at the moment. Belongs to one event loop.

    Args:
        clock: seconds.

    Attributes:
        running: places taken.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._filled_at = clock()
        self._left = math.inf  # cut down to a minute's worth when that is known
        self.running = 0

    @contextlib.contextmanager
    def places(self, limits: Limits, wanted: int = 1) -> Iterator[int]:
        """Hold places for as many requests as are wanted, or as there is room for.

        A batch is let in while there is any room. It is charged for all its requests, so after a
        large one the next call waits the longer.

        Args:
            limits: those in force now.

        Returns:
            How many of the requests may run at once.

        Raises:
            OverLimitError: there is no room.
        """
        room = wanted
        if limits.concurrent is not None:
            room = min(wanted, limits.concurrent - self.running)
            if room < 1:
                raise OverLimitError(
                    f"{self.running} requests of this key are running, {limits.concurrent} may; "
                    "wait for one to end",
                    BUSY_SECONDS,
                )
        if limits.per_minute is not None:
            self._charge(limits.per_minute, wanted)
        self.running += room
        try:
            yield room
        finally:
            self.running -= room

    def _charge(self, per_minute: int, wanted: int) -> None:
        now = self._clock()
        grown = (now - self._filled_at) * per_minute / 60
        self._left, self._filled_at = min(self._left + grown, float(per_minute)), now
        if self._left < 1:
            raise OverLimitError(
                f"this key may make {per_minute} requests a minute and has made them",
                (1 - self._left) * 60 / per_minute,
            )
        self._left -= wanted
