"""SamplingParams: what one request asks of the sampler, and Made: what it gets for each token.

Plain data, no torch: the command line and the client build it without paying for a torch import;
`gpt.sampling` applies it.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from gpt.errors import SamplingError

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_PENALTY = 2.0
MAX_BIASED = 1024
MAX_BIAS = 100.0
MAX_STOP_TOKENS = 64
MAX_ID = 2**32 - 1
MAX_SHOWN = 40
"""Characters of a wrong value that a message repeats."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character of UTF-16: JSON can spell it, UTF-8 cannot, and so no text has it."""

NOT_FINITE = -1
"""In place of a token: the logits were NaN or infinite."""
SCORED = -2
"""In place of a token: a text that was to be scored is, to its end."""
NO_TOKEN = -3
"""In place of a token: none of those that the request allows is possible."""
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
        token: its id; NOT_FINITE, SCORED or NO_TOKEN in place of one.
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


ConstraintKind = Literal["json_schema", "regex", "grammar"]
MAX_CONSTRAINT_BYTES = {"json_schema": 65536, "regex": 16384, "grammar": 65536}


class Constraint(NamedTuple):
    """What a text must be, and how that is written; `gpt.constraint` carries it out."""

    kind: ConstraintKind
    text: str


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Applied in the field's order: penalties, bias, masks, temperature, top-k, top-p, min-p, typical,
    one draw. Greedy, which takes the most likely token, has the first three and nothing to filter.
    A mask is what may be made at all: `allowed_tokens`, no end before `min_tokens`, and what
    `json_schema`, `regex` or `grammar` allows.

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
        logit_bias: `(token, bias)` pairs, each token once; the bias, -100 to 100, is added to its
            logit. -100 all but rules it out.
        allowed_tokens: the only tokens that may be made; None allows all.
        min_tokens: until so many are made no token that ends the text can be, and stop strings do
            not end it.
        stop_tokens: tokens that end the text, besides those that the tokenizer says end any.
        ignore_end_of_text: go on after a token that ends texts as after any other. Those in
            `stop_tokens` still end it.
        prompt_logprobs: as `logprobs`, for the tokens of the prompt after the first.
        json_schema: the text is JSON under this schema.
        regex: all of the text matches this.
        grammar: the text is a sentence of this context-free grammar, in Lark's notation. At most
            one of the three; whether it can be understood is found out when a model is there.
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
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_tokens: tuple[int, ...] | None = None
    min_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()
    ignore_end_of_text: bool = False
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None

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
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if wanted is not None and not 0 <= wanted <= MAX_LOGPROBS:
                refuse(name, f"in 0 to {MAX_LOGPROBS}")
        if self.min_tokens < 0:
            refuse("min_tokens", ">= 0")
        elif self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", f"at most max_tokens, {brief(self.max_tokens)}")
        found += self._token_violations() + self._constraint_violations()
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
    def constraint(self) -> Constraint | None:
        """What the text must be, if anything."""
        for kind in get_args(ConstraintKind):
            if (text := getattr(self, kind)) is not None:
                return Constraint(kind, text)
        return None

    def _constraint_violations(self) -> list[tuple[str, str]]:
        found = []
        given = [kind for kind in get_args(ConstraintKind) if getattr(self, kind) is not None]
        for kind in given:
            text, most = getattr(self, kind), MAX_CONSTRAINT_BYTES[kind]
            size = len(text.encode("utf-8", "surrogatepass"))
            if not 1 <= size <= most:
                found.append((kind, f"{size} bytes long, 1 to {most} allowed"))
            elif half := SURROGATE.search(text):
                what = f"U+{ord(half[0]):04X}, half of a surrogate pair"
                found.append((kind, f"has {what}, which no text has; leave it out"))
        if len(given) > 1:
            found.append((given[1], f"given beside {given[0]}; a text has one constraint"))
        return found

    def _token_violations(self) -> list[tuple[str, str]]:
        found = []
        if len(self.logit_bias) > MAX_BIASED:
            found.append(("logit_bias", f"{len(self.logit_bias)} tokens, {MAX_BIASED} allowed"))
        elif len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            found.append(("logit_bias", "has a token twice; give each once"))
        for token, bias in self.logit_bias[:MAX_BIASED]:
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                found.append(
                    (f"logit_bias[{brief(token)}]", f"{brief(bias)} is not in -100 to 100")
                )
        if self.allowed_tokens is not None and not self.allowed_tokens:
            found.append(("allowed_tokens", "is empty; name a token, or leave it out to allow all"))
        for name, ids in self._ids():
            wrong = next((token for token in ids if not 0 <= token <= MAX_ID), None)
            if wrong is not None:
                found.append((name, f"{brief(wrong)} is not a token id, 0 to {MAX_ID}"))
        if len(self.stop_tokens) > MAX_STOP_TOKENS:
            message = f"{len(self.stop_tokens)} tokens given, {MAX_STOP_TOKENS} allowed"
            found.append(("stop_tokens", message))
        return found

    def _ids(self) -> list[tuple[str, Sequence[int]]]:
        """The settings that name tokens."""
        return [
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("allowed_tokens", self.allowed_tokens or ()),
            ("stop_tokens", self.stop_tokens),
        ]

    def misfits(self, n_vocab: int, ends: Collection[int]) -> list[tuple[str, str]]:
        """`(field, description)` of what does not fit a model.

        Args:
            n_vocab: its ids are those below.
            ends: those that end a text.
        """
        found = []
        for name, ids in self._ids():
            outside = [token for token in ids if token >= n_vocab]
            if outside:
                what = (
                    f"token id {brief(outside[0])} is outside the vocabulary (0 to {n_vocab - 1})"
                )
                found.append((name, what))
        if self.min_tokens and self.allowed_tokens and not found:
            ending = {*self.stop_tokens, *(() if self.ignore_end_of_text else ends)}
            if ending.issuperset(self.allowed_tokens):
                what = "only ends the text, and min_tokens forbids that at first; allow another too"
                found.append(("allowed_tokens", what))
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
