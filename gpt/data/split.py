"""Which text trains and which is held out: decided from counts, while the text goes by.

No list of documents is kept, for there can be tens of millions: one pass counts them, and whether
the i-th is held out is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gpt.data.formats import Piece
from gpt.errors import DataError
from gpt.rules import After

WHOLE_DOCUMENTS = 20
"""From this many documents on, whole ones are held out; below it each is cut."""


@dataclass
class Counts:
    """What one pass over a source has found.

    Attributes:
        documents: those that are not empty.
        empty: those that are.
        chars: characters in all.
        bytes_: their UTF-8 bytes.
        lengths: characters of each document that is not empty, of the first WHOLE_DOCUMENTS.
    """

    documents: int = 0
    empty: int = 0
    chars: int = 0
    bytes_: int = 0
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[Piece], alphabet: set[str] | None = None) -> Counts:
        """Count, and collect the characters in `alphabet` if it is given."""
        counts = cls()
        length = 0
        for text, end, _, _ in pieces:
            length += len(text)
            counts.bytes_ += utf8_length(text)
            if alphabet is not None:
                alphabet.update(text)
            if end:
                if length:
                    counts.documents += 1
                    if len(counts.lengths) < WHOLE_DOCUMENTS:
                        counts.lengths.append(length)
                else:
                    counts.empty += 1
                counts.chars += length
                length = 0
        return counts


class Part(NamedTuple):
    """A part of a document that is wholly in one split.

    Attributes:
        text: not empty.
        end: whether what the split has of this document ends here.
        val: whether it is held out.
        piece: what it was cut from, for a message.
        offset: characters of the document before it.
        after: what stands right before it, for vocabularies that begin a text with a space.
    """

    text: str
    end: bool
    val: bool
    piece: Piece
    offset: int
    after: After = ""


@dataclass(frozen=True)
class Split:
    """How one source is split.

    With at least WHOLE_DOCUMENTS documents whole ones are held out, evenly spread: the middle of
    each of as many equal stretches. Otherwise each is cut: its first
    `int(characters * (1 - val_fraction))` characters train.
    """

    counts: Counts
    val_fraction: float

    @property
    def whole(self) -> bool:
        return self.counts.documents >= WHOLE_DOCUMENTS

    @property
    def held_out(self) -> int:
        """Documents that are held out, where whole ones are."""
        n = self.counts.documents
        return min(max(round(n * self.val_fraction), 1), n - 1)

    def holds_out(self, index: int) -> bool:
        """Whether document `index` is held out, where whole ones are.

        They are `(2 * i + 1) * documents // (2 * held_out)` for i below `held_out`.
        """
        n, twice = self.counts.documents, 2 * self.held_out
        i = (-(-index * twice // n)) // 2  # the first whose place is not before `index`
        return (2 * i + 1) * n // twice == index

    def cut(self, length: int) -> int:
        """Characters of a document that train, where each is cut."""
        return int(length * (1 - self.val_fraction))

    def has(self, split: str) -> bool:
        """Whether any text falls into that split, `train` or `val`."""
        if self.whole:
            return True
        cuts = [(self.cut(length), length) for length in self.counts.lengths]
        return any(cut if split == "train" else cut < length for cut, length in cuts)

    def parts(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        """The source's pieces by split.

        Raises:
            DataError: the text is not what was counted.
        """
        index = offset = 0
        val = self.whole and self.holds_out(0)
        for piece in pieces:
            text, end, name, _ = piece
            if index >= self.counts.documents and text:
                raise DataError(f"{name} grew while it was being read; prepare it again")
            if self.whole:
                if text:
                    yield Part(text, end, val, piece, offset)
            elif text:
                cut = self.cut(self.counts.lengths[index]) - offset
                last = offset + len(text) == self.counts.lengths[index]
                if end != last:
                    raise DataError(f"{name} changed while it was being read; prepare it again")
                if cut > 0:
                    yield Part(text[:cut], len(text) >= cut, False, piece, offset)
                if len(text) > cut:
                    start = max(cut, 0)
                    yield Part(text[start:], end, True, piece, offset + start)
            offset += len(text)
            if end and offset:
                index += 1
                offset = 0
                val = self.whole and self.holds_out(index)
        if index < self.counts.documents:
            raise DataError("the text became shorter while it was being read; prepare it again")


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
