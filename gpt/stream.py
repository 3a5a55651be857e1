"""Ids to text as it comes. Used by the local sampler and the server alike; pure Python.

Two things must be held back until more is known: bytes that do not yet make a character, and text
that may turn out to be the beginning of a stop string. Nothing else is: every other character is
handed on with the token that completes it.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection
from collections.abc import Sequence as Seq
from enum import Enum
from typing import Protocol


class FinishReason(str, Enum):
    """Why a text ended."""

    STOP = "stop"
    """One of the request's stop strings or stop tokens came; the text ends before it."""
    END_OF_TEXT = "end_of_text"
    """The model made a token that ends a text."""
    LENGTH = "length"
    """max_tokens was reached, or the context is full."""
    COMPLETE = "complete"
    """The constraint on the text allows nothing more."""
    TIME_LIMIT = "time_limit"
    """The time that the request gave is over."""


class Vocabulary(Protocol):
    """What of a tokenizer is needed here."""

    @property
    def end_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token: int, /) -> bytes: ...


class TextStream:
    """The text of one sequence.

    The result does not depend on how the text is cut into tokens. Of several stop strings the one
    that is *completed* first wins, and of those completed by the same character the longest.

    Args:
        ends: tokens that end the text; None: those that end any text of the vocabulary.
        stop_tokens: more of them, which the request named.
        min_tokens: a stop string completed before so many tokens is text like any other.
        before: bytes that the text begins with; no stop string is looked for in them.

    Attributes:
        finish_reason: set once the text is over; no token may be pushed after that.
        matched_stop: the stop string that ended it, if one did.
        matched_stop_token: the one of `stop_tokens` that ended it, if one did.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Seq[str] = (),
        *,
        ends: Collection[int] | None = None,
        stop_tokens: Collection[int] = (),
        min_tokens: int = 0,
        before: bytes = b"",
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.matched_stop: str | None = None
        self.matched_stop_token: int | None = None
        self._vocabulary = vocabulary
        self._ends = vocabulary.end_ids if ends is None else ends
        self._stop_tokens = stop_tokens
        self._tokens_to_go = min_tokens
        # Malformed bytes, which a model can make, become U+FFFD as in `bytes.decode`.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = sorted(stop, key=len, reverse=True)
        self._longest = max(map(len, stop), default=0)
        self._held = ""
        self._before = self._decoder.decode(before)

    def push(self, token: int, *, last: bool, complete: bool = False) -> str:
        """Take the next token and return the text that is now certain, perhaps none.

        Args:
            token: the id the model made.
            last: no further token may follow; what is held back comes out.
            complete: the same, since the text is all that it was to be.
        """
        if self.finish_reason is not None:
            raise ValueError("the text is over; no further token belongs to it")
        self._tokens_to_go -= 1
        stopped = token in self._stop_tokens
        over = stopped or token in self._ends
        piece = b"" if over else self._vocabulary.token_bytes(token)
        text, ended = self._scan(self._decoder.decode(piece, final=over or last or complete))
        text, self._before = self._before + text, ""
        if ended:
            return text
        if stopped:
            self.matched_stop_token = token
            return text + self.close(FinishReason.STOP)
        if over:
            return text + self.close(FinishReason.END_OF_TEXT)
        if complete:
            return text + self.close(FinishReason.COMPLETE)
        return text + self.close(FinishReason.LENGTH) if last else text

    def close(self, reason: FinishReason) -> str:
        """End the text here and return what was held back of it."""
        self.finish_reason = reason
        held = self._before + self._held + self._decoder.decode(b"", final=True)
        self._before = self._held = ""
        return held

    def _scan(self, new: str) -> tuple[str, bool]:
        """Add decoded text; return what can no longer be part of a stop string, and whether one
        has ended the text."""
        text = self._held + new
        begin = len(self._held) + 1 if self._tokens_to_go <= 0 else len(text) + 1
        for end in range(begin, len(text) + 1):
            for stop in self._stop:
                # A stop string that reaches back before the held text would have held it.
                if text.endswith(stop, 0, end):
                    self.finish_reason = FinishReason.STOP
                    self.matched_stop = stop
                    self._held = ""
                    return text[: end - len(stop)], True
        hold = next(
            (
                n
                for n in range(min(self._longest - 1, len(text)), 0, -1)
                if any(stop.startswith(text[-n:]) for stop in self._stop)
            ),
            0,
        )
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False
