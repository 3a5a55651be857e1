"""Bytes to text: UTF-8 in blocks, what to do with bytes that are none, and line ends."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Literal

from gpt.errors import DataError

OnError = Literal["stop", "skip", "replace"]
"""What to do about bytes that are not UTF-8: say where they are and stop, leave them out, or put
U+FFFD in their place. A row that cannot be read at all is left out by both `skip` and `replace`."""

Newlines = Literal["keep", "lf"]
"""Line ends: as they are in the file, or CRLF and CR alone turned into LF."""

_BLOCK = 1 << 20
_UTF16_OR_32 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
_REPLACEMENT = "\ufffd".encode()
_HANDLER = {"skip": "ignore", "replace": "replace"}


@dataclass
class Losses:
    """What was left out or replaced in one pass over a corpus.

    Attributes:
        bytes: bytes left out, or U+FFFD put in for them.
        rows: rows left out.
        first: what was wrong with the first of them, and where.
    """

    bytes: int = 0
    rows: int = 0
    first: str = ""


def _nothing(size: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class Reading:
    """How a corpus is read in one pass.

    Attributes:
        on_error, newlines: see `OnError` and `Newlines`.
        advance: is told the bytes read from the source as they are read, for a progress bar.
        losses: collects what was left out.
        choice: whether whoever reads can choose another on_error.
    """

    on_error: OnError = "stop"
    newlines: Newlines = "keep"
    advance: Callable[[int], object] = _nothing
    losses: Losses = field(default_factory=Losses)
    choice: bool = True

    def bad_bytes(self, message: str, advice: str, size: int) -> None:
        """Bytes do not belong in a text: raise DataError, or count `size` of them."""
        if self.on_error == "stop":
            other = (
                ", or choose --on-error skip (leave such bytes out) or replace (put U+FFFD in "
                "their place)"
            )
            raise DataError(f"{message}; {advice}{other if self.choice else ''}")
        self.losses.first = self.losses.first or message
        self.losses.bytes += size

    def bad_row(self, message: str) -> None:
        """A row cannot be read: raise DataError, or count it as left out."""
        if self.on_error == "stop":
            raise DataError(f"{message}; mend it, or leave such rows out with --on-error skip")
        self.losses.first = self.losses.first or message
        self.losses.rows += 1

    def text(self, chunks: Iterable[str]) -> Iterator[str]:
        """Chunks of a text with its line ends as wanted, none of them empty."""
        if self.newlines == "keep":
            yield from filter(None, chunks)
            return
        held = ""  # a CR at the end of a chunk: its LF may come with the next
        for chunk in chunks:
            chunk = held + chunk
            held = "\r" if chunk.endswith("\r") else ""
            if chunk := unix_lines(chunk[: len(chunk) - len(held)]):
                yield chunk
        if held:
            yield "\n"

    def row(self, text: str) -> str:
        """One whole text with its line ends as wanted."""
        return text if self.newlines == "keep" else unix_lines(text)


def unix_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def decode_utf8(stream: IO[bytes], name: str, reading: Reading | None = None) -> Iterator[str]:
    """The text of a stream of UTF-8 bytes, a block at a time, a byte order mark left out.

    A NUL byte is taken for one that does not belong: text has none, and most other files do.

    Raises:
        DataError: with on_error "stop", the first byte that does not belong, with its offset (in
            the decompressed text, if the file is compressed). UTF-16 and UTF-32 in any case.
    """
    reading = reading or Reading()
    decoder = codecs.getincrementaldecoder("utf-8")()
    lenient = False
    read = 0  # bytes before this block
    first = True
    while True:
        block = stream.read(_BLOCK)
        if read == 0 and block.startswith(_UTF16_OR_32):
            raise DataError(
                f"{name} is UTF-16 or UTF-32 by its byte order mark, but text must be UTF-8; "
                "convert it (iconv -f UTF-16 -t UTF-8)"
            )
        size = len(block)
        if (nul := block.find(0)) >= 0:
            reading.bad_bytes(
                f"{name} is not a text file: there is a NUL byte at byte offset {read + nul}",
                "leave it out if it is none, convert it to UTF-8",
                block.count(0),
            )
            block = block.replace(b"\0", b"" if reading.on_error == "skip" else _REPLACEMENT)
        held = decoder.getstate()[0]
        try:
            text = decoder.decode(block, final=size == 0)
        except UnicodeDecodeError as error:
            reading.bad_bytes(
                f"{name} is not UTF-8: byte 0x{error.object[error.start]:02X} at byte offset "
                f"{read - len(held) + error.start} does not belong there",
                "convert the file to UTF-8 (iconv -f … -t UTF-8)",
                0,
            )
            decoder = codecs.getincrementaldecoder("utf-8")(_HANDLER[reading.on_error])
            decoder.setstate((held, 0))
            lenient = True
            text = decoder.decode(block, final=size == 0)
        if lenient:
            data = held + block
            data = data[: len(data) - len(decoder.getstate()[0])]
            reading.losses.bytes += (
                len(data) - len(text.encode())
                if reading.on_error == "skip"
                else text.count("\ufffd") - data.count(_REPLACEMENT)
            )
        read += size
        if first and text:
            text = text.removeprefix("\ufeff")
            first = False
        if text:
            yield text
        if size == 0:
            return
