"""Files to documents: plain text, and rows of JSON Lines, CSV and Parquet.

A text file is one document; of a file with rows, each row is one, taken from a named field. What a
reader yields is one flat stream of pieces, so that ten million rows cost no object each that stays,
and a file of any size is never whole in memory. One row must fit, though.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import IO, Any, NamedTuple

from gpt.data.decoding import Reading, decode_utf8
from gpt.errors import DataError

TEXT = (".txt", ".md")
ROWS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
PACKED = (".gz", ".zst")
SUFFIXES = (*TEXT, *ROWS)
ALLOWED = f"{', '.join(SUFFIXES)}, each also with {' or '.join(PACKED)} after it"

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_BATCH_BYTES = 4 << 20
_MAX_BATCH_ROWS = 4096
_MAX_ROW = 1 << 28
"""Bytes or characters of one row: a file that was never split into rows must not fill the memory.
"""
_NO_ROW = object()
_decode_json = json.JSONDecoder().raw_decode


class Piece(NamedTuple):
    """A part of a document. All pieces of one follow each other.

    Attributes:
        text: not empty, except in the one piece of an empty document.
        end: whether the document ends here.
        name: the file, or what else it comes from.
        row: its number in there, counted from 1; 0 if the file is one document.
    """

    text: str
    end: bool
    name: str
    row: int = 0

    @property
    def place(self) -> str:
        return f"{self.name}, row {self.row}" if self.row else self.name


def kind_of(path: str) -> str | None:
    """The suffix in `SUFFIXES` of a file, without the one of its compression; None for others."""
    name = _unpacked(path.lower())[0]
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def read_file(path: str, field: str, reading: Reading) -> Iterator[Piece]:
    """The documents of a file, as pieces.

    Args:
        path: a file for which `kind_of` knows a kind.
        field: the column or key that holds the text, where the file has rows.
        reading: how to read, and who is told about it.

    Raises:
        DataError: a file that cannot be read, that is damaged, that is not what its name says, or
            that has no such field; with the place.
    """
    kind = kind_of(path)
    try:
        with open(path, "rb", buffering=0) as raw:
            if kind == ".parquet":
                yield from _parquet(path, raw, field, reading)
                return
            with _opened(path, _Watched(raw, reading.advance)) as stream:
                if kind in (".jsonl", ".ndjson"):
                    yield from _json_lines(stream, path, field, reading)
                elif kind in (".csv", ".tsv"):
                    separator = "\t" if kind == ".tsv" else ","
                    yield from _csv(stream, path, field, separator, reading)
                else:
                    yield from read_text(stream, path, reading)
    except OSError as error:  # pyarrow's for what is damaged among them
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def read_text(
    stream: IO[bytes],
    name: str,
    reading: Reading,
    clean: Callable[[str], str] | None = None,
) -> Iterator[Piece]:
    """One document out of a stream of UTF-8 bytes.

    Args:
        clean: turns the whole of it into what is to be learned, where that is not all of it.
    """
    chunks: Iterable[str] = decode_utf8(stream, name, reading)
    if clean is not None:
        chunks = [clean("".join(chunks))]
    yield from as_document(reading.text(chunks), name)


def as_document(chunks: Iterable[str], name: str, row: int = 0) -> Iterator[Piece]:
    """Chunks, none of them empty, as the pieces of one document."""
    last = ""
    for chunk in chunks:
        if last:
            yield Piece(last, False, name, row)
        last = chunk
    yield Piece(last, True, name, row)


# Rows


def _json_lines(stream: IO[bytes], path: str, field: str, reading: Reading) -> Iterator[Piece]:
    for number, line in enumerate(iter(partial(stream.readline, _MAX_ROW + 1), b""), start=1):
        if len(line) > _MAX_ROW:
            raise DataError(
                f"{path}, line {number}, has more than {_MAX_ROW >> 20} MB; is it JSON Lines, with "
                "one object a line?"
            )
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            # Not json.loads: its look for blanks at both ends costs as much as a short row.
            decoded = line.decode()
            row, end = _decode_json(decoded)
            good = not decoded[end:].strip()
        except (ValueError, RecursionError):
            good = False
        if not good:
            row = _mended(line, path, number, reading)
            if row is _NO_ROW:
                continue
        text: str | None
        if type(row) is dict and type(text := row.get(field)) is str:
            # Half of a surrogate pair can come out of an escape alone.
            if b"\\u" in line and (text := _whole(text, path, number, reading)) is None:
                continue
        elif (text := _field(row, field, path, number, reading)) is None:
            continue
        yield Piece(reading.row(text), True, path, number)


def _mended(line: bytes, path: str, number: int, reading: Reading) -> Any:
    """What `on_error` makes of a line that is not JSON in UTF-8; `_NO_ROW` to leave it out."""
    if line.isspace():
        return _NO_ROW
    place = f"{path}, line {number}"
    try:
        return json.loads("".join(decode_utf8(io.BytesIO(line), place, reading)))
    except RecursionError:
        reading.bad_row(f"{place}, is nested too deep to be read")
    except ValueError as error:
        reading.bad_row(f"{place}, {not_json(error)}")
    return _NO_ROW


def not_json(error: ValueError) -> str:
    """What is wrong with a text that `json` has refused with `error`."""
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON: {error}"
    return "has a number of too many digits to be read"  # what Python says of it is for programmers


def _whole(text: str, path: str, number: int, reading: Reading) -> str | None:
    """A row's text, if its surrogates are all in pairs; else what `on_error` makes of it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        message = f"{path}, row {number}, holds half of a surrogate pair ({half})"
        if reading.on_error != "replace":
            reading.bad_row(message)
            return None
        mended = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        reading.bad_bytes(message, "", mended.count("\ufffd") - text.count("\ufffd"))
        return mended
    return text


