"""When a request that failed is sent again: backoff that doubles, with full jitter.

The server says by RetryInfo when it wants to be asked again; the jitter comes on top of that, since
all whom it refused in one moment were told the same.
Source: "Exponential Backoff And Jitter" (M. Brooker, AWS Architecture Blog, 2015), full jitter.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from serve.errors import RETRYABLE, RequestError


@dataclass(frozen=True)
class Retry:
    """How a client tries again.

    Attributes:
        attempts: most times that a request is sent, the first included; 1: never again.
        first_seconds: longest wait after the first failure; doubled after each other one.
        longest_seconds: longest wait after any, without what the server asks for.
        codes: names of the statuses after which the same request may succeed.
        draw: a number from 0 to 1, for tests to choose.
    """

    attempts: int = 4
    first_seconds: float = 0.25
    longest_seconds: float = 20.0
    codes: tuple[str, ...] = RETRYABLE
    draw: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 <= self.first_seconds <= self.longest_seconds:
            raise ValueError(
                "need attempts >= 1 and 0 <= first_seconds <= longest_seconds, got "
                f"{self.attempts}, {self.first_seconds:g}, {self.longest_seconds:g}"
            )

    def wait(self, error: RequestError, failures: int, left: float | None) -> float | None:
        """Seconds until the request is to be sent again, or None: it is not.

        Args:
            failures: how often it has failed, this time included.
            left: seconds until the request's deadline; None: it has none.
        """
        if failures >= self.attempts or error.code not in self.codes:
            return None
        # The exponent is bounded: 2.0 ** 5000 is an error.
        backoff = min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures - 1, 60))
        seconds = (error.retry_after or 0.0) + backoff * self.draw()
        return seconds if left is None or seconds < left else None


NEVER = Retry(attempts=1)


class Deadline:
    """A time limit that all attempts of a request share.

    Args:
        seconds: from now on; None: there is none.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds, 0 if it is over."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())
