"""Numbers about tokenized text, gathered in one pass.

**Memory.** A counter per id, one per different length of a document (fewer than the square root of
twice the tokens), and eight bytes for each document, by which duplicates are found.
"""

from __future__ import annotations

import array
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpt.data.description import SPLITS
from gpt.data.inspection import NOTHING, blocks, byte_lengths, check_ids, progress, table
from gpt.data.progress import Progress
from gpt.data.shards import PreparedData
from gpt.pieces import readable
from gpt.tokenizer import Tokenizer
from gpt.transcript import spelt

HELD_TOKENS = 1 << 16
"""Tokens that are counted together: a call for each of many short documents would take longer."""

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


class Statistics:
    """Counts over documents, each of which ends with end-of-text.

    Attributes:
        name: what was counted.
        counts: how often each id occurs.
        bytes_: UTF-8 bytes of text.
        lengths: how many documents have so many tokens, end-of-text not counted.
    """

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.counts = np.zeros(tokenizer.n_vocab, np.int64)
        self.lengths: Counter[int] = Counter()
        self.marks: dict[str, array.array[int]] = {}
        self._sizes = byte_lengths(tokenizer)
        self._hash = hashlib.blake2b(digest_size=8)
        self._length = 0

    def add(self, ids: npt.NDArray[np.int64], split: str = "") -> None:
        """Ids in order; a document may go on with the next ones."""
        marks = self.marks.setdefault(split, array.array("Q"))
        self.counts += np.bincount(ids, minlength=len(self.counts))
        start = 0
        for end in np.flatnonzero(ids == self.tokenizer.eot).tolist():
            self._hash.update(ids[start:end].tobytes())
            self.lengths[self._length + end - start] += 1
            marks.append(int.from_bytes(self._hash.digest(), "little"))
            self._hash = hashlib.blake2b(digest_size=8)
            self._length = 0
            start = end + 1
        self._hash.update(ids[start:].tobytes())
        self._length += len(ids) - start

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def bytes_(self) -> int:
        return int((self.counts * np.maximum(self._sizes, 0)).sum())

    @property
    def documents(self) -> int:
        return sum(self.lengths.values())

    def quantiles(self) -> dict[str, int]:
        """Tokens of a document: the least length that so large a share of them does not exceed."""
        found = {}
        ordered = sorted(self.lengths.items())
        for share in QUANTILES:
            wanted = max(math.ceil(share * self.documents), 1)
            seen = 0
            for length, count in ordered:
                seen += count
                if seen >= wanted:
                    found[f"{share:g}"] = length
                    break
        return found

    def entropy(self) -> float:
        """Of the tokens one by one, in bits."""
        shares = self.counts[self.counts > 0] / max(self.tokens, 1)
        return float(-(shares * np.log2(shares)).sum()) + 0.0  # not -0

    def bits_per_byte(self) -> float:
        """What a model that knew nothing but how frequent each token is would score."""
        return self.entropy() * self.tokens / max(self.bytes_, 1)

    def vocabulary(self) -> dict[str, int]:
        """Ids that stand for something, and how many of them occur."""
        usable = int((self._sizes != NOTHING).sum())
        used = int((self.counts > 0).sum())
        return {"ids": usable, "used": used, "unused": usable - used}

    def frequent(self, count: int) -> list[tuple[int, int]]:
        """The most frequent ids with their counts, ties in order of the ids."""
        order = np.argsort(-self.counts, kind="stable")[:count]
        return [(int(i), int(self.counts[i])) for i in order if self.counts[i]]

    def rare(self, count: int) -> list[tuple[int, int]]:
        """The least frequent ids that occur at all."""
        used = np.flatnonzero(self.counts)
        order = used[np.argsort(self.counts[used], kind="stable")[:count]]
        return [(int(i), int(self.counts[i])) for i in order]

    def duplicates(self) -> int:
        """Documents that are, token for token, another one that came before."""
        marks = np.concatenate([_as_array(marks) for marks in self.marks.values()] or [_NONE])
        return len(marks) - len(np.unique(marks))

    def held_out_seen(self) -> int | None:
        """Held-out documents that are also trained on; None without two splits."""
        if set(self.marks) != set(SPLITS):
            return None
        train, val = (_as_array(self.marks[split]) for split in SPLITS)
        return int(np.isin(val, train).sum())

    def record(self, top: int) -> dict[str, Any]:
        """Everything as plain data for JSON."""

        def entries(found: list[tuple[int, int]]) -> list[dict[str, Any]]:
            return [
                {
                    "token_id": token,
                    "text": spelt(self.tokenizer, token),
                    "count": count,
                    "share": count / self.tokens,
                }
                for token, count in found
            ]

        return {
            "name": self.name,
            "tokenizer": {
                "kind": self.tokenizer.kind,
                "n_vocab": self.tokenizer.n_vocab,
                "fingerprint": self.tokenizer.fingerprint,
            },
            "tokens": self.tokens,
            "bytes": self.bytes_,
            "bytes_per_token": self.bytes_ / max(self.tokens, 1),
            "unigram_bits_per_byte": self.bits_per_byte(),
            "unigram_bits_per_token": self.entropy(),
            "documents": self.documents,
            "document_tokens": self.quantiles(),
            "duplicate_documents": self.duplicates(),
            "held_out_documents_in_train": self.held_out_seen(),
            "vocabulary": self.vocabulary(),
            "most_frequent": entries(self.frequent(top)),
            "least_frequent": entries(self.rare(top)),
        }


