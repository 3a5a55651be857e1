"""Journal: a JSONL file of results that an interrupted run can go on with. No torch.

    texts.jsonl             one result a line, each added by one write
    texts.jsonl.run.json    what the results were made of: input, model, settings

A run that is killed leaves whole lines and perhaps a torn one, which the next run drops. A run over
another input, or with other settings, is refused: its results would not belong together.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gpt.errors import DataError
from gpt.files import write_atomically

ERROR = b'{"error":'
"""How a line begins that says why there is no result."""


@dataclass(frozen=True)
class Done:
    """What an output holds already.

    Attributes:
        results, errors: lines of each kind.
        last: the last line; None: there is none.
        size: bytes of the whole lines.
    """

    results: int = 0
    errors: int = 0
    last: dict[str, Any] | None = None
    size: int = 0


def dumps(record: dict[str, Any]) -> bytes:
    """One line. Readable in all alphabets; halves of surrogate pairs, which a broken input may
    hold, are escaped.

    Raises:
        ValueError: a number is infinite or NaN, which JSON does not have.
    """
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record, allow_nan=False).encode() + b"\n"


def output_file(name: str) -> Path:
    """A path for results. Raises DataError if the name is that of a folder, or empty."""
    path = Path(name)
    if not name:
        raise DataError("the name of the output is empty; give a file, as texts.jsonl")
    # A folder that does not exist yet is meant as one if there is a slash behind it.
    if name.endswith(os.sep) or os.path.isdir(name):
        raise DataError(f"{name} is a folder; give a file in it, as {path / 'texts.jsonl'}")
    return path


class Journal:
    """The output of a run.

    Args:
        identity: what the results depend on, plain data; a `seed` of None is that of the run that
            began the output, or
        seed: if there is none.
        overwrite: begin again, whatever is there.

    Attributes:
        identity: that of the run that began the output.
        done: what is there already.

    Raises:
        DataError: it cannot be written, somebody else is writing it, or it belongs to another run.
    """

    def __init__(
        self, path: Path, identity: dict[str, Any], seed: int, *, overwrite: bool = False
    ) -> None:
        self.path = path
        self._about = path.parent / f"{path.name}.run.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as error:
            raise _cannot(path, error) from None
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise DataError(f"{path} is no file; to print the results leave --output out")
            self._lock()
            self.done = Done() if overwrite else self._scan()
            self.identity = self._same(identity) if self.done.size else dict(identity)
            if self.identity["seed"] is None:
                self.identity["seed"] = seed
            os.ftruncate(self._descriptor, self.done.size)
            os.lseek(self._descriptor, 0, os.SEEK_END)
            write_atomically(self._about, json.dumps(self.identity, indent=2).encode() + b"\n")
        except OSError as error:
            self.close()
            raise _cannot(path, error) from None
        except BaseException:
            self.close()
            raise

    def add(self, line: bytes) -> None:
        """Raises DataError if it cannot be written (the disk is full)."""
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            raise DataError(
                f"cannot write {self.path}: {error.strerror}; make room and give the same command "
                "again to go on"
            ) from None

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"another run is writing {self.path}; wait for it, or give another --output"
            ) from None

    def _scan(self) -> Done:
        results = errors = size = 0
        last = b""
        with open(self.path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break  # torn
                if not (line.startswith(b"{") and line.endswith(b"}\n")):
                    raise self._foreign()
                failed = line.startswith(ERROR)
                errors, results = errors + failed, results + (not failed)
                last, size = line, size + len(line)
        try:
            found = json.loads(last) if last else None
        except ValueError:
            raise self._foreign() from None
        return Done(results, errors, found, size)

    def _same(self, identity: dict[str, Any]) -> dict[str, Any]:
        """The identity of the run that began the output. Raises DataError if it is another."""
        try:
            found = json.loads(self._about.read_bytes())
        except (OSError, ValueError):
            raise self._foreign() from None
        if not isinstance(found, dict) or set(found) != set(identity):
            raise self._foreign()
        if identity["seed"] is None:
            identity = identity | {"seed": found["seed"]}
        differing = [key for key in identity if identity[key] != found[key]]
        if differing:
            what = ", ".join(_difference(key, found[key], identity[key]) for key in differing)
            raise DataError(
                f"{self.path} was begun with another {what}; use the same to go on, or another "
                "--output, or --overwrite to begin it again"
            )
        return identity

    def _foreign(self) -> DataError:
        return DataError(
            f"{self.path} holds something that this command did not write; give another --output, "
            "or --overwrite to lose it"
        )


def _difference(key: str, before: Any, now: Any) -> str:
    if key in ("input", "model"):
        return key
    return f"{key} ({json.dumps(before)[:60]}, now {json.dumps(now)[:60]})"


def _cannot(path: Path, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or str(error)
    return DataError(f"cannot write {path}: {reason}; give another --output")
