"""Tokenizer: text to ids and back, always through a `tiktoken.Encoding`.

Three kinds are made here: `bpe` (learned from a corpus), `bytes` and `chars`; `gpt.encodings` has
ready ones. Each has special tokens, ids that come out of no ordinary text: end-of-text, which
stands between documents, and what others its maker named. A user who types such a name gets the
tokens of its characters, unless the caller asks otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import rustbpe
import tiktoken

from gpt import tokenizer_format
from gpt.errors import InexpressibleTextError, TokenizerError
from gpt.files import write_atomically
from gpt.merging import leftover
from gpt.specials import MAX_VOCAB, SpecialFinder, check_names, check_special
from gpt.splitting import CHAR_PATTERN, GPT4_PATTERN, Splitter, split_pattern
from gpt.tokenizer_format import END_OF_TEXT, Described

MIN_BPE_VOCAB = 257
"""256 bytes and end-of-text."""

FILE_NAME = "tokenizer.json"

Bytes: TypeAlias = bytes
"""In `Tokenizer` the plain name means the method."""


class Tokenizer:
    """A vocabulary and the split pattern that goes with it.

    Attributes:
        encoding: the tiktoken encoding that does the work.
        kind: `bpe`, `bytes`, `chars`, or what else its maker called it.
        pattern: the regular expression that splits text before bytes are merged.
        special: ids of the special tokens by name, end-of-text among them, in order of the ids.
        end_of_text: the name of the one that ends a text.
        eot: its id.
        n_vocab: one more than the largest id. Some ids below it may stand for nothing.
        fingerprint: SHA-256 (hex) of pattern, tokens and special tokens. Two tokenizers with the
            same fingerprint give the same ids.
    """

    def __init__(
        self,
        kind: str,
        pattern: str,
        tokens: Sequence[Bytes],
        *,
        special: Mapping[str, int] | None = None,
        end_of_text: str = END_OF_TEXT,
    ) -> None:
        """A tokenizer from its tokens; a token's id, and its rank in merging, is its place.

        Args:
            tokens: bytes by id; empty ones are ids of special tokens, or of nothing.
            special: ids of the special tokens by name; None: end-of-text alone, after the others.
            end_of_text: the name of the one that ends a text.

        Raises:
            TokenizerError: a repeated token, none at all, special tokens without a name, an id or a
                place of their own, or an unusable pattern.
        """
        ranks = {token: rank for rank, token in enumerate(tokens) if token}
        if special is None:
            special = {end_of_text: len(tokens)}
        check_special(special, tokens, end_of_text)
        given = sum(map(bool, tokens))
        if not ranks or len(ranks) != given or len(tokens) > MAX_VOCAB:
            raise TokenizerError(
                f"a {kind} vocabulary of {given} tokens is not usable: it needs 1 to {MAX_VOCAB}, "
                "and each must be different"
            )
        self.kind = kind
        self.pattern = pattern
        self.splitter = Splitter(pattern)
        self.special = dict(sorted(special.items(), key=lambda item: item[1]))
        self.end_of_text = end_of_text
        self.eot = special[end_of_text]
        self.n_vocab = 1 + max(*ranks.values(), *special.values())
        self._ranks = ranks
        self._token_bytes = [*tokens, *[b""] * (self.n_vocab - len(tokens))][: self.n_vocab]
        for name, token in special.items():
            if name != end_of_text:
                self._token_bytes[token] = name.encode()
        self._missing = frozenset(b for b in range(256) if bytes([b]) not in ranks)
        self._known_chars: set[str] = set()
        self.fingerprint = tokenizer_format.fingerprint(self._described)
        try:
            self.encoding = tiktoken.Encoding(
                f"antiphon-{kind}-{self.fingerprint[:12]}",
                pat_str=pattern,
                mergeable_ranks=ranks,
                special_tokens=self.special,
            )
        except ValueError as error:
            raise TokenizerError(f"the split pattern {pattern!r} is not valid: {error}") from None

    @classmethod
    def bytes(cls, special_tokens: Sequence[str] = ()) -> Tokenizer:
        """One token per UTF-8 byte; expresses any text.

        Raises:
            TokenizerError: special tokens as for `bpe`.
        """
        return cls._made("bytes", CHAR_PATTERN, [bytes([b]) for b in range(256)], special_tokens)

    @classmethod
    def chars(cls, alphabet: Iterable[str], special_tokens: Sequence[str] = ()) -> Tokenizer:
        """One token per character of `alphabet`, in the order of their code points.

        Raises:
            TokenizerError: an empty alphabet, half of a surrogate pair in it, or special tokens as
                for `bpe`.
        """
        characters = sorted({char for text in alphabet for char in text})
        if not characters:
            raise TokenizerError(
                "a chars tokenizer needs at least one character; the text is empty"
            )
        tokens = [_utf8(char, 0) for char in characters]
        return cls._made("chars", CHAR_PATTERN, tokens, special_tokens)

    @classmethod
    def bpe(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        pattern: str = GPT4_PATTERN,
        special_tokens: Sequence[str] = (),
    ) -> Tokenizer:
        """Byte-pair encoding learned from `texts`, which are read once as a stream.

        It can express any text. Text with too few repetitions for `vocab_size` gives a smaller
        vocabulary: look at `n_vocab`. The result depends on the texts alone.

        Args:
            texts: the training text in pieces of any size; a piece ends where a word ends.
            vocab_size: ids wanted; the 256 bytes, special tokens and end-of-text included.
            pattern: how text is split before merging: a name in `gpt.splitting.PATTERNS`, or a
                regular expression.
            special_tokens: names that get an id each, after the merges and before end-of-text.
                Nothing is learned from them where they stand in the text.

        Raises:
            TokenizerError: vocab_size too small, an unusable pattern, broken text, or special
                tokens that are empty, repeated or end-of-text.
        """
        check_special_tokens(special_tokens)
        least = MIN_BPE_VOCAB + len(special_tokens)
        if vocab_size < least:
            named = f", {len(special_tokens)} special tokens" if special_tokens else ""
            raise TokenizerError(
                f"vocab_size is {vocab_size}, but a bpe vocabulary needs at least {least} "
                f"(256 bytes{named} and end-of-text); give more, or use --tokenizer chars"
            )
        pattern = split_pattern(pattern)
        splitter = Splitter(pattern)
        learner = rustbpe.Tokenizer()
        if special_tokens:
            texts = _ordinary(texts, SpecialFinder(special_tokens))
        # rustbpe collects buffer_size texts before it counts them; ours are large.
        segments = (segment for text in texts for segment in _checked(splitter.segments([text])))
        size = vocab_size - 1 - len(special_tokens)
        try:
            learner.train_from_iterator(segments, size, buffer_size=16, pattern=pattern)
        except BaseException as error:  # noqa: BLE001 (Rust panics are no Exceptions)
            raise _unless_panic(error, "no vocabulary can be learned from this text") from None
        ranks = sorted(learner.get_mergeable_ranks(), key=lambda pair: pair[1])
        return cls._made("bpe", pattern, [bytes(token) for token, _ in ranks], special_tokens)

    @classmethod
    def _made(
        cls, kind: str, pattern: str, tokens: list[Bytes], special_tokens: Sequence[str]
    ) -> Tokenizer:
        check_special_tokens(special_tokens)
        names = [*special_tokens, END_OF_TEXT]
        return cls(
            kind, pattern, tokens, special={name: len(tokens) + i for i, name in enumerate(names)}
        )

    def with_special_tokens(self, names: Sequence[str]) -> Tokenizer:
        """This tokenizer with more special tokens: new names get ids from `n_vocab` up.

        Raises:
            TokenizerError: names that are empty, repeated or end-of-text.
        """
        check_special_tokens(names, self.end_of_text)
        new = [name for name in names if name not in self.special]
        if not new:
            return self
        tokens = self._described.tokens
        special = self.special | {name: self.n_vocab + i for i, name in enumerate(new)}
        return Tokenizer(
            self.kind, self.pattern, tokens, special=special, end_of_text=self.end_of_text
        )

    def encode(self, text: str, special: bool | Collection[str] = False) -> list[int]:
        """The ids of `text`.

        Args:
            special: which special tokens' names in the text become those tokens. False: none, all
                is ordinary text; True: all but end-of-text; or the names themselves.

        Raises:
            InexpressibleTextError: a character that the vocabulary has no tokens for.
            TokenizerError: half of a surrogate pair, which is no character; a name in `special`
                that no special token has.
        """
        return [token for ids in self.encode_stream([text], special) for token in ids]

    def encode_stream(
        self, chunks: Iterable[str], special: bool | Collection[str] = False
    ) -> Iterator[list[int]]:
        """The ids of one text that comes in chunks, a list at a time.

        The ids do not depend on where the chunks end; joined they are `encode("".join(chunks))`.

        Args:
            special: as for `encode`. Text before and after a special token is encoded on its own.

        Raises:
            InexpressibleTextError, TokenizerError: as `encode`; offsets count from the start.
        """
        names = self._names(special)
        if not names:
            yield from self._encode_ordinary(chunks, [0])
            return
        offset = [0]
        for named, parts in SpecialFinder(names).stretches(chunks):
            if named:
                for name in parts:
                    offset[0] += len(name)
                    yield [self.special[name]]
            else:
                yield from self._encode_ordinary(parts, offset)

    def _names(self, special: bool | Collection[str]) -> Collection[str]:
        if isinstance(special, bool):
            return [name for name in self.special if name != self.end_of_text] if special else []
        for name in special:
            if name not in self.special:
                raise TokenizerError(
                    f"{name!r} is no special token of the {self.kind} tokenizer; there are "
                    f"{', '.join([*self.special][:20])}"
                )
        return special

    def _encode_ordinary(self, chunks: Iterable[str], offset: list[int]) -> Iterator[list[int]]:
        """The ids of a stretch of ordinary text; `offset[0]` moves on to its end."""
        for segment in self.splitter.segments(chunks):
            _utf8(segment, offset[0])
            if self._missing:
                self._check_expressible(segment, offset[0])
            yield self._encode_segment(segment)
            offset[0] += len(segment)

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
            bad = {char for char in new if leftover(char.encode(), self._ranks) is not None}
            self._known_chars |= new - bad
            if bad:
                place = next(i for i, char in enumerate(segment) if char in bad)
                raise InexpressibleTextError(segment[place], offset + place, self.kind)
            return
        for piece in self.splitter.pieces(segment):
            data = piece.encode()
            if not self._missing.isdisjoint(data):
                left = leftover(data, self._ranks)
                if left is not None:
                    # Perhaps one byte of several in its character: count the whole ones before it.
                    place = len(data[:left].decode(errors="ignore"))
                    raise InexpressibleTextError(piece[place], offset + place, self.kind)
            offset += len(piece)

    def token_bytes(self, token: int) -> Bytes:
        """The bytes of one token; a special one has those of its name.

        End-of-text has none, nor has an id below `n_vocab` that stands for nothing.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """
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
        return tokenizer_format.to_dict(self._described, self.fingerprint)

    @classmethod
    def from_dict(cls, values: Any) -> Tokenizer:
        """The inverse of `to_dict`; reads what earlier versions wrote, too.

        Raises:
            TokenizerError: not made by `to_dict`, of a later format, or changed since.
        """
        described, fingerprint = tokenizer_format.from_dict(values)
        kind, pattern, tokens, special, end_of_text = described
        made = cls(kind, pattern, tokens, special=special, end_of_text=end_of_text)
        if made.fingerprint != fingerprint:
            raise TokenizerError(
                "the tokenizer does not match its fingerprint; it has been changed"
            )
        return made

    @property
    def _described(self) -> Described:
        tokens = [b""] * (1 + max(self._ranks.values()))
        for token, rank in self._ranks.items():
            tokens[rank] = token
        return Described(self.kind, self.pattern, tokens, self.special, self.end_of_text)

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


def check_special_tokens(names: Sequence[str], end_of_text: str = END_OF_TEXT) -> None:
    """Raises TokenizerError for names that a vocabulary cannot be given beside end-of-text."""
    if isinstance(names, str):
        raise TokenizerError(f"special_tokens is the text {names[:40]!r}; give a list of names")
    check_names(names)
    if end_of_text in names:
        raise TokenizerError(
            f"{end_of_text} cannot be named as a special token: every vocabulary has it, and where "
            "it stands in a text it is ordinary text"
        )


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


def _ordinary(texts: Iterable[str], finder: SpecialFinder) -> Iterator[str]:
    """The texts without the special tokens in them, a stretch at a time."""
    for text in texts:
        for named, parts in finder.stretches([text]):
            if not named:
                yield "".join(parts)
