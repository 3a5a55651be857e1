"""prepare(): a corpus becomes a folder of token shards, once.

The text is streamed: one pass counts, one learns the BPE if there is one to learn, one writes ids.
Everything goes into a temporary sibling of the final folder, which is renamed when all of it is on
disk: the folder is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from gpt.data.corpora import Corpus, Document, find_corpus
from gpt.data.shards import FORMAT, SPLITS, PreparedData, ShardWriter, dtype_for
from gpt.data.sources import Source, SourceLike
from gpt.errors import ConfigError, DataError, InexpressibleTextError, TokenizerError
from gpt.files import sync_folder, write_atomically
from gpt.splitting import GPT4_PATTERN, Splitter
from gpt.tokenizer import FILE_NAME, MIN_BPE_VOCAB, Tokenizer

KINDS = ("bpe", "bytes", "chars")
WHOLE_DOCUMENTS = 20
"""From this many documents on, whole ones are held out; below it each is cut."""

SHARD_TOKENS = 1 << 26


def prepare(
    source: SourceLike | Sequence[SourceLike],
    *,
    tokenizer: str | Tokenizer = "bpe",
    vocab_size: int = 2048,
    pattern: str = "gpt4",
    special_tokens: Sequence[str] = (),
    root: str | Path = "data",
    val_fraction: float = 0.1,
    newlines: str = "keep",
    on_error: str = "stop",
    workers: int | None = None,
    progress: bool = True,
    shard_tokens: int = SHARD_TOKENS,
) -> PreparedData:
    """The corpus as token shards, made now or found ready.

    The split is a function of the corpus alone. With at least 20 documents whole ones are held out,
    evenly spread; otherwise the first `int(characters * (1 - val_fraction))` characters of each
    document train and the rest validates, which for a single document is the classic split of tiny
    Shakespeare.

    A second call with the same sources and settings opens the folder that is there, and one with a
    part missing or of the wrong size is made again. Several processes may call at once: one works,
    the others wait.

    Args:
        source: what `gpt.data.corpora.find_corpus` takes.
        tokenizer: `bpe` (learned from the training split only), `bytes`, `chars` (every character
            of the corpus), or a ready Tokenizer.
        vocab_size: for `bpe`: ids wanted, end-of-text included.
        root: folder in which the prepared folder is made.
        val_fraction: share held out, between 0 and 1.
        progress: show a progress bar on stderr.
        shard_tokens: most ids in a shard. Does not change the data.

    Raises:
        DataError: no text, text that cannot be read, or a folder that cannot be written.
        TokenizerError: a vocabulary that is too small, or that cannot express the corpus.
        ConfigError: a setting out of range.
    """
    if not 0 < val_fraction < 1:
        raise ConfigError(f"val_fraction is {val_fraction}, but must be above 0 and below 1")
    if shard_tokens < 1:
        raise ConfigError(f"shard_tokens is {shard_tokens}, but must be at least 1")
    if (pattern, tuple(special_tokens), newlines, on_error) != ("gpt4", (), "keep", "stop"):
        raise ConfigError("pattern, special_tokens, newlines and on_error have one value so far")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers is {workers}, but must be at least 1")
    listed = [source] if isinstance(source, (str, os.PathLike, Source)) else source
    source = [one.source if isinstance(one, Source) else os.fspath(one) for one in listed]
    settings = _tokenizer_settings(tokenizer, vocab_size)
    corpus = find_corpus(source)
    identity = {
        "format": FORMAT,
        "sources": list(corpus.identities),
        "tokenizer": settings,
        "val_fraction": val_fraction,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    folder = Path(root).expanduser() / f"{corpus.name}-{key[:12]}"
    with contextlib.suppress(DataError):
        return PreparedData.open(folder)
    job = _Job(corpus, tokenizer, settings, val_fraction, shard_tokens, progress)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock")):
            with contextlib.suppress(DataError):
                return PreparedData.open(folder)  # another process made it while we waited
            # Whoever holds the lock is alone: what lies here is left from a run that was killed.
            temporary = folder.with_name(f".{folder.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                job.run(temporary, {**identity, "fingerprint": key})
                if find_corpus(source) != corpus:
                    raise DataError(
                        f"{corpus.looked_at} changed while it was being read; prepare it again"
                    )
                if folder.exists():  # damaged, or it would have been opened above
                    shutil.rmtree(folder)
                os.replace(temporary, folder)
                sync_folder(folder.parent)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        raise DataError(
            f"cannot write prepared data to {folder}: {error.strerror or error}; free some space, "
            "or choose a folder that can be written"
        ) from None
    return PreparedData.open(folder)


MAX_BPE_VOCAB = 1_000_000
"""Five times the largest vocabulary in use (o200k)."""


def _tokenizer_settings(tokenizer: str | Tokenizer, vocab_size: int) -> dict[str, Any]:
    """What identifies the tokenizer before the text has been read."""
    if isinstance(tokenizer, Tokenizer):
        return {"kind": tokenizer.kind, "given": tokenizer.fingerprint}
    if tokenizer not in KINDS:
        raise TokenizerError(
            f"the tokenizer {tokenizer!r} is unknown; there are {', '.join(KINDS)}"
        )
    if tokenizer != "bpe":
        return {"kind": tokenizer}
    if vocab_size < MIN_BPE_VOCAB:
        raise TokenizerError(
            f"vocab_size is {vocab_size}, but a bpe vocabulary needs at least {MIN_BPE_VOCAB} "
            "(256 bytes and end-of-text); give more, or use the tokenizer chars"
        )
    if vocab_size > MAX_BPE_VOCAB:
        raise TokenizerError(f"vocab_size is {vocab_size}, but may be at most {MAX_BPE_VOCAB}")
    return {"kind": "bpe", "vocab_size": vocab_size, "pattern": GPT4_PATTERN}


@dataclass(frozen=True)
class Part:
    """Characters `start` to `stop` of a document."""

    document: Document
    start: int
    stop: int

    def chunks(self) -> Iterator[str]:
        at = 0
        for chunk in self.document.chunks():
            wanted = chunk[max(self.start - at, 0) : self.stop - at]
            at += len(chunk)
            if wanted:
                yield wanted
            if at >= self.stop:
                return
        raise DataError(f"{self.document.name} became shorter while it was being read; try again")


@dataclass(frozen=True)
class _Job:
    corpus: Corpus
    tokenizer: str | Tokenizer
    settings: dict[str, Any]
    val_fraction: float
    shard_tokens: int
    progress: bool

    def run(self, folder: Path, identity: dict[str, Any]) -> None:
        """Write all of the prepared data into an empty folder."""
        documents = self.corpus.documents()
        counts, size, alphabet = self._count(documents)
        text = [(doc, n) for doc, n in zip(documents, counts, strict=True) if n]
        if not text:
            raise DataError(
                f"no text found: {len(documents)} documents in {self.corpus.looked_at}, all empty"
            )
        parts = split_documents(text, self.val_fraction)
        for split in SPLITS:
            if not parts[split]:
                raise DataError(
                    f"{self.corpus.looked_at} has {sum(counts)} characters in all, too few to "
                    "train on some and hold out others; give more text"
                )
        train_chars = sum(part.stop - part.start for part in parts["train"])
        tokenizer = self._make_tokenizer(
            parts["train"], alphabet, size * train_chars // sum(counts)
        )
        splits = {}
        with self._bar("tokenizing", size) as bar:
            for split in SPLITS:
                splits[split] = self._write(folder, split, parts[split], tokenizer, bar)
        tokenizer.save(folder / FILE_NAME)
        meta = {
            **identity,
            "tokenizer": {
                **self.settings,
                "n_vocab": tokenizer.n_vocab,
                "fingerprint": tokenizer.fingerprint,
            },
            "dtype": dtype_for(tokenizer.n_vocab),
            "empty_documents": len(documents) - len(text),
            "splits": splits,
        }
        write_atomically(folder / "meta.json", json.dumps(meta, indent=2).encode())
        sync_folder(folder)

    def _count(self, documents: list[Document]) -> tuple[list[int], int, set[str]]:
        """Characters in each document, bytes in all, and for `chars` the set of characters."""
        counts = []
        size = 0
        alphabet: set[str] = set()
        with self._bar("reading", sum(document.size for document in documents)) as bar:
            for document in documents:
                count = 0
                for chunk in document.chunks():
                    count += len(chunk)
                    size += (read := utf8_length(chunk))
                    if self.tokenizer == "chars":
                        alphabet.update(chunk)
                    bar.update(read)
                counts.append(count)
        return counts, size, alphabet

    def _make_tokenizer(self, train: list[Part], alphabet: set[str], size: int) -> Tokenizer:
        if isinstance(self.tokenizer, Tokenizer):
            return self.tokenizer
        if self.tokenizer == "bytes":
            return Tokenizer.bytes()
        if self.tokenizer == "chars":
            return Tokenizer.chars(alphabet)
        pattern = self.settings["pattern"]
        with self._bar("learning bpe", size) as bar:

            def texts() -> Iterator[str]:
                for part in train:
                    for segment in Splitter(pattern).segments(part.chunks()):
                        bar.update(utf8_length(segment))
                        yield segment

            return Tokenizer.bpe(texts(), self.settings["vocab_size"], pattern)

    def _write(
        self, folder: Path, split: str, parts: list[Part], tokenizer: Tokenizer, bar: tqdm[NoReturn]
    ) -> dict[str, Any]:
        """Write the shards of one split; returns its entry in `meta.json`."""
        writer = ShardWriter(folder, split, tokenizer.n_vocab, self.shard_tokens)
        size = 0

        def counted(chunks: Iterator[str]) -> Iterator[str]:
            nonlocal size
            for chunk in chunks:
                size += (read := utf8_length(chunk))
                bar.update(read)
                yield chunk

        with contextlib.closing(writer):
            for part in parts:
                try:
                    for ids in tokenizer.encode_stream(counted(part.chunks())):
                        writer.append(ids)
                except InexpressibleTextError as error:
                    where = InexpressibleTextError(
                        error.char, part.start + error.offset, tokenizer.kind
                    )
                    raise TokenizerError(f"{part.document.name}: {where}") from None
                writer.append([tokenizer.eot])
        return {
            "tokens": writer.tokens,
            "bytes": size,
            "chars": sum(part.stop - part.start for part in parts),
            "documents": len(parts),
            "max_id": writer.max_id,
            "shards": writer.shards,
        }

    def _bar(self, what: str, size: int) -> tqdm[NoReturn]:
        terminal = sys.stderr.isatty()
        if self.progress and not terminal:  # a bar redraws itself, which litters a log
            print(f"{what} {size / 1e6:,.1f} MB", file=sys.stderr, flush=True)
        return tqdm(
            total=size,
            desc=what,
            unit="B",
            unit_scale=True,
            leave=False,
            disable=not (self.progress and terminal),
        )


def split_documents(text: list[tuple[Document, int]], val_fraction: float) -> dict[str, list[Part]]:
    """Which characters of which documents train and which are held out.

    Args:
        text: the documents that are not empty, with their lengths in characters.
        val_fraction: share held out.
    """
    parts: dict[str, list[Part]] = {split: [] for split in SPLITS}
    if len(text) >= WHOLE_DOCUMENTS:
        held_out = min(max(round(len(text) * val_fraction), 1), len(text) - 1)
        # The middle of each of `held_out` equal stretches.
        chosen = {(2 * i + 1) * len(text) // (2 * held_out) for i in range(held_out)}
        for i, (document, count) in enumerate(text):
            parts["val" if i in chosen else "train"].append(Part(document, 0, count))
        return parts
    for document, count in text:
        cut = int(count * (1 - val_fraction))
        for split, start, stop in (("train", 0, cut), ("val", cut, count)):
            if start < stop:
                parts[split].append(Part(document, start, stop))
    return parts


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, a file that is gone afterwards.

    The system lets go of it when the process ends, however it ends.
    """
    while True:
        with open(path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            except FileNotFoundError:
                same = False
            if not same:
                continue  # its last holder has removed the file that we waited for
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
