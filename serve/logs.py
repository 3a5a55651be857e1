"""The log of a server process: one line an event, as text or JSON, each with the id of its request.

Whoever logs puts a record into a bounded queue and goes on; one thread makes lines of them. So a
terminal that is slow, or a pipe that nobody reads, holds up neither the event loop nor the engine:
what the queue has no room for is dropped, counted, and told of later.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import sys
import time
import traceback
from datetime import datetime, timezone
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TextIO

from serve.observing import CALL, Call

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

QUEUED_LINES = 10_000
LAST_SECONDS = 2.0
"""What the lines still queued get when the process ends."""


class _Queue(QueueHandler):
    """Puts records into the queue as they are, with what only their own thread knows."""

    def __init__(self, records: queue.Queue[Any]) -> None:
        super().__init__(records)
        self.dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        record.message, record.args = record.getMessage(), None  # arguments may change
        record.msg = record.message
        if not hasattr(record, "request_id"):
            call = CALL.get()
            record.request_id = None if call is None else call.request_id
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class _Sink:
    """Makes lines and writes them, in the listener's thread.

    No logging.Handler: those are waited for when the interpreter ends, and so would a pipe be that
    nobody reads. For the same reason it writes to the file itself, past Python's buffers.
    """

    def __init__(self, stream: TextIO, formatter: logging.Formatter, source: _Queue) -> None:
        self._formatter = formatter
        self._source = source
        self._stream = stream
        self._told = 0
        try:
            self._fd: int | None = stream.fileno()
        except (OSError, ValueError, AttributeError):
            self._fd = None

    def handle(self, record: logging.LogRecord) -> None:
        lost = self._source.dropped - self._told
        if lost:
            self._told += lost
            note = logging.LogRecord(
                __name__, logging.WARNING, __file__, 0,
                f"{lost} lines were dropped: the log is not read as fast as it is written",
                None, None,
            )  # fmt: skip
            self._write(self._formatter.format(note))
        self._write(self._formatter.format(record))

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed: nobody is left to tell
            if self._fd is None:
                self._stream.write(line + "\n")
                self._stream.flush()
                return
            data = (line + "\n").encode("utf-8", errors="backslashreplace")
            while data:
                data = data[os.write(self._fd, data) :]


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER [REQUEST]: message key=value …`, and tracebacks on lines of their own."""

    def format(self, record: logging.LogRecord) -> str:
        request = getattr(record, "request_id", None)
        stamp = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        line = f"{stamp} {record.levelname} {record.name}{f' [{request}]' if request else ''}: "
        line += " ".join(record.getMessage().split("\n"))
        for name, value in getattr(record, "fields", {}).items():
            line += f" {name}={_shown(value)}"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return line


class JsonFormatter(logging.Formatter):
    """One object a line: `time` (UTC), `level`, `logger`, `message`, `request_id` if there is one,
    what the event has besides, `exception` if it is one."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.fromtimestamp(record.created, timezone.utc)
        found: dict[str, Any] = {
            "time": stamp.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := getattr(record, "request_id", None):
            found["request_id"] = request
        found |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            found["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return json.dumps(found, ensure_ascii=False, default=str)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    plain = text.isprintable() and not set(text) & set(' "=')
    return text if text and plain else json.dumps(text, ensure_ascii=False)


class Log:
    """The log of this process, from its making to `close`.

    Args:
        style: one of `FORMATS`.
        level: one of `LEVELS`; what is below it is not logged.
        stream: where to.
    """

    def __init__(self, style: str = "text", level: str = "info", stream: TextIO | None = None):
        records: queue.Queue[Any] = queue.Queue(QUEUED_LINES)
        self._records = records
        self._handler = _Queue(records)
        self._given_up = False
        formatter = JsonFormatter() if style == "json" else TextFormatter()
        sink: Any = _Sink(sys.stderr if stream is None else stream, formatter, self._handler)
        self._listener = QueueListener(records, sink)
        root = logging.getLogger()
        self._before = (root.level, list(root.handlers))
        for handler in self._before[1]:
            root.removeHandler(handler)
        root.addHandler(self._handler)
        root.setLevel(level.upper())
        self._listener.start()
        atexit.register(self.flush)

    @property
    def dropped(self) -> int:
        """Lines for which there was no room."""
        return self._handler.dropped

    def flush(self, seconds: float = LAST_SECONDS) -> None:
        """Wait until what was logged is written, but no longer than that."""
        end = time.monotonic() + seconds
        while self._records.unfinished_tasks and not self._given_up:
            self._given_up = time.monotonic() > end  # it is stuck: nobody waits a second time
            time.sleep(0.002)

    def close(self) -> None:
        """Write what is queued, and log as before."""
        self.flush()
        level, handlers = self._before
        root = logging.getLogger()
        root.removeHandler(self._handler)
        for handler in handlers:
            root.addHandler(handler)
        root.setLevel(level)
        with contextlib.suppress(queue.Full):
            self._records.put_nowait(None)  # the listener's own sign that it is over
        atexit.unregister(self.flush)


_current: Log | None = None


def start(style: str = "text", level: str = "info") -> Log:
    """Begin the log of a server process, on standard error."""
    global _current
    if _current is not None:
        _current.close()
    _current = Log(style, level)
    # gRPC's own log repeats in five lines what we say in one; GRPC_VERBOSITY=INFO brings it back.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # These tell of each thing they do, or of what we say ourselves.
    for name in ("asyncio", "grpc", "urllib3", "opentelemetry"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return _current


def flush() -> None:
    """Before the process is ended in a way that ends nothing properly."""
    if _current is not None:
        _current.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()


def dropped() -> int:
    """Lines for which there was no room so far."""
    return 0 if _current is None else _current.dropped


def of(call: Call | None) -> dict[str, Any]:
    """The `extra` of a line that is about a call, where another thread logs it."""
    return {"request_id": None if call is None else call.request_id}
