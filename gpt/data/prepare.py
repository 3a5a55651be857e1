"""prepare(): a corpus becomes a folder of token shards, once.

The text is streamed, however much there is (`gpt.data.passes` states the memory it takes).
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
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from gpt.data.decoding import Newlines, OnError
from gpt.data.passes import Job, Vocabulary, all_cores
from gpt.data.shards import FORMAT, PreparedData
from gpt.data.sources import Source, SourceLike, as_sources, find_corpora, joint_name, passed_over
from gpt.errors import ConfigError, DataError, TokenizerError
from gpt.files import sync_folder
from gpt.splitting import Splitter, split_pattern
from gpt.tokenizer import MIN_BPE_VOCAB, Tokenizer, check_special_tokens

SHARD_TOKENS = 1 << 26

MAX_BPE_VOCAB = 1_000_000
"""Five times the largest vocabulary in use (o200k)."""


def prepare(
    source: SourceLike | Sequence[SourceLike],
    *,
    tokenizer: str | Tokenizer = "bpe",
    vocab_size: int = 2048,
    pattern: str = "gpt4",
    special_tokens: Sequence[str] = (),
    root: str | Path = "data",
    val_fraction: float = 0.1,
    newlines: Newlines = "keep",
    on_error: OnError = "stop",
    workers: int | None = None,
    progress: bool = True,
    shard_tokens: int = SHARD_TOKENS,
) -> PreparedData:
    """The corpus as token shards, made now or found ready.

    Each source is split by itself, as a function of its text alone. With at least 20 documents
    whole ones are held out, evenly spread; otherwise the first `int(characters * (1 -
    val_fraction))` characters of each document train and the rest validates, which for a single
    document is the classic split of tiny Shakespeare. A `.txt` or `.md` file is a document, and so
    is a row of a file that has rows.

    A second call with the same sources and settings opens the folder that is there, and one with a
    part missing or of the wrong size is made again. Several processes may call at once: one works,
    the others wait.

    Args:
        source: one or more of what `gpt.data.sources.Source` describes; their text lies in the
            shards in this order.
        tokenizer: `bpe` (learned from the training split only), `bytes`, `chars` (every character
            of the corpus), what else `gpt.encodings.named_tokenizer` knows (`gpt2`, `cl100k_base`,
            `o200k_base`, or the path of a tokenizer), or a ready Tokenizer.
        vocab_size: for `bpe`: ids wanted, end-of-text included.
        pattern: for `bpe`: how text is split before merging, `gpt2`, `gpt4`, `o200k` or a regular
            expression.
        special_tokens: names that become one token each where they stand in the text. Without
            them all text is ordinary; end-of-text always is.
        root: folder in which the prepared folder is made.
        val_fraction: share held out, between 0 and 1.
        newlines: `keep` line ends as they are, or turn CRLF and CR into `lf`.
        on_error: what to do about bytes that are not UTF-8: `stop` with an error that says where,
            `skip` them, or `replace` them with U+FFFD. Rows that cannot be read at all (not JSON,
            no text) are left out by both. What was left out is counted in `meta.json`.
        workers: most processes that tokenize; None: one per core. Does not change the data.
        progress: say on stderr how far it is: a bar on a terminal, otherwise a line now and then.
        shard_tokens: most ids in a shard. Does not change the data.

    Raises:
        DataError: no text, text that cannot be read, or a folder that cannot be written.
        TokenizerError: a tokenizer that cannot be had, or that cannot express the corpus.
        ConfigError: a setting out of range.
    """
    if not 0 < val_fraction < 1:
        raise ConfigError(f"val_fraction is {val_fraction}, but must be above 0 and below 1")
    for name, value in (("shard_tokens", shard_tokens), ("workers", workers)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, but must be at least 1")
    for name, word, allowed in (("newlines", newlines, Newlines), ("on_error", on_error, OnError)):
        if word not in get_args(allowed):
            raise ConfigError(f"{name} is {word!r}, but must be {' or '.join(get_args(allowed))}")
    vocabulary = _vocabulary(tokenizer, vocab_size, pattern, special_tokens)
    sources = as_sources(source)
    corpora = find_corpora(sources)
    identity = {
        "format": FORMAT,
        "sources": [corpus.identity for corpus in corpora],
        "tokenizer": _identity(vocabulary),
        "val_fraction": val_fraction,
        "newlines": newlines,
        "on_error": on_error,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    folder = _root(root) / f"{joint_name(corpora)}-{key[:12]}"
    with contextlib.suppress(DataError):
        return _open(folder, sources)
    job = Job(
        corpora, vocabulary, val_fraction, newlines, on_error,
        workers or all_cores(), shard_tokens, progress,
    )  # fmt: skip
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock")):
            with contextlib.suppress(DataError):
                return _open(folder, sources)  # another process made it while we waited
            # Whoever holds the lock is alone: what lies here is left from a run that was killed.
            temporary = folder.with_name(f".{folder.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            if progress:
                _tell_of_other_files(sources)
            try:
                job.run(temporary, {**identity, "fingerprint": key})
                for before, now in zip(corpora, find_corpora(sources), strict=True):
                    if now.identity != before.identity:
                        raise DataError(
                            f"{now.source.source} changed while it was being read; prepare it again"
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
    return _open(folder, sources)


def _tell_of_other_files(sources: Sequence[Source]) -> None:
    """A folder may hold more than what can be read; what is left out should be no surprise."""
    others = passed_over(sources)
    if others:
        shown = ", ".join(others[:5])
        more = f" and {len(others) - 5:,} more" if len(others) > 5 else ""
        verb = "is" if len(others) == 1 else "are"
        print(f"left out, since the kind {verb} not known: {shown}{more}", file=sys.stderr)


def _root(given: str | Path) -> Path:
    """Raises DataError for what can be no folder."""
    if "\0" in str(given):
        raise DataError(f"root is {str(given)!r}, but a name cannot have a NUL in it; leave it out")
    root = Path(given).expanduser()
    for path in (root, *root.parents):
        if os.path.lexists(path):
            if not path.is_dir():
                raise DataError(
                    f"cannot write prepared data to {root}: {path} is no folder; choose another "
                    "root"
                )
            break
    return root


def _open(folder: Path, sources: Sequence[Source]) -> PreparedData:
    """The folder, with names and weights as given now: they are not part of its identity."""
    data = PreparedData.open(folder)
    spans = [
        replace(span, name=source.source, weight=source.weight)
        for span, source in zip(data.sources, sources, strict=True)
    ]
    return replace(data, sources=spans)


def _vocabulary(
    tokenizer: str | Tokenizer, vocab_size: int, pattern: str, special_tokens: Sequence[str]
) -> Vocabulary:
    """The settings once they are checked, and the tokenizer if there is a ready one."""
    check_special_tokens(special_tokens)
    names = tuple(special_tokens)
    if tokenizer == "bpe":
        least = MIN_BPE_VOCAB + len(names)
        if vocab_size < least:
            raise TokenizerError(
                f"vocab_size is {vocab_size}, but a bpe vocabulary needs at least {least} (256 "
                "bytes, special tokens and end-of-text); give more, or use the tokenizer chars"
            )
        if vocab_size > MAX_BPE_VOCAB:
            raise TokenizerError(f"vocab_size is {vocab_size}, but may be at most {MAX_BPE_VOCAB}")
        pattern = split_pattern(pattern)
        Splitter(pattern)  # says what is wrong with it, before the text is read
    elif tokenizer == "bytes":
        tokenizer = Tokenizer.bytes(names)
    elif tokenizer != "chars":
        if isinstance(tokenizer, str):
            from gpt.encodings import named_tokenizer

            try:
                tokenizer = named_tokenizer(tokenizer)
            except TokenizerError as error:
                raise TokenizerError(f"{error}; or bpe or chars, learned from the text") from None
        tokenizer = tokenizer.with_special_tokens(names)
    return Vocabulary(tokenizer, vocab_size, pattern, names)


def _identity(vocabulary: Vocabulary) -> dict[str, Any]:
    """What identifies the tokenizer before the text has been read."""
    identity: dict[str, Any]
    if isinstance(vocabulary.tokenizer, Tokenizer):
        identity = {
            "kind": vocabulary.tokenizer.kind,
            "given": vocabulary.tokenizer.fingerprint,
        }
    else:
        identity = {"kind": vocabulary.tokenizer}
        if vocabulary.tokenizer == "bpe":
            identity |= {"vocab_size": vocabulary.vocab_size, "pattern": vocabulary.pattern}
    if vocabulary.special_tokens:
        identity["special_tokens"] = list(vocabulary.special_tokens)
    return identity


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
