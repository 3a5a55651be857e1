"""Tokenizer: text to ids and back, always through a `tiktoken.Encoding`.

Three kinds are made here: `bpe` (learned from a corpus), `bytes` and `chars`. Each has the token
`<|endoftext|>` as its last id. It stands between documents and never comes out of text: a user who
types it gets the tokens of those thirteen characters.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import rustbpe
import tiktoken

from gpt.errors import InexpressibleTextError, TokenizerError
from gpt.files import write_atomically
from gpt.splitting import CHAR_PATTERN, GPT4_PATTERN, Splitter

END_OF_TEXT = "<|endoftext|>"
MIN_BPE_VOCAB = 257
"""256 bytes and end-of-text."""

FILE_NAME = "tokenizer.json"
_FORMAT = 1

Bytes: TypeAlias = bytes
"""In `Tokenizer` the plain name means the method."""


class Tokenizer:
    """A vocabulary and the split pattern that goes with it.

    Attributes:
        encoding: the tiktoken encoding that does the work.
        kind: `bpe`, `bytes`, `chars`, or what else its maker called it.
        pattern: the regular expression that splits text before bytes are merged.
        n_vocab: number of ids, end-of-text included.
        eot: id of end-of-text, `n_vocab - 1`.
        fingerprint: SHA-256 (hex) of pattern, tokens and special tokens. Two tokenizers with the
            same fingerprint give the same ids.
    """

    def __init__(self, kind: str, pattern: str, tokens: Sequence[Bytes]) -> None:
        """A tokenizer from its tokens; a token's id, and its rank in merging, is its place.

        Raises:
            TokenizerError: an empty or repeated token, none at all, or an unusable pattern.
        """
        ranks = {token: rank for rank, token in enumerate(tokens)}
        if not ranks or b"" in ranks or len(ranks) != len(tokens):
            raise TokenizerError(
                f"a {kind} vocabulary of {len(tokens)} tokens is not usable: it needs at least "
                "one, and each must be different and not empty"
            )
        self.kind = kind
        self.pattern = pattern
        self.splitter = Splitter(pattern)
        self.eot = len(tokens)
        self.n_vocab = len(tokens) + 1
        self._ranks = ranks
        self._token_bytes = [*tokens, b""]
        self._missing = frozenset(b for b in range(256) if bytes([b]) not in ranks)
        self._known_chars: set[str] = set()
        self.fingerprint = _fingerprint(pattern, tokens)
        try:
            self.encoding = tiktoken.Encoding(
                f"antiphon-{kind}-{self.fingerprint[:12]}",
                pat_str=pattern,
                mergeable_ranks=ranks,
                special_tokens={END_OF_TEXT: self.eot},
            )
        except ValueError as error:
            raise TokenizerError(f"the split pattern {pattern!r} is not valid: {error}") from None

    @classmethod
    def bytes(cls) -> Tokenizer:
        """One token per UTF-8 byte; expresses any text."""
        return cls("bytes", CHAR_PATTERN, [bytes([b]) for b in range(256)])

    @classmethod
    def chars(cls, alphabet: Iterable[str]) -> Tokenizer:
        """One token per character of `alphabet`, in the order of their code points.

        Raises:
            TokenizerError: an empty alphabet, or half of a surrogate pair in it.
        """
        characters = sorted({char for text in alphabet for char in text})
        if not characters:
            raise TokenizerError(
                "a chars tokenizer needs at least one character; the text is empty"
            )
        return cls("chars", CHAR_PATTERN, [_utf8(char, 0) for char in characters])

    @classmethod
    def bpe(cls, texts: Iterable[str], vocab_size: int, pattern: str = GPT4_PATTERN) -> Tokenizer:
        """Byte-pair encoding learned from `texts`, which are read once as a stream.

        It can express any text. Text with too few repetitions for `vocab_size` gives a smaller
        vocabulary: look at `n_vocab`. The result depends on the texts alone.

        Args:
            texts: the training text in pieces of any size; a piece ends where a word ends.
            vocab_size: ids wanted, the 256 bytes and end-of-text included.
            pattern: how text is split before merging.

        Raises:
            TokenizerError: vocab_size below 257, an unusable pattern, or broken text.
        """
        if vocab_size < MIN_BPE_VOCAB:
            raise TokenizerError(
                f"vocab_size is {vocab_size}, but a bpe vocabulary needs at least {MIN_BPE_VOCAB} "
                "(256 bytes and end-of-text); give more, or use --tokenizer chars"
            )
        splitter = Splitter(pattern)
        learner = rustbpe.Tokenizer()
        # rustbpe collects buffer_size texts before it counts them; ours are large.
        segments = (segment for text in texts for segment in _checked(splitter.segments([text])))
        try:
            learner.train_from_iterator(segments, vocab_size - 1, buffer_size=16, pattern=pattern)
        except BaseException as error:  # noqa: BLE001 (Rust panics are no Exceptions)
            raise _unless_panic(error, "no vocabulary can be learned from this text") from None
        ranks = sorted(learner.get_mergeable_ranks(), key=lambda pair: pair[1])
        return cls("bpe", pattern, [bytes(token) for token, _ in ranks])

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, all of it taken as ordinary text.

        Raises:
            InexpressibleTextError: a character that the vocabulary has no tokens for.
            TokenizerError: half of a surrogate pair, which is no character.
        """
        return [token for ids in self.encode_stream([text]) for token in ids]

    def encode_stream(self, chunks: Iterable[str]) -> Iterator[list[int]]:
        """The ids of one text that comes in chunks, a list at a time.

        The ids do not depend on where the chunks end; joined they are `encode("".join(chunks))`.

        Raises:
            InexpressibleTextError, TokenizerError: as `encode`; offsets count from the start.
        """
        offset = 0
        for segment in self.splitter.segments(chunks):
            _utf8(segment, offset)
            if self._missing:
                self._check_expressible(segment, offset)
            yield self._encode_segment(segment)
            offset += len(segment)

    def _encode_segment(self, segment: str) -> list[int]:
        try:
            return self.encoding.encode_ordinary(segment)
        except BaseException as error:  # noqa: BLE001 (Rust panics are no Exceptions)
            raise _unless_panic(error, "this text cannot be tokenized") from None

    def _check_expressible(self, segment: str, offset: int) -> None:
        """Raise InexpressibleTextError for what tiktoken would panic on: a piece in which a byte
        without a token of its own is left over after merging."""
        if self.splitter.by_character:
            new = set(segment) - self._known_chars
            bad = {char for char in new if self._leftover(char.encode()) is not None}
            self._known_chars |= new - bad
            if bad:
                place = next(i for i, char in enumerate(segment) if char in bad)
                raise InexpressibleTextError(segment[place], offset + place, self.kind)
            return
        for piece in self.splitter.pieces(segment):
            data = piece.encode()
            if not self._missing.isdisjoint(data) and (left := self._leftover(data)) is not None:
                # The byte may be one of several in its character: count the whole ones before it.
                place = len(data[:left].decode(errors="ignore"))
                raise InexpressibleTextError(piece[place], offset + place, self.kind)
            offset += len(piece)

    def _leftover(self, piece: Bytes) -> int | None:
        """Index of the first byte that merging leaves without a token, or None.

        The merges of tiktoken: of all neighbours whose union is a token, the lowest rank first, the
        leftmost of equals.
        """
        if piece in self._ranks:
            return None
        end = list(range(1, len(piece) + 1))  # end[i]: where the part that starts at i ends
        prev = list(range(-1, len(piece) - 1))  # prev[i]: where the part before it starts
        heap: list[tuple[int, int, int]] = []

        def offer(start: int) -> None:
            middle = end[start]
            if middle < len(piece):
                rank = self._ranks.get(piece[start : end[middle]])
                if rank is not None:
                    heapq.heappush(heap, (rank, start, end[middle]))

        for start in range(len(piece)):
            offer(start)
        gone = bytearray(len(piece))
        while heap:
            _, start, stop = heapq.heappop(heap)
            middle = end[start]
            if gone[start] or middle >= len(piece) or end[middle] != stop:
                continue  # one of the two has been merged otherwise since
            gone[middle] = 1
            end[start] = stop
            if stop < len(piece):
                prev[stop] = start
            offer(start)
            if prev[start] >= 0:
                offer(prev[start])
        start = 0
        while start < len(piece):
            if piece[start : end[start]] not in self._ranks:
                return start
            start = end[start]
        return None

    def token_bytes(self, token: int) -> Bytes:
        """The bytes of one token, none for end-of-text. Raises TokenizerError for an unknown id."""
        if not 0 <= token < self.n_vocab:
            raise TokenizerError(
                f"token id {token} is outside the {self.kind} vocabulary (0 to {self.n_vocab - 1})"
            )
        return self._token_bytes[token]

    def decode_bytes(self, ids: Iterable[int]) -> Bytes:
        """The bytes of all tokens. Raises TokenizerError for an unknown id."""
        return b"".join(self.token_bytes(token) for token in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of all tokens; bytes that form no character become U+FFFD.

        Raises:
            TokenizerError: an unknown id.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def to_dict(self) -> dict[str, Any]:
        """All of the tokenizer as plain data that JSON can hold."""
        return {
            "format": _FORMAT,
            "kind": self.kind,
            "pattern": self.pattern,
            "end_of_text": END_OF_TEXT,
            "tokens": [base64.b64encode(t).decode("ascii") for t in self._token_bytes[: self.eot]],
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def from_dict(cls, values: Any) -> Tokenizer:
        """The inverse of `to_dict`.

        Raises:
            TokenizerError: not made by `to_dict`, of a later format, or changed since.
        """
        if not isinstance(values, dict):
            raise TokenizerError(f"a tokenizer is an object of fields, not {type(values).__name__}")
        if values.get("format") != _FORMAT:
            raise TokenizerError(
                f"its format is {values.get('format')!r}, but this version reads {_FORMAT}"
            )
        kind, pattern, tokens = (values.get(name) for name in ("kind", "pattern", "tokens"))
        if not (isinstance(kind, str) and isinstance(pattern, str) and isinstance(tokens, list)):
            raise TokenizerError("a tokenizer needs the fields kind, pattern and tokens")
        if not (kind.isprintable() and 0 < len(kind) <= 40):
            raise TokenizerError(f"the tokenizer's kind is no name: {kind[:40]!r}")
        if values.get("end_of_text") != END_OF_TEXT:
            raise TokenizerError(f"the end-of-text token must be {END_OF_TEXT!r}")
        try:
            decoded = [base64.b64decode(token, validate=True) for token in tokens]
        except (binascii.Error, TypeError, ValueError):
            raise TokenizerError("the tokenizer has a token that is not base64") from None
        if values.get("fingerprint") != _fingerprint(pattern, decoded):
            raise TokenizerError(
                "the tokenizer does not match its fingerprint; it has been changed"
            )
        return cls(kind, pattern, decoded)

    def save(self, path: str | Path) -> None:
        """Write one JSON file, whole or not at all. Raises TokenizerError if that fails."""
        try:
            write_atomically(Path(path), json.dumps(self.to_dict(), indent=0).encode("ascii"))
        except OSError as error:
            raise TokenizerError(f"cannot write {path}: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read what `save` wrote. Raises TokenizerError that names the file."""
        try:
            values = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise TokenizerError(f"cannot read the tokenizer {path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise TokenizerError(f"the tokenizer {path} is damaged: it is not JSON") from None
        try:
            return cls.from_dict(values)
        except TokenizerError as error:
            raise TokenizerError(f"the tokenizer {path} is damaged: {error}") from None

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.n_vocab} ids, {self.fingerprint[:12]})"


def _fingerprint(pattern: str, tokens: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    # Lengths go first, so that no two vocabularies spell the same bytes.
    for part in (pattern.encode("utf-8", "surrogatepass"), *tokens, END_OF_TEXT.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _unless_panic(error: BaseException, message: str) -> BaseException:
    """`error` itself, or a TokenizerError if it is a panic of the Rust code.

    A panic is no `Exception`: left alone it would end a worker thread without a word. What is known
    to cause one is dealt with before the call; this is the net under it.
    """
    if type(error).__name__ != "PanicException":
        return error
    return TokenizerError(f"{message}: {error}")


def _utf8(text: str, offset: int) -> bytes:
    """UTF-8 of `text`. Raises TokenizerError, where tiktoken would put U+FFFD and say nothing."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text holds half of a surrogate pair (U+{ord(text[error.start]):04X}) at offset "
            f"{offset + error.start}, which is no character; decode the text as UTF-8 first"
        ) from None


def _checked(segments: Iterable[str]) -> Iterator[str]:
    offset = 0
    for segment in segments:
        _utf8(segment, offset)
        offset += len(segment)
        yield segment
