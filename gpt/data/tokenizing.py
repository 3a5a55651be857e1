"""Text to ids in several processes, in order: the result does not depend on how many there are.

The parent reads and cuts the text, and the workers encode it. They are interpreters of their own,
not copies of the parent (it may have threads of torch, which a fork would leave in pieces), and
they do not import its main module, as those of `multiprocessing` would: they need nothing of it.
Processes rather than threads, because many short texts cost the interpreter's lock about as much
time as they cost the tokenizer.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpt.data.split import Part, utf8_length
from gpt.errors import DataError, InexpressibleTextError, TokenizerError, UserError
from gpt.rules import After
from gpt.specials import SpecialFinder
from gpt.splitting import MAX_PIECE, Splitter
from gpt.tokenizer import Tokenizer

BATCH_CHARS = 1 << 19
BATCH_TEXTS = 1 << 12
AHEAD = 3
"""Batches that may be under way for each worker: read, at work, or waiting for their turn."""


@dataclass
class Batch:
    """Texts that go to a worker together, in runs that belong together.

    Attributes:
        texts: each may be encoded on its own.
        afters: what stands before each.
        ends: whether end-of-text follows each.
        runs: how many of the texts belong to each run.
        keys: what each run belongs to; it stays with the parent.
        parts: where each text comes from; they stay with the parent.
    """

    texts: list[str] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    afters: list[After] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    keys: list[tuple[int, bool]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    chars: int = 0

    @property
    def full(self) -> bool:
        return self.chars >= BATCH_CHARS or len(self.texts) >= BATCH_TEXTS

    @property
    def content(self) -> tuple[list[str], list[bool], list[int], list[After]]:
        """What a worker gets of it."""
        return self.texts, self.ends, self.runs, self.afters

    def add(self, key: tuple[int, bool], part: Part) -> None:
        if not self.keys or self.keys[-1] != key:
            self.keys.append(key)
            self.runs.append(0)
        self.runs[-1] += 1
        self.texts.append(part.text)
        self.ends.append(part.end)
        self.afters.append(part.after)
        self.parts.append(part)
        self.chars += len(part.text)


class Encoded(NamedTuple):
    """The ids of a batch.

    Attributes:
        ids: of all its runs, one after the other.
        tokens: how many of them each run has.
        bytes_: UTF-8 bytes of text in each run.
    """

    ids: npt.NDArray[np.uint32]
    tokens: list[int]
    bytes_: list[int]


class _BadText(Exception):  # noqa: N818 (from here it goes to the parent, who makes an error of it)
    """Text `index` of a batch cannot be encoded; plain data, so that it can be sent."""

    def __init__(self, index: int, message: str, char: str = "", offset: int = 0) -> None:
        super().__init__(index, message, char, offset)
        self.index = index
        self.message = message
        self.char = char
        self.offset = offset


def cut(parts: Iterable[Part], splitter: Splitter, names: Sequence[str]) -> Iterator[Part]:
    """The same text in parts that can be encoded one by one.

    Args:
        names: special tokens that are looked for; none of them is cut in two.
    """
    finder = SpecialFinder(names) if names else None
    parts = iter(parts)
    for part in parts:
        if part.end and len(part.text) < 2 * MAX_PIECE:
            yield part  # what is short needs no cut, and most rows are
            continue
        chunks = _until_end(part, parts)
        if finder is None:
            stretches: Iterable[tuple[bool, Iterable[str]]] = [(False, chunks)]
        else:
            stretches = finder.stretches(chunks)
        offset = part.offset
        last, before = "", part.after
        for segment, after in _segments(stretches, splitter, part.after):
            if last:
                yield part._replace(text=last, end=False, offset=offset, after=before)
                offset += len(last)
            last, before = segment, after
        yield part._replace(text=last, end=True, offset=offset, after=before)


def _segments(
    stretches: Iterable[tuple[bool, Iterable[str]]], splitter: Splitter, after: After
) -> Iterator[tuple[str, After]]:
    """Segments of a document, and what stands before each."""
    for named, stretch in stretches:
        for segment in stretch if named else splitter.segments(stretch):
            yield segment, after
            after = "token" if named else "text"


def _until_end(part: Part, more: Iterator[Part]) -> Iterator[str]:
    yield part.text
    while not part.end:
        part = next(more)
        yield part.text


def batches(parts: Iterable[tuple[tuple[int, bool], Part]]) -> Iterator[Batch]:
    """Parts, each with the key of its run, collected into batches."""
    batch = Batch()
    for key, part in parts:
        batch.add(key, part)
        if batch.full:
            yield batch
            batch = Batch()
    if batch.texts:
        yield batch


def encode(
    tokenizer: Tokenizer,
    names: Sequence[str],
    texts: Sequence[str],
    ends: Sequence[bool],
    runs: Sequence[int],
    afters: Sequence[After],
) -> Encoded:
    """Encode one batch. Raises _BadText."""
    ids = array.array("I")
    tokens, sizes = [], []
    rows = enumerate(zip(texts, ends, afters, strict=True))
    for run in runs:
        before, size = len(ids), 0
        for index, (text, end, after) in itertools.islice(rows, run):
            size += utf8_length(text)
            try:
                for some in tokenizer.encode_stream([text], names, after=after):
                    ids.extend(some)
            except InexpressibleTextError as error:
                raise _BadText(index, str(error), error.char, error.offset) from None
            except TokenizerError as error:
                raise _BadText(index, str(error)) from None
            if end:
                ids.append(tokenizer.eot)
        tokens.append(len(ids) - before)
        sizes.append(size)
    return Encoded(np.frombuffer(ids, np.uint32), tokens, sizes)


def encode_all(
    work: Iterator[Batch], tokenizer: Tokenizer, path: Path, names: Sequence[str], workers: int
) -> Generator[tuple[Batch, Encoded], None, None]:
    """Encode batches in order.

    Args:
        work: the batches; at most `AHEAD * workers` of them are held at a time.
        tokenizer: does it, if there is one worker: this process.
        path: the file of the same tokenizer, for other processes.
        names: special tokens that are looked for in the text.
        workers: how many processes to start, if more than one.

    Raises:
        TokenizerError: text that the vocabulary cannot express, with its place.
        DataError: a worker was killed.
    """
    if workers == 1:
        for batch in work:
            try:
                yield batch, encode(tokenizer, names, *batch.content)
            except _BadText as bad:
                raise _placed(bad, batch, tokenizer.kind) from None
        return
    with contextlib.ExitStack() as stack:
        team = [stack.enter_context(_Worker(path, names)) for _ in range(workers)]
        yield from _in_order(work, team, tokenizer.kind)


def _in_order(
    work: Iterator[Batch], team: list[_Worker], kind: str
) -> Iterator[tuple[Batch, Encoded]]:
    under_way: deque[_Task] = deque()
    more = True
    while more or under_way:
        while more and len(under_way) < AHEAD * len(team):
            idle = min(team, key=lambda worker: len(worker.tasks))
            if len(idle.tasks) == 2:
                break  # all have one at work and one to go on with
            batch = next(work, None)
            if batch is None:
                more = False
                break
            task = _Task(batch)
            idle.send(task)
            under_way.append(task)
        while under_way and under_way[0].answer is not None:
            task = under_way.popleft()
            if isinstance(task.answer, _BadText):
                raise _placed(task.answer, task.batch, kind)
            if not isinstance(task.answer, Encoded):
                raise RuntimeError(f"a tokenizing process failed:\n{task.answer}")
            yield task.batch, task.answer
        busy = {worker.connection: worker for worker in team if worker.tasks}
        if under_way and busy:
            ready = wait(list(busy), 0 if more and _has_room(under_way, team) else None)
            for connection in ready:
                busy[connection].receive()  # type: ignore[index]


def _has_room(under_way: deque[_Task], team: list[_Worker]) -> bool:
    return len(under_way) < AHEAD * len(team) and any(len(worker.tasks) < 2 for worker in team)


@dataclass
class _Task:
    batch: Batch
    answer: Encoded | _BadText | str | None = None


class _Worker:
    """A process that encodes, and what it has been given."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.tasks: deque[_Task] = deque()
        ours, theirs = socket.socketpair()
        with theirs:
            code = (
                "import sys; fd = int(sys.argv[1]); sys.path[:] = sys.argv[2:]; "
                "from gpt.data.tokenizing import serve; serve(fd)"
            )
            root = str(Path(__file__).resolve().parents[2])
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    code,
                    str(theirs.fileno()),
                    *filter(None, [*sys.path, root]),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C is the parent's: it ends the workers by closing the connection.
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        self.connection = Connection(ours.detach())
        self._send((str(path), list(names)))

    def send(self, task: _Task) -> None:
        self.tasks.append(task)
        self._send(task.batch.content)

    def _send(self, message: object) -> None:
        try:
            self.connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            raise self._lost() from None

    def receive(self) -> None:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._lost() from None
        self.tasks.popleft().answer = answer

    def _lost(self) -> UserError:
        self.process.kill()
        status = self.process.wait()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return DataError(
            f"a tokenizing process ended {how} before its work was done; if the machine is out of "
            "memory, give fewer workers, then prepare the data again"
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


def _placed(bad: _BadText, batch: Batch, kind: str) -> TokenizerError:
    """The error with the name of the document, and the offset counted from its start."""
    part = batch.parts[bad.index]
    message = bad.message
    if bad.char:
        message = str(InexpressibleTextError(bad.char, part.offset + bad.offset, kind))
    return TokenizerError(f"{part.piece.place}: {message}")


def serve(fd: int) -> None:
    """The life of a worker: batches in, ids out, until the parent closes or is gone."""
    connection = Connection(fd)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        # A thread of its own, so that the parent never waits to hand on what comes next.
        with contextlib.suppress(EOFError, OSError):
            while True:
                inbox.put(connection.recv())
        inbox.put(None)

    threading.Thread(target=receive, daemon=True).start()
    first = inbox.get()
    if first is None:
        return
    path, names = first
    tokenizer = Tokenizer.load(path)
    while (message := inbox.get()) is not None:
        answer: Any
        try:
            answer = encode(tokenizer, names, *message)
        except _BadText as bad:
            answer = bad
        except Exception:  # noqa: BLE001 (the parent raises it)
            answer = traceback.format_exc()
        try:
            connection.send(answer)
        except OSError:
            return
