"""`antiphon` commands in processes of their own, which do not outlive whoever started them."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from gpt.errors import ServerError, UserError

START_SECONDS = 120.0
STOP_SECONDS = 30.0


@contextlib.contextmanager
def child(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """An `antiphon` command in a process of its own, which does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gpt", *arguments],
        stdin=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        **options,
    )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[str]) -> int:
    """End a process with SIGTERM, or by force if it will not; returns its exit status."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except BaseException as error:
            process.kill()
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    return process.wait()


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`antiphon serve` with these arguments, on a free port of this machine; gives the process and
    its address. What it said goes to standard error if it does not become ready."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        child("serve", *arguments, "--port", "0", stdout=subprocess.PIPE, stderr=log) as process,
    ):
        lines: queue.Queue[str | None] = queue.Queue()
        assert process.stdout is not None
        # Read to the end, or a server that says more would one day block on a full pipe.
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            yield process, _ready(lines)
        except UserError:
            stop(process)
            log.seek(0)
            sys.stderr.write(log.read())  # its side of the story
            raise


def _read(source: Iterable[str], lines: queue.Queue[str | None]) -> None:
    for line in source:
        lines.put(line)
    lines.put(None)


def _ready(lines: queue.Queue[str | None]) -> str:
    """Wait for the line `serving NAME on HOST:PORT` and return the address in it.

    Raises:
        ServerError: it did not come.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise ServerError(f"the server was not ready within {START_SECONDS:.0f} s") from None
        if line is None:
            raise ServerError("the server ended before it was ready; its message stands above")
        if line.startswith("serving ") and " on " in line:
            return line.rsplit(" on ", 1)[1].strip()
