"""How far a long piece of work is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import NoReturn

from tqdm import tqdm

LINE_SECONDS = 10.0


class Progress:
    """Counts bytes done, and says so on stderr with the rate and the time left.

    On a terminal it is a bar, which disappears in the end. Elsewhere a bar that redraws itself
    would litter a log: there is a line at the start, and one every ten seconds.
    """

    def __init__(self, what: str, total: int | None, *, show: bool = True) -> None:
        """Begin.

        Args:
            what: what is done, for the head of the line.
            total: bytes in all; None if nobody knows.
            show: False keeps all quiet.
        """
        self.done = 0
        self._what = what
        self._total = total
        terminal = sys.stderr.isatty()
        self._lines = show and not terminal
        self._began = self._told = time.monotonic()
        self._bar: tqdm[NoReturn] = tqdm(
            total=total,
            desc=what,
            unit="B",
            unit_scale=True,
            leave=False,
            disable=not (show and terminal),
        )
        if self._lines:
            self._say(what if total is None else f"{what} {_size(total)}")

    def update(self, size: int) -> None:
        self.done += size
        self._bar.update(size)
        if self._lines and (now := time.monotonic()) - self._told >= LINE_SECONDS:
            self._told = now
            self._say(self.line(now - self._began))

    def line(self, seconds: float) -> str:
        """What a log is told after `seconds` of work."""
        rate = self.done / max(seconds, 1e-9)
        line = f"{self._what} {_size(self.done)}"
        if self._total is None:
            return f"{line}, {_size(rate)}/s"
        left = max(self._total - self.done, 0) / max(rate, 1e-9)
        return f"{line} of {_size(self._total)}, {_size(rate)}/s, {tqdm.format_interval(left)} left"

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


def _size(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