def _field(row: Any, field: str, path: str, number: int, reading: Reading) -> str | None:
    """The text of a row that has it not plainly there: missing, null, or of another type."""
    if not isinstance(row, dict):
        reading.bad_row(f"{path}, row {number}, is no object with fields but {_type(row)}")
        return None
    if field not in row:
        message = missing_field(path, field, list(row), number)
        if reading.on_error == "stop":
            raise DataError(message)
        reading.bad_row(message)
        return None
    if row[field] is None:
        return ""
    reading.bad_row(f"{path}, row {number}: the field {field!r} is {_type(row[field])}, not text")
    return None


def missing_field(name: str, field: str, there: list[str], number: int = 0) -> str:
    """What to say where no field of that name is."""
    row = f", row {number}," if number else ""
    listed = ", ".join(map(repr, there[:20])) + (", …" if len(there) > 20 else "")
    return (
        f"{name}{row} has no field {field!r}; it has {listed or 'none'}; name the one that holds "
        "the text (--field, in a config data.field)"
    )


def _type(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", int: "a number",
             float: "a number", str: "a text", type(None): "null"}  # fmt: skip
    return names[type(value)]


def _csv(
    stream: IO[bytes], path: str, field: str, separator: str, reading: Reading
) -> Iterator[Piece]:
    csv.field_size_limit(_MAX_ROW)  # the module's own is 128 KB; it holds for the process
    rows = csv.reader(_lines(decode_utf8(stream, path, reading)), delimiter=separator, strict=True)
    column = -1
    number = 0  # of the row, the header not counted
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            reading.bad_row(f"{path}, line {rows.line_num}, is not CSV: {error}")
            continue
        if column < 0:
            if field not in row:
                raise DataError(missing_field(path, field, row))
            column = row.index(field)
            continue
        if not row:  # an empty line
            continue
        number += 1
        if column >= len(row):
            reading.bad_row(
                f"{path}, row {number}, ends before the field {field!r}: it has {len(row)} fields"
            )
            continue
        yield Piece(reading.row(row[column]), True, path, number)