_NONE = np.zeros(0, np.uint64)


def _as_array(marks: array.array[int]) -> npt.NDArray[np.uint64]:
    return np.frombuffer(marks, np.uint64) if marks else _NONE


def of_prepared(folder: Path, split: str | None = None, *, show: bool = True) -> Statistics:
    """Of a prepared folder, or of one split of it. Raises DataError if it cannot be read."""
    data = PreparedData.open(folder)
    splits = SPLITS if split is None else (split,)
    found = Statistics(f"{folder} ({' and '.join(splits)})", data.tokenizer)
    arrays = {name: getattr(data, name) for name in splits}
    lengths = byte_lengths(data.tokenizer)
    with progress("counting", [*arrays.values()], show) as bar:
        for name, ids in arrays.items():
            for block in blocks(ids, bar):
                check_ids(data, name, block, lengths)
                found.add(block, name)
    return found


def of_sources(
    sources: Sequence[Any],
    tokenizer: str,
    *,
    newlines: Any = "keep",
    on_error: Any = "stop",
    show: bool = True,
) -> Statistics:
    """Of text that is not prepared: tokenized on the way, and not kept.

    Args:
        sources: what `gpt.data.prepare.prepare` takes.
        tokenizer: what `gpt.encodings.named_tokenizer` takes.
        newlines, on_error: as for `prepare`.

    Raises:
        DataError, TokenizerError: text that cannot be found, read or expressed.
    """
    from gpt.data.decoding import Reading
    from gpt.data.sources import find_corpora
    from gpt.encodings import named_tokenizer

    made = named_tokenizer(tokenizer)
    corpora = find_corpora(sources)
    found = Statistics(", ".join(corpus.source.source for corpus in corpora), made)
    sizes = [corpus.size() for corpus in corpora]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    with Progress("counting", total, show=show) as bar:
        for corpus in corpora:
            pieces = corpus.pieces(Reading(on_error, newlines, bar.update))
            held: list[int] = []
            for piece in pieces:
                for ids in made.encode_stream(_one_document(piece, pieces)):
                    held += ids
                    if len(held) >= HELD_TOKENS:
                        found.add(np.array(held, np.int64))
                        held = []
                held.append(made.eot)
            found.add(np.array(held, np.int64))
    return found


def _one_document(piece: Any, more: Iterator[Any]) -> Iterator[str]:
    yield piece.text
    while not piece.end:
        piece = next(more)
        yield piece.text


def print_statistics(found: Statistics, top: int) -> None:
    made = found.tokenizer
    used = found.vocabulary()
    per_token = found.bytes_ / max(found.tokens, 1)
    print(readable(found.name))
    print(f"  tokenizer   {made.kind} of {made.n_vocab:,} ids ({made.fingerprint[:12]})")
    print(f"  tokens      {found.tokens:,}, end-of-text included")
    print(f"  text        {found.bytes_:,} bytes, {per_token:.3f} bytes per token")
    # What a model would score that knew nothing but how frequent each token is.
    print(
        f"  entropy     {found.bits_per_byte():.3f} bits per byte of single tokens "
        f"({found.entropy():.3f} bits each)"
    )
    share = used["used"] / max(used["ids"], 1)
    print(
        f"  vocabulary  {used['used']:,} of {used['ids']:,} ids occur ({share:.1%}), "
        f"{used['unused']:,} do not"
    )
    print(f"  documents   {found.documents:,}, of them {found.duplicates():,} duplicates of others")
    if (seen := found.held_out_seen()) is not None:
        print(f"              {seen:,} held-out documents are also trained on")
    print("\n  tokens of a document, by share of documents that have no more")
    quantiles = found.quantiles()
    print(table(
        ("", *(f"{float(share):.0%}" for share in quantiles)),
        [("", *(f"{length:,}" for length in quantiles.values()))],
    ))  # fmt: skip
    for title, entries in (("most", found.frequent(top)), ("least", found.rare(top))):
        if entries:
            print(f"\n  {title} frequent")
            print(table(("", "id", "count", "share"), [
                (spelt(made, token), str(token), f"{count:,}", f"{count / found.tokens:.4%}")
                for token, count in entries
            ]))  # fmt: skip
