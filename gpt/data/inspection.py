"""What a prepared folder holds: its description, its documents, and if every token is right."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpt.data.description import COUNTS, SPLITS
from gpt.data.progress import Progress
from gpt.data.shards import PreparedData, TokenArray
from gpt.errors import DataError
from gpt.pieces import PieceWriter, readable
from gpt.splitting import PATTERNS
from gpt.tokenizer import Tokenizer

BLOCK = 1 << 20
"""Tokens that are looked at together."""
LONG_BYTES = 1 << 26
EXCERPT_TOKENS = 200
EXCERPT_CHARS = 400
AROUND = 32
"""Tokens shown before and after one."""

NOTHING = -1


@dataclass(frozen=True)
class Excerpt:
    """The beginning of a document.

    Attributes:
        number: of the document in its split, from 0.
        start: its first token.
        tokens: how many it has, end-of-text not counted.
        text: its first characters, EXCERPT_CHARS at most.
        whole: whether that is all of it.
    """

    number: int
    start: int
    tokens: int
    text: str
    whole: bool


def byte_lengths(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Bytes of each token by id; NOTHING for an id that stands for nothing."""
    special = set(tokenizer.special.values())
    sizes = [len(tokenizer.token_bytes(token)) for token in range(tokenizer.n_vocab)]
    return np.array(
        [size if size or i in special else NOTHING for i, size in enumerate(sizes)], np.int64
    )


def blocks(
    array: TokenArray, bar: Progress | None = None, first: int = 0, stop: int | None = None
) -> Iterator[npt.NDArray[np.int64]]:
    """The ids of a split from `first` up to `stop`, or all of them, some at a time."""
    stop = len(array) if stop is None else stop
    for start in range(first, stop, BLOCK):
        block = array[start : min(start + BLOCK, stop)]
        yield block
        if bar is not None:
            bar.update(len(block) * array.dtype.itemsize)


def progress(what: str, arrays: list[TokenArray], show: bool) -> Progress:
    """Of a pass over these; one that is done in a moment says nothing."""
    size = sum(len(array) * array.dtype.itemsize for array in arrays)
    return Progress(what, size, show=show and size >= LONG_BYTES)


