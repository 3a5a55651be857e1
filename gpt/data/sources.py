"""Where text comes from: named corpora, the user's own files, folders and globs, and datasets.

`find_corpora` says what each `Source` stands for without reading any of it. A `Corpus` is then read
as one stream of `Piece`s, as often as needed; it is never whole in memory.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gpt.data.decoding import Reading
from gpt.data.formats import ALLOWED, ROWS, Piece, kind_of, read_file, read_text
from gpt.data.named import NAMED
from gpt.errors import ConfigError, DataError

HUB = "hf:"
MAX_WEIGHT = 100
_LISTED_FILES = 10


@dataclass(frozen=True)
class Source:
    """One source of text.

    Attributes:
        source: a named corpus; a file, a folder (searched with all its subfolders in the order of
            the paths, hidden ones left out) or a glob (`**` for any depth); or `hf:NAME` or
            `hf:NAME:CONFIG` for a Hugging Face dataset.
        field: the column or key that holds the text, where the source has rows (.jsonl, .csv,
            .parquet, datasets).
        weight: how often its text is trained on for each time it would be at weight 1; 0 keeps it
            for evaluation alone. It changes the mix of batches, not what is prepared.
        split: which split of a Hugging Face dataset.
    """

    source: str
    field: str = "text"
    weight: float = 1.0
    split: str = "train"


SourceLike: TypeAlias = "str | os.PathLike[str] | Source"


@dataclass(frozen=True)
class Corpus:
    """What a `Source` stands for.

    Attributes:
        source: the source.
        name: a short name, fit for a folder.
        identity: plain data that changes when the text does.
        pieces: reads its documents in a fixed order. Named corpora are fetched if they are not
            cached. Raises DataError for what cannot be fetched or read.
        size: bytes there are to read, for a progress bar; None where nobody knows.
    """

    source: Source
    name: str
    identity: dict[str, Any]
    pieces: Callable[[Reading], Iterator[Piece]]
    size: Callable[[], int | None]


def as_sources(source: SourceLike | Sequence[SourceLike]) -> list[Source]:
    """One or several sources as a list of them.

    Raises:
        ConfigError: a weight that is none, or none above 0.
        DataError: no source at all.
    """
    listed = [source] if isinstance(source, (str, os.PathLike, Source)) else source
    found = [one if isinstance(one, Source) else Source(os.fspath(one)) for one in listed]
    for one in found:
        if not 0 <= one.weight <= MAX_WEIGHT:
            raise ConfigError(
                f"the weight of {one.source} is {one.weight}, but must be from 0 to {MAX_WEIGHT}; "
                "only the ratio of the weights matters, so lower those of the others"
            )
    if not found:
        raise DataError("no text found: there is no source in the list; name one")
    if not any(one.weight for one in found):
        raise ConfigError("all sources have weight 0, so there is nothing to train on; raise one")
    return found


def find_corpora(source: SourceLike | Sequence[SourceLike]) -> list[Corpus]:
    """What each source stands for; nothing is read or fetched yet, but datasets are looked up.

    A name goes before a file of that name; write `./shakespeare` for the file. A file that is found
    twice counts once, where it is found first, so that it cannot be trained on and held out.

    Raises:
        DataError: nothing of that name, or no text file in it.
    """
    seen: set[tuple[int, int]] = set()
    return [_find(one, seen) for one in as_sources(source)]


def joint_name(corpora: Sequence[Corpus]) -> str:
    """A name for them all, fit for a folder."""
    more = len(corpora) - 1
    return f"{corpora[0].name}-and-{more}-more" if more else corpora[0].name


def _find(source: Source, seen: set[tuple[int, int]]) -> Corpus:
    given = source.source
    if given in NAMED:
        return _named(source)
    if given.startswith(HUB):
        from gpt.data.hub import Dataset

        dataset = Dataset.find(given.removeprefix(HUB), source.split)
        return Corpus(
            source,
            _plain(f"{given.removeprefix(HUB)}"),
            {**dataset.identity, "field": source.field},
            lambda reading: dataset.pieces(source.field, reading),
            lambda: None,
        )
    files: list[str] = []
    listed: list[dict[str, Any]] = []
    total, digest = 0, hashlib.sha256()
    for path in _files(given):
        try:
            facts = os.stat(path)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        if (place := (facts.st_dev, facts.st_ino)) in seen:
            continue
        seen.add(place)
        files.append(path)
        total += facts.st_size
        where = os.path.abspath(path)
        digest.update(os.fsencode(f"{where}\0{facts.st_size}\0{facts.st_mtime_ns}\0"))
        if len(listed) < _LISTED_FILES:
            entry = {"path": where, "size": facts.st_size, "mtime_ns": facts.st_mtime_ns}
            listed.append(entry)
    identity: dict[str, Any] = {"files": listed}
    if len(files) > _LISTED_FILES:
        identity |= {"count": len(files), "bytes": total, "sha256": digest.hexdigest()}
    if any(kind_of(path) in ROWS for path in files):
        identity["field"] = source.field

    def pieces(reading: Reading) -> Iterator[Piece]:
        for path in files:
            yield from read_file(path, source.field, reading)

    return Corpus(source, _short_name(given), identity, pieces, lambda: total)


def _named(source: Source) -> Corpus:
    name = source.source
    corpus = NAMED[name]

    def pieces(reading: Reading) -> Iterator[Piece]:
        for document, size, opened, clean in corpus.documents():
            try:
                with opened() as stream:
                    yield from read_text(stream, document, reading, clean)
            except OSError as error:
                raise DataError(f"cannot read {document}: {error.strerror or error}") from None
            reading.advance(size)

    return Corpus(
        source,
        name,
        {"corpus": name, "sha256": corpus.sha256},
        pieces,
        lambda: sum(size for _, size, _, _ in corpus.documents()),
    )


def _files(source: str) -> list[str]:
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return _some(_folder(path), source)
    if os.path.exists(path):
        if not os.path.isfile(path):  # a pipe would wait for ever
            raise DataError(f"{source} is neither a file nor a folder; write the text to a file")
        if kind_of(path) is None:
            raise DataError(
                f"{source} is of no kind that can be read ({ALLOWED}); rename it to .txt if it is "
                "plain text, or convert it"
            )
        return [path]
    if glob.has_magic(path) and not source.startswith(("[{", "{")):
        matches = sorted(glob.glob(path, recursive=True))
        files = [p for p in matches if os.path.isfile(p) and kind_of(p)]
        folders = [p for p in matches if os.path.isdir(p)]
        return _some(files + [p for folder in folders for p in _folder(folder)], source)
    if source.startswith(("[{", "{")):
        raise DataError(
            f"{source} is no list of sources that can be read; its entries are texts or mappings "
            "with source, field, weight and split: '[a.txt, {source: b.jsonl, weight: 2}]'"
        )
    near = difflib.get_close_matches(source, NAMED, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise DataError(
        f"{source!r} is neither a file, a folder or a glob that exists nor a named corpus{hint} "
        f"(the named corpora are {', '.join(NAMED)}; a Hugging Face dataset is {HUB}NAME)"
    )


def _some(files: list[str], source: str) -> list[str]:
    if not files:
        raise DataError(f"no text found: there is no file that can be read ({ALLOWED}) in {source}")
    return files


def passed_over(sources: Sequence[Source]) -> list[str]:
    """The files in folders that were named which are of no kind that can be read, for a note."""
    found: list[str] = []
    for source in sources:
        path = os.path.expanduser(source.source)
        if source.source not in NAMED and os.path.isdir(path):
            found += _folder(path, wanted=lambda name: kind_of(name) is None)
    return found


def _folder(folder: str, wanted: Callable[[str], object] = lambda name: kind_of(name)) -> list[str]:
    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror}")

    found = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        chosen = [name for name in files if not name.startswith(".") and wanted(name)]
        found += [os.path.join(parent, name) for name in chosen]
    return sorted(path for path in found if not _waits(path))


def _waits(path: str) -> bool:
    """Whether it is there but is no regular file: a pipe or a socket, say, would wait for ever."""
    return os.path.exists(path) and not os.path.isfile(path)


def _short_name(given: str) -> str:
    plain = Path(os.path.abspath(os.path.expanduser(given)))
    parts = [part for part in reversed(plain.parts) if not glob.has_magic(part)]
    name = parts[0] if parts else ""
    while kind_of(name) or name.endswith((".gz", ".zst")):
        name = os.path.splitext(name)[0]
    return _plain(name)


def _plain(name: str) -> str:
    return re.sub(r"[^\w-]+", "-", name).strip("-")[:40] or "text"
