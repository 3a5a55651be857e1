"""Ids to text as it comes. Used by the local sampler and the server alike; pure Python.

Two things must be held back until more is known: bytes that do not yet make a character, and text
that may turn out to be the beginning of a stop string. Nothing else is: every other character is
handed on with the token that completes it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Seq
from enum import Enum
from typing import Protocol


class FinishReason(str, Enum):
    """Why a text ended."""

    STOP = "stop"
    """One of the request's stop strings came; the text ends before it."""
    END_OF_TEXT = "end_of_text"
    """The model made its end-of-text token, or another that ends a text."""
    LENGTH = "length"
    """max_tokens was reached, or the context is full."""


class Vocabulary(Protocol):
    """What of a tokenizer is needed here."""

    @property
    def end_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token: int, /) -> bytes: ...


class TextStream:
    """The text of one sequence.

    The result does not depend on how the text is cut into tokens. Of several stop strings the one
    that is *completed* first wins, and of those completed by the same character the longest.

    Attributes:
        finish_reason: set once the text is over; no token may be pushed after that.
        matched_stop: the stop string that ended it, if one did.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Seq[str] = ()) -> None:
        self.finish_reason: FinishReason | None = None
        self.matched_stop: str | None = None
        self._vocabulary = vocabulary
        self._ends = vocabulary.end_ids
        # Malformed bytes, which a model can make, become U+FFFD as in `bytes.decode`.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = sorted(stop, key=len, reverse=True)
        self._longest = max(map(len, stop), default=0)
        self._held = ""

    def push(self, token: int, *, last: bool) -> str:
        """Take the next token and return the text that is now certain, perhaps none.

        Args:
            token: the id the model made.
            last: no further token may follow; what is held back comes out.
        """
        if self.finish_reason is not None:
            raise ValueError("the text is over; no further token belongs to it")
        over = token in self._ends
        piece = b"" if over else self._vocabulary.token_bytes(token)
        text = self._scan(self._decoder.decode(piece, final=over or last))
        if self.finish_reason is None and (over or last):
            self.finish_reason = FinishReason.END_OF_TEXT if over else FinishReason.LENGTH
            text, self._held = text + self._held, ""
        return text

    def _scan(self, new: str) -> str:
        """Add decoded text; return what can no longer be part of a stop string."""
        text = self._held + new
        for end in range(len(self._held) + 1, len(text) + 1):
            for stop in self._stop:
                # A stop string that reaches back before the held text would have held it.
                if text.endswith(stop, 0, end):
                    self.finish_reason = FinishReason.STOP
                    self.matched_stop = stop
                    self._held = ""
                    return text[: end - len(stop)]
        hold = next(
            (
                n
                for n in range(min(self._longest - 1, len(text)), 0, -1)
                if any(stop.startswith(text[-n:]) for stop in self._stop)
            ),
            0,
        )
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]
