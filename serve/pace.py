"""How many prompt tokens a step may read beside texts that are being made. Pure Python.

Whoever streams waits for the whole step, so a prompt of 900 tokens in one piece stops every text
for as long as it takes. Cut small it costs each step a little (Agrawal et al., "Sarathi-Serve",
arXiv 2403.02310); how small depends on the machine, the model and how many texts there are, so it
is found by measuring the steps themselves: one with prompts may take `stretch` times as long as one
without. Prompts alone, with nobody to wait for them, are read in whole chunks.
"""

from __future__ import annotations

LEAST = 8
"""Tokens, however slow: a prompt must get on. As many as a product of few rows takes at once."""

PROBE_EVERY = 32
"""After so many steps with prompts in a row, one is run without: what that takes may have changed,
as texts grow and others come."""


class Pace:
    """Follows how long steps take. Not thread-safe.

    Args:
        stretch: above 1.
        most: tokens in a step, however fast.
    """

    def __init__(self, stretch: float, most: int) -> None:
        if not stretch > 1:
            raise ValueError(f"the stretch is {stretch}, but must be above 1")
        self._stretch, self._most = stretch, most
        self._tokens = float(LEAST)
        self._alone: dict[int, float] = {}  # seconds of a step without prompts, by texts
        self._since = 0

    def limit(self, texts: int) -> int:
        """Most prompt tokens in a step beside so many texts: 0 in one that is to be measured."""
        if not texts:
            return self._most
        if _size(texts) not in self._alone or self._since >= PROBE_EVERY:
            return 0
        return min(self._most, int(self._tokens))

    def ran(self, texts: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step that is done."""
        if not texts:
            return
        size = _size(texts)
        before = self._alone.get(size)
        if not prompt_tokens:
            self._alone[size] = seconds if before is None else before + 0.3 * (seconds - before)
            self._since = 0
            return
        self._since += 1
        if before is None:
            return
        room = (self._stretch - 1) * before
        change = room / max(seconds - before, 1e-9)
        # Up slowly, as one step says little; down at once, but not for ever after a slow moment.
        if prompt_tokens >= int(self._tokens):
            self._tokens *= min(1.25, max(0.5, change))
        elif change < 1:
            self._tokens = prompt_tokens * max(0.5, change)
        self._tokens = min(float(self._most), max(float(LEAST), self._tokens))


def _size(texts: int) -> int:
    """Numbers of texts whose steps take about as long."""
    return texts.bit_length()
