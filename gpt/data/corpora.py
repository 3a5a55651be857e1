"""Where text comes from: the named corpora, and the user's own files, folders and globs.

A `Corpus` knows what it consists of without reading any of it. A `Document` is read as a stream of
chunks, as often as needed; no document is ever whole in memory.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpt.data.named import NAMED
from gpt.errors import DataError

SUFFIXES = (".txt", ".md")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Document:
    """One text of a corpus.

    Attributes:
        name: what to call it in a message; a path for a file.
        size: bytes to read, for a progress bar.
        open: opens it for reading bytes.
        clean: turns a whole document into what is to be learned, where that is not all of it.
    """

    name: str
    size: int
    open: Callable[[], contextlib.AbstractContextManager[IO[bytes]]]
    clean: Callable[[str], str] | None = None

    def chunks(self) -> Iterator[str]:
        """The text in chunks, a byte order mark left out, line ends as they are.

        Raises:
            DataError: unreadable, binary, or not UTF-8; with the byte offset.
        """
        try:
            with self.open() as stream:
                chunks = decode_utf8(stream, self.name)
                if self.clean is None:
                    yield from chunks
                else:
                    yield self.clean("".join(chunks))
        except OSError as error:
            raise DataError(f"cannot read {self.name}: {error.strerror or error}") from None


def decode_utf8(stream: IO[bytes], name: str) -> Iterator[str]:
    """The text of a stream of UTF-8 bytes, a block at a time.

    Raises:
        DataError: a NUL byte (the file is binary) or a byte that is not UTF-8, with its offset.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0  # bytes before this block
    first = True
    while True:
        block = stream.read(_BLOCK)
        if (nul := block.find(0)) >= 0:
            raise DataError(
                f"{name} is not a text file: there is a NUL byte at byte offset {read + nul}; "
                "leave it out, or convert it to UTF-8 text"
            )
        held = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = read - held + error.start
            raise DataError(
                f"{name} is not UTF-8: byte 0x{error.object[error.start]:02X} at byte offset {at} "
                "does not belong there; convert the file to UTF-8 (iconv -f … -t UTF-8)"
            ) from None
        read += len(block)
        if first and text:
            text = text.removeprefix("\ufeff")
            first = False
        if text:
            yield text
        if not block:
            return


@dataclass(frozen=True)
class Corpus:
    """What a `source` stands for.

    Attributes:
        name: a short name, fit for a folder.
        identities: one entry a named corpus or file, which changes when its text does.
        looked_at: what was searched, for a message.
    """

    name: str
    identities: tuple[dict[str, Any], ...]
    looked_at: str

    def documents(self) -> list[Document]:
        """The documents in a fixed order. Named corpora are fetched if they are not cached.

        Raises:
            DataError: a named corpus that cannot be fetched.
        """
        found = []
        for entry in self.identities:
            if "corpus" in entry:
                found += [Document(*part) for part in NAMED[entry["corpus"]].documents()]
            else:
                path = entry["path"]
                found.append(Document(path, entry["size"], _opener(path)))
        return found


def find_corpus(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Corpus:
    """What `source` stands for; nothing is read or fetched yet.

    Args:
        source: a named corpus, a `.txt` or `.md` file, a folder (searched with all its subfolders,
            in the order of the paths, hidden ones left out), a glob (`**` for any depth), or a list
            of these. A name goes before a file of that name; write `./shakespeare` for the file. A
            file that is found twice counts once, so that it cannot be trained on and held out.

    Raises:
        DataError: nothing of that name, or no text file in it.
    """
    listed = [source] if isinstance(source, (str, os.PathLike)) else source
    sources = [os.fspath(one) for one in listed]
    entries: dict[str, dict[str, Any]] = {}
    for one in sources:
        found: list[tuple[str, dict[str, Any]]]
        if one in NAMED:
            found = [(one, {"corpus": one, "sha256": NAMED[one].sha256})]
        else:
            found = [(os.path.realpath(path), _identity(path)) for path in _files(one)]
        for key, entry in found:
            entries.setdefault(key, entry)
    looked_at = ", ".join(sources)
    if not entries:
        raise DataError(
            f"no text found: there is no {' or '.join(SUFFIXES)} file in {looked_at or '(nothing)'}"
        )
    return Corpus(_short_name(sources), tuple(entries.values()), looked_at)


def _files(source: str) -> list[str]:
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return _folder(path)
    if os.path.exists(path):
        if not os.path.isfile(path):  # a pipe would wait for ever
            raise DataError(f"{source} is neither a file nor a folder; write the text to a file")
        if not path.lower().endswith(SUFFIXES):
            raise DataError(
                f"{source} is not a {' or '.join(SUFFIXES)} file; rename it if it is plain text, "
                "or convert it"
            )
        return [path]
    if glob.has_magic(path):
        matches = sorted(glob.glob(path, recursive=True))
        files = [p for p in matches if os.path.isfile(p) and p.lower().endswith(SUFFIXES)]
        folders = [p for p in matches if os.path.isdir(p)]
        return files + [p for folder in folders for p in _folder(folder)]
    near = difflib.get_close_matches(source, NAMED, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise DataError(
        f"{source!r} is neither a file, a folder or a glob that exists nor a named corpus{hint} "
        f"(the named corpora are {', '.join(NAMED)})"
    )


def _folder(folder: str) -> list[str]:
    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror}")

    found = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            os.path.join(parent, name)
            for name in files
            if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        ]
    return sorted(found)


def _identity(path: str) -> dict[str, Any]:
    try:
        facts = os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    return {"path": os.path.abspath(path), "size": facts.st_size, "mtime_ns": facts.st_mtime_ns}


def _opener(path: str) -> Callable[[], IO[bytes]]:
    return lambda: open(path, "rb")


def _short_name(sources: list[str]) -> str:
    first = sources[0]
    if first not in NAMED:
        plain = Path(os.path.abspath(os.path.expanduser(first)))
        parts = [part for part in reversed(plain.parts) if not glob.has_magic(part)]
        first = Path(parts[0]).stem if parts else "text"
    name = re.sub(r"[^\w-]+", "-", first).strip("-")[:40] or "text"
    return name if len(sources) == 1 else f"{name}-and-{len(sources) - 1}-more"
