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

from gpt import learning, tokenizer_format
from gpt.codec import Codec
from gpt.errors import InexpressibleTextError, TokenizerError
from gpt.files import write_atomically
from gpt.learning import MIN_BPE_VOCAB
from gpt.rules import After, Rules
from gpt.specials import MAX_VOCAB, SpecialFinder, check_names, check_special
from gpt.splitting import CHAR_PATTERN, GPT4_PATTERN, Splitter, utf8
from gpt.tokenizer_format import END_OF_TEXT, Described

__all__ = ["FILE_NAME", "MIN_BPE_VOCAB", "Tokenizer", "check_special_tokens"]

FILE_NAME = "tokenizer.json"

Bytes: TypeAlias = bytes
"""In `Tokenizer` the plain name means the method."""


class Tokenizer:
    """A vocabulary and the split pattern that goes with it.

    Attributes:
        encoding: the tiktoken encoding that does the work. Its ids are ours unless `rules.order`
            says otherwise.
        kind: `bpe`, `bytes`, `chars`, or what else its maker called it.
        pattern: the regular expression that splits text before bytes are merged.
        special: ids of the special tokens by name, end-of-text among them, in order of the ids.
        end_of_text: the name of the one that ends a text.
        eot: its id.
        begin: the name of the one that every text of a document begins with, if any does.
        ends: names of further ones that end a text that a model makes.
        rules: what an imported vocabulary does otherwise.
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
        begin: str | None = None,
        ends: Sequence[str] = (),
        rules: Rules | None = None,
    ) -> None:
        """A tokenizer from its tokens; a token's id is its place, and without rules to the contrary
        that is its rank in merging.

        Args:
            tokens: bytes by id; empty ones are ids of special tokens, or of nothing.
            special: ids of the special tokens by name; None: end-of-text alone, after the others.
            end_of_text: the name of the one that ends a text.
            begin, ends: as the attributes; each is the name of a special token.
            rules: what an imported vocabulary does otherwise.

        Raises:
            TokenizerError: a repeated token, none at all, special tokens without a name, an id or a
                place of their own, or an unusable pattern.
        """
        if special is None:
            special = {end_of_text: len(tokens)}
        rules = rules or Rules()
        check_special(special, tokens, end_of_text)
        for name in (*([] if begin is None else [begin]), *ends, *rules.always):
            if name not in special:
                raise TokenizerError(f"the tokenizer names {name[:80]!r}, no special token of it")
        given = sum(map(bool, tokens))
        if not 0 < given <= len(tokens) <= MAX_VOCAB:
            raise TokenizerError(
                f"a {kind} vocabulary of {given} tokens is not usable: it needs 1 to {MAX_VOCAB}"
            )
        self.kind = kind
        self.pattern = pattern
        self.splitter = Splitter(pattern)
        self.special = dict(sorted(special.items(), key=lambda item: item[1]))
        self.end_of_text = end_of_text
        self.eot = special[end_of_text]
        self.begin = begin
        self.ends = tuple(ends)
        self.rules = rules
        self.n_vocab = max(1 + max(special.values()), len(_stripped(tokens)))
        self._tokens = _stripped(tokens)
        self._token_bytes = [*self._tokens, *[b""] * (self.n_vocab - len(self._tokens))]
        for name, token in special.items():
            if name != end_of_text:
                self._token_bytes[token] = name.encode()
        self._known_chars: set[str] = set()
        self.fingerprint = tokenizer_format.fingerprint(self._described)
        name = f"antiphon-{kind}-{self.fingerprint[:12]}"
        self._codec = Codec(name, pattern, self._tokens, self.special, rules)
        self.encoding = self._codec.encoding

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
        tokens = [utf8(char, 0) for char in characters]
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
        tokens, pattern = learning.learn(texts, vocab_size, pattern, special_tokens)
        return cls._made("bpe", pattern, tokens, special_tokens)

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
        special = self.special | {name: self.n_vocab + i for i, name in enumerate(new)}
        return Tokenizer._of(self._described._replace(special=special))

    @property
    def start(self) -> int:
        """The id that comes before the first token of a text: of `begin` if there is one, else of
        end-of-text, the border between documents."""
        return self.eot if self.begin is None else self.special[self.begin]

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a text: of end-of-text and of `ends`."""
        return frozenset([self.eot, *(self.special[name] for name in self.ends)])

    @property
    def missing_bytes(self) -> frozenset[int]:
        """Bytes that are no token of their own: text with one of them may be inexpressible."""
        return self._codec.missing

    @property
    def plain_tokens(self) -> Sequence[Bytes]:
        """Bytes by id of all that are no special tokens; empty where an id is none of them."""
        return self._tokens

    @property
    def ranks(self) -> Mapping[Bytes, int]:
        """What can come of merging, and what merges first; the lowest rank does."""
        return self._codec.ranks

    def prompt(self, text: str, special: bool | Collection[str] = False) -> list[int]:
        """The ids of a text that begins a document: those of `encode`, `begin` before them."""
        first = [] if self.begin is None else [self.special[self.begin]]
        return first + self.encode(text, special=special)

    def encode(
        self, text: str, special: bool | Collection[str] = False, *, after: After = ""
    ) -> list[int]:
        """The ids of `text`.

        Args:
            special: which special tokens' names in the text become those tokens. False: none, all
                is ordinary text; True: all but end-of-text; or the names themselves.
            after: what stands before the text; some imported vocabularies put a space before the
                first word.

        Raises:
            InexpressibleTextError: a character that the vocabulary has no tokens for.
            TokenizerError: half of a surrogate pair, which is no character; a name in `special`
                that no special token has.
        """
        return [token for ids in self.encode_stream([text], special, after=after) for token in ids]

    def encode_stream(
        self,
        chunks: Iterable[str],
        special: bool | Collection[str] = False,
        *,
        after: After = "",
    ) -> Iterator[list[int]]:
        """The ids of one text that comes in chunks, a list at a time.

        The ids do not depend on where the chunks end; joined they are `encode("".join(chunks))`.

        Args:
            special: as for `encode`. Text before and after a special token is encoded on its own.
            after: as for `encode`.

        Raises:
            InexpressibleTextError, TokenizerError: as `encode`; offsets count from the start.
        """
        names = self._names(special)
        if not names:
            yield from self._encode_ordinary(chunks, [0], after)
            return
        offset = [0]
        for named, parts in SpecialFinder(names).stretches(chunks):
            if named:
                for name in parts:
                    offset[0] += len(name)
                    yield [self.special[name]]
                after = "token"
            else:
                yield from self._encode_ordinary(parts, offset, after)

    def _names(self, special: bool | Collection[str]) -> Collection[str]:
        """Names that are looked for in a text."""
        if special is False:
            return self.rules.always
        if special is True:
            return [name for name in self.special if name != self.end_of_text]
        for name in special:
            if name not in self.special:
                raise TokenizerError(
                    f"{name!r} is no special token of the {self.kind} tokenizer; there are "
                    f"{', '.join([*self.special][:20])}"
                )
        return {*special, *self.rules.always}

    def _encode_ordinary(
        self, chunks: Iterable[str], offset: list[int], after: After
    ) -> Iterator[list[int]]:
        """The ids of a stretch of ordinary text; `offset[0]` moves on to its end."""
        for segment in self.splitter.segments(self.rules.prepared(chunks, after)):
            utf8(segment, offset[0])
            if self._codec.missing:
                self._check_expressible(segment, offset[0])
            yield self._codec.encode(segment)
            offset[0] += len(segment)

    def _check_expressible(self, segment: str, offset: int) -> None:
        """Raise InexpressibleTextError for what tiktoken would panic on: a piece in which a byte
        without a token of its own is left over after merging."""
        if self.splitter.by_character:
            new = set(segment) - self._known_chars
            bad = {char for char in new if self._codec.left_over(char.encode()) is not None}
            self._known_chars |= new - bad
            if bad:
                place = next(i for i, char in enumerate(segment) if char in bad)
                raise InexpressibleTextError(segment[place], offset + place, self.kind)
            return
        for piece in self.splitter.pieces(segment):
            data = piece.encode()
            if not self._codec.missing.isdisjoint(data):
                left = self._codec.left_over(data)
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

        A space that `encode` would put before the text is taken away again.

        Raises:
            TokenizerError: an unknown id.
        """
        text = self.decode_bytes(ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.rules.prefix else text

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
        made = cls._of(described)
        if made.fingerprint != fingerprint:
            raise TokenizerError(
                "the tokenizer does not match its fingerprint; it has been changed"
            )
        return made

    @classmethod
    def _of(cls, described: Described) -> Tokenizer:
        kind, pattern, tokens, special, end_of_text, begin, ends, rules = described
        return cls(
            kind, pattern, tokens, special=special, end_of_text=end_of_text, begin=begin, ends=ends,
            rules=rules,
        )  # fmt: skip

    @property
    def _described(self) -> Described:
        return Described(
            self.kind, self.pattern, self._tokens, self.special, self.end_of_text, self.begin,
            self.ends, self.rules,
        )  # fmt: skip

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


def _stripped(tokens: Sequence[bytes]) -> list[bytes]:
    """The tokens up to the last that stands for something."""
    size = next((i for i in range(len(tokens), 0, -1) if tokens[i - 1]), 0)
    return list(tokens[:size])
