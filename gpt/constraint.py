"""What a text must be: JSON under a schema, a match of an expression, a sentence of a grammar.

The `llguidance` library reads them and tells before each token which may come next; this is what it
needs to know of a vocabulary, and what it leaves open: its mask allows end-of-text where nothing
else can come, whether or not the text is complete, and a text would end early without a word.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from gpt.errors import SamplingError
from gpt.params import Constraint

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_TRIED = 2000
"""Tokens tried in looking for one text that a vocabulary without some bytes can complete."""


class Vocabulary(Protocol):
    """What of a tokenizer is needed here."""

    @property
    def n_vocab(self) -> int: ...
    @property
    def eot(self) -> int: ...
    @property
    def special(self) -> Any: ...

    def token_bytes(self, token: int, /) -> bytes: ...
    def encode(self, text: str, /) -> list[int]: ...


class Guide:
    """Where one text stands in its constraint.

    Attributes:
        complete: the text is one of those wanted, and nothing more may come.
    """

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab
        self.complete = False
        self._look()

    def copy(self) -> Guide:
        """One that goes on from here on its own."""
        return Guide(self._matcher.deep_copy(), self._n_vocab)

    def bitmask(self) -> np.ndarray:
        """(ceil(n_vocab / 32),) int32: which tokens may come next; the ends of a text among them
        where it may end. None at all in a dead end: the vocabulary lacks what would have to come.
        """
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        if self._matcher.is_error() or self._dead:
            return np.zeros_like(words)
        return words

    def allowed(self) -> list[int]:
        """The same as ids."""
        bits = np.unpackbits(self.bitmask().view(np.uint8), bitorder="little")[: self._n_vocab]
        return [int(token) for token in np.flatnonzero(bits)]

    @property
    def may_end(self) -> bool:
        """Whether the text is one of those wanted as it stands."""
        return bool(self._matcher.is_accepting())

    def push(self, token: int) -> None:
        """Take the token that was made; one that was not allowed leads to a dead end."""
        self._matcher.consume_token(token)
        self._look()

    def _look(self) -> None:
        over = self._matcher.is_stopped()
        if not over and not self._matcher.is_accepting():
            # Whether anything can follow is only found out in making the mask.
            self._matcher.compute_bitmask()
            over = self._matcher.is_stopped()
        self.complete = over and self.may_end and not self._matcher.is_error()
        self._dead = over and not self.complete


class ConstraintCompiler:
    """Reads constraints for one vocabulary. Takes up to a second to make; make it once.

    Args:
        ends: ids that end a text.
    """

    def __init__(self, vocabulary: Vocabulary, ends: Collection[int]) -> None:
        self._n_vocab = vocabulary.n_vocab
        known = _Known(vocabulary)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(known), vocabulary.n_vocab, eos_token=sorted(ends)
        )
        single = {piece[0] for piece in known.tokens if len(piece) == 1}
        self._every_byte = len(single) == 256
        self._alphabet = known.tokens

    def compile(self, constraint: Constraint) -> Guide:
        """The beginning of a text under this constraint.

        Raises:
            SamplingError: it cannot be understood, or no text of this vocabulary meets it.
        """
        grammar = _grammar(constraint)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise SamplingError([(constraint.kind, _reason(matcher.get_error()))])
        guide = Guide(matcher, self._n_vocab)
        if not self._every_byte and self._hopeless(guide, constraint):
            raise SamplingError(
                [(constraint.kind, "no text of this model's vocabulary can meet it; allow others")]
            )
        if not guide.may_end and not guide.allowed():
            raise SamplingError([(constraint.kind, "no text can meet it; allow others")])
        return guide

    def _hopeless(self, guide: Guide, constraint: Constraint) -> bool:
        """Whether it is certain that no text of the vocabulary meets the constraint. Where a search
        would not end, that stays open, and a text that runs into a dead end fails there."""
        if constraint.kind == "regex":
            # All texts of the vocabulary are a regular expression, too: what is in both?
            pieces = {piece.decode("utf-8", "replace") for piece in self._alphabet if piece}
            either = "|".join(_quoted(piece) for piece in sorted(pieces))
            body = constraint.text.replace("/", "\\/")
            grammar = f"start: WANTED\nWANTED: /{body}/ & /({either})*/"
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
            if not matcher.is_error():
                both = Guide(matcher, self._n_vocab)
                return not both.may_end and not both.allowed()
        if constraint.kind == "json_schema":
            # Between its parts any space may stand: what can be met can be met without.
            matcher = LLMatcher(self._tokenizer, _grammar(constraint, spaces=False), log_level=0)
            guide = Guide(matcher, self._n_vocab)
        stack, tried, order = [guide.copy()], 0, random.Random(0)
        while stack:
            here = stack.pop()
            if here.may_end:
                return False
            # In no order: any order can open brackets for ever.
            for token in order.sample(allowed := here.allowed(), len(allowed)):
                if (tried := tried + 1) > MAX_TRIED:
                    return False
                there = here.copy()
                there.push(token)
                stack.append(there)
        return True


class _Known:
    """A vocabulary as `llguidance.TokenizerWrapper` reads it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = vocabulary.eot
        self.bos_token_id = None
        self.special_token_ids = sorted(vocabulary.special.values())
        special = set(self.special_token_ids)
        self.tokens = [
            b"" if token in special else vocabulary.token_bytes(token)
            for token in range(vocabulary.n_vocab)
        ]

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that the library is sure must come; it only saves it steps."""
        try:
            return self._vocabulary.encode(text.decode())
        except Exception:  # noqa: BLE001 - an error here would poison the matcher
            return []


def _grammar(constraint: Constraint, *, spaces: bool = True) -> str:
    if constraint.kind == "regex":
        return str(LLMatcher.grammar_from_regex(constraint.text))
    if constraint.kind == "grammar":
        return str(LLMatcher.grammar_from_lark(constraint.text))
    try:
        # Read and written again, since the library puts the text as it is into JSON of its own.
        schema = json.dumps(json.loads(constraint.text))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise SamplingError([(constraint.kind, f"is not JSON: {reason}")]) from None
    overrides: JsonCompileOptions | None = None if spaces else {"whitespace_flexible": False}
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=overrides))


def _quoted(text: str) -> str:
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)


def _reason(message: str) -> str:
    """The library's message on one line, without the pictures that go with it."""
    lines = [line.strip() for line in message.splitlines()]
    lines = [line for line in lines if line and not set(line) <= {"^", "~", " ", "|"}]
    text = "; ".join(lines)
    return f"cannot be used: {text[:300]}" if text else "cannot be used"