def _lines(chunks: Iterable[str]) -> Iterator[str]:
    """The lines of a text that comes in chunks, with their ends."""
    held: list[str] = []
    for chunk in chunks:
        lines = chunk.split("\n")
        if len(lines) == 1:
            held.append(chunk)
            continue
        held.append(lines[0])
        yield "".join(held) + "\n"
        for line in lines[1:-1]:
            yield line + "\n"
        held = [lines[-1]]
    if rest := "".join(held):
        yield rest


def _parquet(path: str, raw: IO[bytes], field: str, reading: Reading) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as stack:
        file, size = raw, os.fstat(raw.fileno()).st_size
        if _unpacked(path)[1]:
            # It is read from its end: what is compressed has to be unpacked first, onto the disk.
            file = stack.enter_context(tempfile.TemporaryFile(prefix="antiphon-"))
            with _opened(path, raw) as stream:
                shutil.copyfileobj(stream, file, 1 << 20)
            file.seek(0)
        try:
            parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
            names = parquet.schema_arrow.names
            if field not in names:
                raise DataError(missing_field(path, field, names))
            if names.count(field) > 1:
                raise DataError(
                    f"{path} has {names.count(field)} columns of the name {field!r}, so it is not "
                    "clear which is meant; rename all but one"
                )
            check_text_type(parquet.schema_arrow.field(field).type, path, field)
            rows = max(parquet.metadata.num_rows, 1)
            number = told = 0
            for group in range(parquet.num_row_groups):
                facts = parquet.metadata.row_group(group)
                average = max(facts.total_byte_size // max(facts.num_rows, 1), 1)
                count = max(min(_BATCH_BYTES // average, _MAX_BATCH_ROWS), 1)
                for batch in parquet.iter_batches(
                    count, row_groups=[group], columns=[field], use_threads=False
                ):
                    for text in texts_of(batch.column(0), path, number, reading):
                        number += 1
                        yield Piece(reading.row(text), True, path, number)
                    reading.advance(size * number // rows - told)
                    told = size * number // rows
        except pa.ArrowException as error:
            raise DataError(f"{path} is damaged, or is no Parquet file: {error}") from None


def check_text_type(kind: Any, name: str, field: str) -> None:
    """Raise DataError for a column of Arrow type `kind` that holds no text."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    # By name, since not every release of Arrow has each of them; a column of nothing is "null".
    if str(kind) not in ("string", "large_string", "string_view", "null"):
        raise DataError(
            f"{name}: the field {field!r} is of type {kind}, not text; name another with --field"
        )


def texts_of(column: Any, name: str, before: int, reading: Reading) -> Iterator[str]:
    """The texts of an Arrow column; "" for null.

    Args:
        before: rows of the source before this column.
    """
    import pyarrow as pa

    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        for i, data in enumerate(column.cast(pa.large_binary()).to_pylist(), start=before + 1):
            place = f"{name}, row {i}"
            yield "".join(decode_utf8(io.BytesIO(data or b""), place, reading))
        return
    for text in values:
        yield text or ""


# Compression


def _unpacked(path: str) -> tuple[str, str]:
    """A path without the suffix of its compression, and that suffix."""
    if path.lower().endswith(PACKED):
        stem, suffix = os.path.splitext(path)
        return stem, suffix.lower()
    return path, ""


class _Watched(io.RawIOBase):
    """A file that tells how much of it has been read."""

    def __init__(self, file: IO[bytes], advance: Callable[[int], object]) -> None:
        self._file = file
        self._advance = advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._advance(count)
        return count


@contextlib.contextmanager
def _opened(path: str, raw: Any) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed as they are read if its name says so."""
    packed = _unpacked(path)[1]
    if not packed:
        yield io.BufferedReader(raw, 1 << 18)
        return
    import pyarrow as pa

    # Arrow's streams take several members or frames in one file, and know one that was cut short.
    file = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw, 1 << 18)
    if not file.peek(1):
        raise DataError(
            f"{path} is cut short: it has 0 bytes, which is less than {packed} has of an empty "
            "text; make or copy it again"
        )
    with pa.CompressedInputStream(pa.PythonFile(file, "r"), _CODECS[packed]) as stream:
        yield io.BufferedReader(stream, 1 << 18)
