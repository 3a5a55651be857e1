"""SamplingParams: what one request asks of the sampler, and Made: what it gets for each token.

Plain data, no torch: the command line and the client build it without paying for a torch import;
`gpt.sampling` applies it.
"""

from __future__ import annotations

import re
import secrets
import sys
from dataclasses import dataclass, field

from gpt.errors import SamplingError

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_PENALTY = 2.0
MAX_SHOWN = 40
"""Characters of a wrong value that a message repeats."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character of UTF-16: JSON can spell it, UTF-8 cannot, and so no text has it."""

NOT_FINITE = -1
"""In place of a token: the logits were NaN or infinite."""
SCORED = -2
"""In place of a token: a text that was to be scored is, to its end."""
LOGPROB_FLOOR = -9999.0
"""No log-probability below this leaves: -inf is no number in JSON, and breaks encoders."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability in nats."""

    token: int
    logprob: float


@dataclass(frozen=True)
class Made:
    """A token that was made, or scored.

    Attributes:
        token: its id; NOT_FINITE or SCORED in place of one.
        logprob: its log-probability in nats under the raw logits, before penalties, temperature and
            filters, at least LOGPROB_FLOOR; None if it was not asked for.
        top: the most likely tokens, most likely first, as many as asked for; those below
            LOGPROB_FLOOR, which the model rules out, are left out.
    """

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


def random_seed() -> int:
    """A fresh seed for a request that gave none; echoed, so that the text can be had again."""
    return secrets.randbits(63)


def brief(value: object) -> str:
    """A value for a message: its beginning, if it is long."""
    try:
        text = str(value)
    except ValueError:  # Python writes no whole number of more digits than its limit, 4300
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def finite(value: float) -> bool:
    """Whether a float can hold it; whole numbers have no bound, and `math.isfinite` raises."""
    return abs(value) <= sys.float_info.max


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Applied in the field's order: penalties, temperature, top-k, top-p, min-p, typical, one draw.
    Greedy, which takes the most likely token, has penalties and nothing to filter.

    Attributes:
        temperature: logits are divided by it; 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all, and so does more than the vocabulary.
        top_p: keep the smallest set of most likely tokens whose probability reaches it, in (0, 1];
            1 keeps all. 0 is rejected: it names no set.
        max_tokens: most tokens to make; None goes on until the context is full. Beyond it goes only
            a model whose every layer has a window, and positions without end.
        stop: strings that end the text; the text ends before the first one to be completed. One
            with half of a surrogate pair is rejected: no text has it, and UTF-8 cannot spell it.
        seed: 0 to 2**63 - 1; the same seed gives the same text whoever else is being served.
        min_p: keep the tokens at least this fraction as likely as the most likely one, 0 to 1; 0
            keeps all, 1 the most likely alone (Nguyen et al., "Turning up the heat: min-p sampling
            for creative and coherent LLM outputs", arXiv 2407.01082).
        typical_p: keep the smallest set of tokens whose surprisal is nearest to the entropy and
            whose probability reaches it, in (0, 1]; 1 keeps all (Meister et al., "Locally typical
            sampling", arXiv 2202.00666).
        repetition_penalty: a positive logit of a token that stands in the prompt or the text is
            divided by it, a negative one multiplied; above 1 discourages, below 1 encourages, > 0
            (Keskar et al., "CTRL", arXiv 1909.05858).
        frequency_penalty: taken off a token's logit for each time the text, without the prompt,
            has it; -2 to 2.
        presence_penalty: taken off once if the text, without the prompt, has it; -2 to 2.
        logprobs: None for none; 0 to 20 gives each token's log-probability and those of that many
            most likely tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int = field(default_factory=random_seed)
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raises SamplingError that lists every violation."""
        if violations := self.violations():
            raise SamplingError(violations)

    def violations(self) -> list[tuple[str, str]]:
        """`(field, description)` of each value out of range. Written so that NaN never passes."""
        found: list[tuple[str, str]] = []

        def refuse(name: str, rule: str) -> None:
            found.append((name, f"{brief(getattr(self, name))} is not {rule}"))

        if not (finite(self.temperature) and self.temperature >= 0):
            refuse("temperature", "a finite number >= 0")
        if self.top_k < 0:
            refuse("top_k", ">= 0 (0 keeps the whole vocabulary)")
        if not (0 < self.top_p <= 1):
            refuse("top_p", "in (0, 1] (1 keeps the whole vocabulary)")
        if not (0 <= self.min_p <= 1):
            refuse("min_p", "in 0 to 1 (0 keeps the whole vocabulary)")
        if not (0 < self.typical_p <= 1):
            refuse("typical_p", "in (0, 1] (1 keeps the whole vocabulary)")
        if not (finite(self.repetition_penalty) and self.repetition_penalty > 0):
            refuse("repetition_penalty", "a finite number > 0 (1 is no penalty)")
        for name in ("frequency_penalty", "presence_penalty"):
            if not (-MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY):
                refuse(name, "in -2 to 2 (0 is no penalty)")
        if self.max_tokens is not None and self.max_tokens < 1:
            refuse("max_tokens", ">= 1")
        if not 0 <= self.seed <= MAX_SEED:
            refuse("seed", f"in 0 to {MAX_SEED}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            refuse("logprobs", f"in 0 to {MAX_LOGPROBS}")
        if len(self.stop) > MAX_STOP_STRINGS:
            found.append(("stop", f"{len(self.stop)} strings given, {MAX_STOP_STRINGS} allowed"))
        # Of too many, each is not looked at: a list of a million mistakes helps nobody.
        for i, text in enumerate(self.stop[: MAX_STOP_STRINGS + 1]):
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                found.append(
                    (f"stop[{i}]", f"{len(text)} characters long, 1 to {MAX_STOP_LENGTH} allowed")
                )
            elif half := SURROGATE.search(text):
                what = f"U+{ord(half[0]):04X}, half of a surrogate pair"
                found.append((f"stop[{i}]", f"has {what}, which no text has; leave it out"))
        return found

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether a token's logit depends on what the text has already."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )
