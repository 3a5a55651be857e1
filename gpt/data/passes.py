"""The passes over a corpus: one counts, one learns a vocabulary if need be, one writes ids.

**Memory.** No pass holds more than a part of the text, whatever its size. This process takes some
80 MB and 10 MB for each worker (up to `AHEAD` batches of 512K characters), a worker some 60 MB:
2 GB of JSON Lines and two workers peak at 180 MB in all (`benchmarks/prepare.py`). To this come, in
each process, the vocabulary where it is large (90 MB for 200,000 tokens); the longest row of a
source that has rows; Arrow's library and a row group's pages for Parquet, datasets and compressed
files; 100 bytes a file for its path; and while a BPE is learned its table of different words, which
comes from at most `LEARN_BYTES` of text.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpt.data.decoding import Losses, Newlines, OnError, Reading
from gpt.data.description import SPLITS
from gpt.data.progress import Progress
from gpt.data.shards import ShardWriter, dtype_for
from gpt.data.sources import Corpus
from gpt.data.split import WHOLE_DOCUMENTS, Counts, Part, Split, utf8_length
from gpt.data.tokenizing import Batch, Encoded, batches, cut, encode_all
from gpt.errors import DataError
from gpt.files import sync_folder, write_atomically
from gpt.splitting import Splitter, split_pattern
from gpt.tokenizer import FILE_NAME, Tokenizer

LEARN_BYTES = 1 << 29
"""Most text that a BPE is learned from; of more, an even sample is taken. Which words are frequent
is long settled by then, and the table of those that are not is what fills the memory."""

WORKER_BYTES = 4 << 20
"""Text that is worth another process: what one encodes while another starts."""


@dataclass(frozen=True)
class Vocabulary:
    """What is to be made of the text.

    Attributes:
        tokenizer: a ready one, or `bpe` or `chars`, which are learned.
        vocab_size, pattern: for `bpe`, as in `Tokenizer.bpe`.
        special_tokens: names that are taken for tokens where the text has them.
    """

    tokenizer: str | Tokenizer
    vocab_size: int
    pattern: str
    special_tokens: tuple[str, ...]


@dataclass
class _Sums:
    """Counts of one source in one split."""

    tokens: int = 0
    bytes: int = 0
    chars: int = 0
    documents: int = 0


@dataclass
class Job:
    """Prepares some corpora into an empty folder.

    Attributes:
        corpora: read one after the other.
        vocabulary: how the text becomes ids.
        val_fraction: share held out, of each corpus.
        newlines, on_error: how the text is read.
        workers: processes that encode.
        shard_tokens: most ids in a shard.
        progress: whether to say on stderr how far it is.
    """

    corpora: Sequence[Corpus]
    vocabulary: Vocabulary
    val_fraction: float
    newlines: Newlines
    on_error: OnError
    workers: int
    shard_tokens: int
    progress: bool
    _losses: Losses = field(default_factory=Losses)
    _counts: list[Counts] = field(default_factory=list)
    _read: int = 0

    def run(self, folder: Path, identity: dict[str, Any]) -> None:
        """Write all of the prepared data.

        Raises:
            DataError: no text, too little of it, or text that cannot be read or changes meanwhile.
            TokenizerError: text that the vocabulary cannot express.
            OSError: the folder cannot be written.
        """
        alphabet = self._count()
        tokenizer = self._make_tokenizer(alphabet)
        tokenizer.save(folder / FILE_NAME)
        sums, writers = self._write(folder, tokenizer)
        meta = {
            **identity,
            "tokenizer": {
                **identity["tokenizer"],
                "n_vocab": tokenizer.n_vocab,
                "fingerprint": tokenizer.fingerprint,
            },
            "dtype": dtype_for(tokenizer.n_vocab),
            "empty_documents": sum(counts.empty for counts in self._counts),
            "left_out": asdict(self._losses),
            "splits": {
                split: {
                    **{name: sum(getattr(one[split], name) for one in sums) for name in _FIELDS},
                    "max_id": writers[split].max_id,
                    "shards": writers[split].shards,
                }
                for split in SPLITS
            },
            "spans": [
                {"source": corpus.source.source, **{s: asdict(one[s]) for s in SPLITS}}
                for corpus, one in zip(self.corpora, sums, strict=True)
            ],
        }
        write_atomically(folder / "meta.json", json.dumps(meta, indent=2).encode())
        sync_folder(folder)
        if self.progress and self._losses.first:
            print(
                f"{self._losses.bytes} bytes and {self._losses.rows} rows were left out or "
                f"replaced; the first: {self._losses.first}",
                file=sys.stderr,
            )

    def _count(self) -> set[str]:
        """Count documents, characters and bytes; returns all characters if they are needed."""
        alphabet = set[str]() if self.vocabulary.tokenizer == "chars" else None
        sizes = [corpus.size() for corpus in self.corpora]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        with Progress("reading", total, show=self.progress) as bar:
            reading = Reading(self.on_error, self.newlines, bar.update, self._losses)
            for corpus in self.corpora:
                self._counts.append(Counts.of(corpus.pieces(reading), alphabet))
        self._read = bar.done
        chars = sum(counts.chars for counts in self._counts)
        looked_at = ", ".join(corpus.source.source for corpus in self.corpora)
        if not chars:
            documents = sum(counts.empty for counts in self._counts)
            left = f" ({self._losses.first})" if self._losses.first else ""
            raise DataError(
                f"no text found: {documents} documents in {looked_at}, all empty"
                + (f", and {self._losses.rows} rows left out{left}" if left else "")
            )
        if not all(
            any(Split(counts, self.val_fraction).has(split) for counts in self._counts)
            for split in SPLITS
        ):
            share = self.val_fraction
            if chars < WHOLE_DOCUMENTS or 1 <= chars * share <= chars - 1:
                raise DataError(
                    f"{looked_at} has {chars} characters in all, too few to train on some and hold "
                    "out others; give more text"
                )
            raise DataError(
                f"val_fraction is {share}: of {chars} characters in {looked_at}, that "
                f"{'holds out none' if share < 0.5 else 'leaves none to train on'}; give "
                f"{'a larger' if share < 0.5 else 'a smaller'} fraction, or more text"
            )
        return alphabet or set()

    def _parts(self, advance: Progress) -> Iterator[tuple[int, Iterator[Part]]]:
        """The parts of each corpus, read once more, with its number."""
        reading = Reading(self.on_error, self.newlines, advance.update)
        for i, (corpus, counts) in enumerate(zip(self.corpora, self._counts, strict=True)):
            yield i, Split(counts, self.val_fraction).parts(corpus.pieces(reading))

    def _make_tokenizer(self, alphabet: set[str]) -> Tokenizer:
        wanted = self.vocabulary
        if isinstance(wanted.tokenizer, Tokenizer):
            return wanted.tokenizer
        if wanted.tokenizer == "chars":
            return Tokenizer.chars(alphabet, wanted.special_tokens)
        with Progress("learning bpe", self._read, show=self.progress) as bar:
            return Tokenizer.bpe(
                self._sample(bar), wanted.vocab_size, wanted.pattern, wanted.special_tokens
            )

    def _sample(self, bar: Progress) -> Iterator[str]:
        """The training text in pieces; of more than LEARN_BYTES an even share of the pieces.

        Which ones is a matter of the text alone: whenever the share of what has gone by is due,
        the next piece is taken, whole.
        """
        train = sum(counts.bytes_ for counts in self._counts) * (1 - self.val_fraction)
        share = min(LEARN_BYTES / train, 1.0)
        splitter = Splitter(split_pattern(self.vocabulary.pattern))
        due = 0.0
        for _, parts in self._parts(bar):
            for part in cut(parts, splitter, self.vocabulary.special_tokens):
                if part.val:
                    continue
                size = utf8_length(part.text)
                due += size * share
                if due > 0:
                    due -= size
                    yield part.text

    def _write(
        self, folder: Path, tokenizer: Tokenizer
    ) -> tuple[list[dict[str, _Sums]], dict[str, ShardWriter]]:
        """Write the shards of both splits; returns what each source has in each, and the writers"""
        names = self.vocabulary.special_tokens
        sums = [{split: _Sums() for split in SPLITS} for _ in self.corpora]
        with contextlib.ExitStack() as stack:
            writers = {
                split: stack.enter_context(
                    contextlib.closing(
                        ShardWriter(folder, split, tokenizer.n_vocab, self.shard_tokens)
                    )
                )
                for split in SPLITS
            }
            bar = stack.enter_context(Progress("tokenizing", self._read, show=self.progress))
            work = batches(
                ((i, part.val), part)
                for i, parts in self._parts(bar)
                for part in cut(parts, tokenizer.splitter, [*names, *tokenizer.rules.always])
            )
            size = sum(counts.bytes_ for counts in self._counts)
            workers = max(min(self.workers, size // WORKER_BYTES), 1)
            encoded = encode_all(work, tokenizer, folder / FILE_NAME, names, workers)
            stack.enter_context(contextlib.closing(encoded))
            for batch, result in encoded:
                _append(batch, result, sums, writers)
        for corpus, counts, one in zip(self.corpora, self._counts, sums, strict=True):
            if sum(one[split].bytes for split in SPLITS) != counts.bytes_:
                raise DataError(
                    f"{corpus.source.source} changed while it was being read; prepare it again"
                )
        return sums, writers


_FIELDS = ("tokens", "bytes", "chars", "documents")


def _append(
    batch: Batch,
    result: Encoded,
    sums: list[dict[str, _Sums]],
    writers: dict[str, ShardWriter],
) -> None:
    """Hand the ids of each run to the writer of its split, and count them."""
    text = token = 0
    for (source, val), texts, tokens, size in zip(
        batch.keys, batch.runs, result.tokens, result.bytes_, strict=True
    ):
        split = SPLITS[val]
        writers[split].append(result.ids[token : token + tokens])
        sum_ = sums[source][split]
        sum_.tokens += tokens
        sum_.bytes += size
        sum_.chars += sum(map(len, batch.texts[text : text + texts]))
        sum_.documents += sum(batch.ends[text : text + texts])
        text += texts
        token += tokens


def all_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
