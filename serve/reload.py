"""Files that may be replaced while the server runs: certificates, keys of callers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from gpt.errors import UserError

log = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
"""How often files are looked at. By their bytes: times and inodes do not tell of every way in which
files are replaced."""


async def follow(paths: Sequence[Path], take: Callable[[], bool]) -> None:
    """Call `take` whenever the files hold something new, for ever.

    Args:
        take: reads them, and says whether anything has changed by that. If it raises a UserError,
            which the log tells once, what was read before stays in force. It runs in a thread.
    """
    seen: list[bytes | None] | None = None
    while True:
        found = await asyncio.to_thread(_contents, paths)
        if found != seen:
            try:
                if await asyncio.to_thread(take):
                    log.info("took over what is new in %s", ", ".join(map(str, paths)))
            except UserError as error:
                log.error("kept what was read before: %s", error)
            except Exception:  # the next change is still to be seen
                log.exception("kept what was read before")
            seen = found
        await asyncio.sleep(RELOAD_SECONDS)


def _contents(paths: Sequence[Path]) -> list[bytes | None]:
    contents: list[bytes | None] = []
    for path in paths:
        contents.append(None)
        with contextlib.suppress(OSError):
            contents[-1] = path.read_bytes()
    return contents
