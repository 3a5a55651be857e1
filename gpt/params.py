"""SamplingParams: what one request asks of the sampler. Plain data, no torch.

The command line and the client build it without paying for a torch import; `gpt.sampling` applies
it.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field

from gpt.errors import SamplingError

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024


def random_seed() -> int:
    """A fresh seed for a request that gave none; echoed, so that the text can be had again."""
    return secrets.randbits(63)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Applied in the field's order: temperature, top-k, top-p, then one draw.

    Attributes:
        temperature: logits are divided by it; 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all, and so does more than the vocabulary.
        top_p: keep the smallest set of most likely tokens whose probability reaches it, in (0, 1];
            1 keeps all. 0 is rejected: it names no set.
        max_tokens: most tokens to make; None goes on until the context is full.
        stop: strings that end the text; the text ends before the first one to be completed.
        seed: 0 to 2**63 - 1; the same seed gives the same text whoever else is being served.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int = field(default_factory=random_seed)

    def __post_init__(self) -> None:
        """Raises SamplingError that lists every violation."""
        if violations := self.violations():
            raise SamplingError(violations)

    def violations(self) -> list[tuple[str, str]]:
        """`(field, description)` of each value out of range. Written so that NaN never passes."""
        found = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            found.append(("temperature", f"{self.temperature} is not a finite number >= 0"))
        if self.top_k < 0:
            found.append(("top_k", f"{self.top_k} is not >= 0 (0 keeps the whole vocabulary)"))
        if not (0 < self.top_p <= 1):
            found.append(("top_p", f"{self.top_p} is not in (0, 1] (1 keeps the whole vocabulary)"))
        if self.max_tokens is not None and self.max_tokens < 1:
            found.append(("max_tokens", f"{self.max_tokens} is not >= 1"))
        if not 0 <= self.seed <= MAX_SEED:
            found.append(("seed", f"{self.seed} is not in 0 to {MAX_SEED}"))
        if len(self.stop) > MAX_STOP_STRINGS:
            found.append(("stop", f"{len(self.stop)} strings given, {MAX_STOP_STRINGS} allowed"))
        # Of too many, each is not looked at: a list of a million mistakes helps nobody.
        for i, text in enumerate(self.stop[: MAX_STOP_STRINGS + 1]):
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                found.append(
                    (f"stop[{i}]", f"{len(text)} characters long, 1 to {MAX_STOP_LENGTH} allowed")
                )
        return found

    @property
    def greedy(self) -> bool:
        return self.temperature == 0
