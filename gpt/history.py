"""History: which tokens a text has had, and how often. Pure Python, no torch.

Penalties need it at every token. It is brought up to date by the tokens that are new, so a step of
a long text costs no more than one of a short one; the arrays are read by numpy without a copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq


class History:
    """The distinct tokens of one sequence, in the order of their first appearance.

    Attributes:
        tokens: (D,) int64, each once.
        counts: (D,) int64, how often the text has it, its prompt left out.
    """

    def __init__(self, prompt_len: int) -> None:
        self.tokens = array("q")
        self.counts = array("q")
        self._prompt_len = prompt_len
        self._seen = 0
        self._places: dict[int, int] = {}

    def update(self, ids: Seq[int]) -> History:
        """Take in what `ids`, the prompt and the text so far, has got since the last call."""
        for position in range(self._seen, len(ids)):
            token = ids[position]
            place = self._places.setdefault(token, len(self.tokens))
            if place == len(self.tokens):
                self.tokens.append(token)
                self.counts.append(0)
            self.counts[place] += position >= self._prompt_len
        self._seen = len(ids)
        return self