def char_lengths(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Characters that begin in each token: every byte but those that go on with one."""
    sizes = [
        sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(token))
        for token in range(tokenizer.n_vocab)
    ]
    return np.array(sizes, np.int64)


def check_ids(
    data: PreparedData, split: str, block: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> None:
    """Raises DataError for an id that stands for nothing.

    Args:
        lengths: `byte_lengths` of the tokenizer.
    """
    if len(block) and (block.max() >= len(lengths) or lengths[block].min() == NOTHING):
        raise _damaged(data, f"{split} has an id that its vocabulary has not")


def verify(data: PreparedData, *, show: bool = True) -> None:
    """Read every token and compare with what the folder says of each source and split.

    Raises:
        DataError: an id that is none, or another number of tokens, documents, bytes or characters.
    """
    lengths, chars = byte_lengths(data.tokenizer), char_lengths(data.tokenizer)
    arrays = {split: getattr(data, split) for split in SPLITS}
    with progress("checking", [*arrays.values()], show) as bar:
        for split, array in arrays.items():
            largest = -1
            for i, span in enumerate(data.sources):
                found = dict.fromkeys(COUNTS, 0)
                for block in blocks(array, bar, *getattr(span, split)):
                    check_ids(data, split, block, lengths)
                    found["tokens"] += len(block)
                    found["documents"] += int((block == data.tokenizer.eot).sum())
                    found["bytes"] += int(lengths[block].sum())
                    found["chars"] += int(chars[block].sum())
                    largest = max(largest, int(block.max()))
                # Of the whole split they are sums of these: that is looked at when it is opened.
                _compare(data, f"{split} of {span.name}", data.meta["spans"][i][split], found)
            _compare(data, split, data.meta["splits"][split], {"max_id": largest})


def _compare(data: PreparedData, where: str, said: dict[str, int], found: dict[str, int]) -> None:
    for name, value in found.items():
        if said[name] != value:
            raise _damaged(data, f"{where} has {name} {value}, but meta.json says {said[name]}")


def _damaged(data: PreparedData, what: str) -> DataError:
    return DataError(
        f"{data.folder} is damaged: {what}; delete the folder and prepare the data again"
    )


def documents(array: TokenArray, eot: int) -> Iterator[tuple[int, int]]:
    """First token of each document, and the place of its end-of-text."""
    start = at = 0
    for block in blocks(array):
        for end in np.flatnonzero(block == eot).tolist():
            yield start, at + end
            start = at + end + 1
        at += len(block)


def excerpts(data: PreparedData, split: str, count: int) -> Iterator[Excerpt]:
    """The beginnings of the first documents of a split."""
    array = getattr(data, split)
    for number, (start, end) in enumerate(documents(array, data.tokenizer.eot)):
        if number == count:
            return
        stop = min(end, start + EXCERPT_TOKENS)
        text = data.tokenizer.decode(array[start:stop].tolist())
        whole = stop == end and len(text) <= EXCERPT_CHARS
        yield Excerpt(number, start, end - start, text[:EXCERPT_CHARS], whole)


@dataclass(frozen=True)
class Place:
    """One token and what is around it."""

    at: int
    document: int
    start: int
    end: int
    source: str
    before: list[int]
    token: int
    after: list[int]


def place_of(data: PreparedData, split: str, at: int) -> Place:
    """Raises DataError for a token beyond the split's end."""
    array: TokenArray = getattr(data, split)
    if not 0 <= at < len(array):
        raise DataError(
            f"{split} has tokens 0 to {len(array) - 1}, so there is none at {at}; choose another"
        )
    document = start = end = here = 0
    for block in blocks(array):
        ends = here + np.flatnonzero(block == data.tokenizer.eot)
        before = int(np.searchsorted(ends, at))
        document += before
        if before:
            start = int(ends[before - 1]) + 1
        if before < len(ends):
            end = int(ends[before])
            break
        here += len(block)
    spans = [(span.name, getattr(span, split)) for span in data.sources]
    source = next((name for name, (low, high) in spans if low <= at < high), "")
    return Place(
        at, document, start, end, source,
        array[max(at - AROUND, 0) : at].tolist(),
        array[at],
        array[at + 1 : at + 1 + AROUND].tolist(),
    )  # fmt: skip


def summary(data: PreparedData) -> dict[str, Any]:
    """What the folder says of itself, as plain data."""
    meta, made = data.meta, data.tokenizer
    splits = {
        split: {name: meta["splits"][split][name] for name in COUNTS}
        | {"bytes_per_token": _ratio(meta["splits"][split])}
        for split in SPLITS
    }
    return {
        "folder": str(data.folder),
        "tokenizer": {
            "kind": made.kind,
            "n_vocab": made.n_vocab,
            "pattern": made.pattern,
            "special": made.special,
            "fingerprint": made.fingerprint,
        },
        "settings": {name: meta.get(name) for name in ("val_fraction", "newlines", "on_error")},
        "splits": splits,
        "sources": [
            {
                "source": span.name,
                "weight": span.weight,
                **{split: dict(zip(("start", "stop"), getattr(span, split), strict=True))
                   for split in SPLITS},
            }
            for span in data.sources
        ],
        "empty_documents": meta.get("empty_documents", 0),
        "left_out": meta.get("left_out", {}),
    }  # fmt: skip


def _ratio(counts: dict[str, int]) -> float:
    return round(counts["bytes"] / max(counts["tokens"], 1), 4)


def print_summary(data: PreparedData) -> None:
    found = summary(data)
    made = data.tokenizer
    names = {regex: name for name, regex in PATTERNS.items()}
    print(found["folder"])
    pattern = f", pattern {names[made.pattern]}" if made.pattern in names else ""
    print(f"  tokenizer  {made.kind} of {made.n_vocab:,} ids ({made.fingerprint[:12]}){pattern}")
    if special := [name for name in made.special if name != made.end_of_text]:
        shown = ", ".join(map(readable, special[:8]))
        print(f"  special    {shown}{', …' if len(special) > 8 else ''}")
    settings = ", ".join(f"{name} {value}" for name, value in found["settings"].items() if value)
    print(f"  settings   {settings}")
    print()
    print(table(("", *COUNTS, "bytes/token"), [
        (split, *(f"{counts[name]:,}" for name in COUNTS), f"{counts['bytes_per_token']:.2f}")
        for split, counts in found["splits"].items()
    ]))  # fmt: skip
    if len(data.sources) > 1:
        print()
        print(table(("source", "train tokens", "val tokens", "weight"), [
            (
                readable(span.name),
                *(f"{stop - start:,}" for start, stop in (span.train, span.val)),
                f"{span.weight:g}",
            )
            for span in data.sources
        ]))  # fmt: skip
    left_out = {name: value for name, value in found["left_out"].items() if value}
    if found["empty_documents"]:
        print(f"\n  {found['empty_documents']:,} empty documents")
    if left_out:
        facts = ", ".join(f"{name.strip('_')} {value}" for name, value in left_out.items())
        print(f"\n  left out or replaced: {readable(facts)}")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Columns two blanks apart, the first to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(size) for cell, size in rest)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def inspect(args: argparse.Namespace) -> int:
    """Carry out `antiphon data inspect`."""
    data = PreparedData.open(args.folder)
    place = None if args.at is None else place_of(data, args.split, args.at)
    if not args.no_check:
        verify(data)
    shown = list(excerpts(data, args.split, args.documents))
    if args.json:
        record = summary(data) | {"checked": not args.no_check}
        record["documents"] = [{"split": args.split, **vars(excerpt)} for excerpt in shown]
        if place is not None:
            record["at"] = {"split": args.split, **vars(place)}
        print(json.dumps(record, ensure_ascii=False, indent=2))
        return 0
    print_summary(data)
    if not args.no_check:
        print("\n  every token was read and is as described")
    if place is not None:
        _print_place(data, args.split, place)
    else:
        for excerpt in shown:
            print(f"\n{args.split}, document {excerpt.number}: {excerpt.tokens:,} tokens")
            text = readable(excerpt.text) + ("" if excerpt.whole else " …")
            print("\n".join(f"  {line}" for line in text.split("\n")))
    return 0


def _print_place(data: PreparedData, split: str, place: Place) -> None:
    print(
        f"\n{split}, token {place.at:,}: id {place.token}, in document {place.document:,} (tokens "
        f"{place.start:,} to {place.end:,}) of {readable(place.source)}"
    )
    names = {token: name.encode() for name, token in data.tokenizer.special.items()}
    for title, ids in (("before", place.before), ("token", [place.token]), ("after", place.after)):
        out = io.StringIO()
        writer = PieceWriter(out, colour=False)
        for token in ids:
            data_bytes = names.get(token) or data.tokenizer.token_bytes(token)
            writer.write(data_bytes, special=token in names)
        lines = out.getvalue().rstrip("\n").split("\n")
        print("\n".join(f"  {'' if i else title:8}{line}" for i, line in enumerate(lines)))
