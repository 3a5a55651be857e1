"""From a request to a Sequence, or to everything that is wrong with it at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any

from gpt.config import GPTConfig
from gpt.errors import InexpressibleTextError, PromptError, SamplingError, TokenizerError, UserError
from gpt.params import SamplingParams
from gpt.sequence import Sequence
from gpt.starter import Starter
from gpt.tokenizer import Tokenizer
from serve.asked import MAX_CHOICES, MAX_PRIORITY, Asked
from serve.v1 import generation_pb2 as pb
from serve.wire import settings_of

MAX_TEXT_BYTES = 1 << 20
"""Of a text to tokenize, in UTF-8, unless a server is told otherwise: about two seconds' work in
the worst case, one word that long."""


class InvalidRequestError(UserError):
    """Attributes:
    violations: `(field path, description)` of each fault of the request.
    """

    def __init__(self, violations: list[tuple[str, str]]) -> None:
        self.violations = violations
        super().__init__("; ".join(f"{field}: {description}" for field, description in violations))


class SequenceReader:
    """Checks requests against one model. Tokenizing takes time: not for an event loop's thread.

    Args:
        max_text_bytes: a longer text is refused unread.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: GPTConfig, max_text_bytes: int = MAX_TEXT_BYTES
    ) -> None:
        self._tokenizer = tokenizer
        self._max_text_bytes = max_text_bytes
        self._starter = Starter(config, tokenizer)
        self._longest_token = max(
            len(tokenizer.token_bytes(token)) for token in range(tokenizer.n_vocab)
        )

    @property
    def max_prompt_bytes(self) -> int:
        """A text of more bytes cannot fit, however it is tokenized; it is refused unread."""
        return self._starter.block_size * self._longest_token

    def to_generate(self, spec: pb.GenerationSpec) -> Asked:
        """The texts that the spec asks for.

        Raises:
            InvalidRequestError: lists all violations.
        """
        violations = _request_violations(spec)
        try:
            params = SamplingParams(**settings_of(spec))
        except SamplingError as error:
            violations += [(f"spec.{field}", text) for field, text in error.violations]
            params = SamplingParams()  # the prompt is still to be checked
        n = spec.n if spec.HasField("n") else 1
        if n > 1 and params.greedy:
            text = f"{n} texts at temperature 0 would be the same; ask for one, or set another"
            violations.append(("spec.n", text))
        endless = self._starter.endless and params.max_tokens is not None
        make = partial(self._starter.start, params=params)
        instead = ", or set max_tokens" if self._starter.endless else ""
        first = self._sequence(make, spec, "prompt", "spec.", violations, endless, instead)
        first.priority = spec.priority
        sequences = [first]
        for choice in range(1, n):
            # The prompt is scored once.
            settings = replace(params, prompt_logprobs=None)
            sequence = self._starter.start(first.ids, settings, choice)
            sequence.priority = spec.priority
            sequences.append(sequence)
        before = self._tokenizer.decode_bytes(first.ids) if spec.echo else b""
        limit = spec.time_limit_seconds if spec.HasField("time_limit_seconds") else None
        return Asked(sequences, before, limit)

    def to_score(self, request: pb.ScoreRequest) -> Sequence:
        """The sequence that scores the request's text.

        Raises:
            InvalidRequestError: lists all violations.
        """
        violations: list[tuple[str, str]] = []
        try:
            params = SamplingParams(logprobs=request.top)
        except SamplingError as error:
            violations += [("top", text) for _, text in error.violations]
            params = SamplingParams()
        make = partial(self._starter.score, params=params)
        return self._sequence(make, request, "content", "", violations)

    def _sequence(
        self,
        make: Callable[..., Sequence],
        request: Any,
        oneof: str,
        path: str,
        violations: list[tuple[str, str]],
        endless: bool = False,
        instead: str = "",
    ) -> Sequence:
        """Add what is wrong with the text to the violations, and raise if there are any.

        Args:
            endless: the text may be longer than the context.
            instead: what else can be done about one that is.
        """
        kind = request.WhichOneof(oneof)
        try:
            sequence = make(self._content(request, kind, endless, instead))
        except InexpressibleTextError as error:
            violations.append((f"{path}text", inexpressible(error, self._tokenizer.kind)))
        except SamplingError as error:
            violations += [(f"{path}{field}", text) for field, text in error.violations]
        except (PromptError, TokenizerError) as error:
            violations.append((f"{path}{kind or oneof}", str(error)))
        if violations:
            raise InvalidRequestError(violations)
        return sequence

    def _content(
        self, request: Any, kind: str | None, endless: bool, instead: str
    ) -> str | Seq[int]:
        """The text or ids, looked at no further than is needed to see that they can fit."""
        if kind is None:
            raise PromptError("not given; set text or token_ids")
        if kind == "token_ids":
            return request.token_ids.ids  # type: ignore[no-any-return]  # copied if it fits
        text: str = request.text
        size = len(text.encode())
        if size > self._max_text_bytes:
            raise PromptError(
                f"the text has {size} bytes, {self._max_text_bytes} are allowed here; shorten it"
            )
        if size > self.max_prompt_bytes and not endless:
            least = math.ceil(size / self._longest_token)
            raise PromptError(
                f"the text has {size} bytes, which is at least {least} tokens, but the model's "
                f"context holds {self._starter.block_size}; shorten it{instead}"
            )
        return text


def _request_violations(spec: pb.GenerationSpec) -> list[tuple[str, str]]:
    """What is wrong with the settings that are not the sampler's."""
    found = []
    if spec.HasField("n") and not 1 <= spec.n <= MAX_CHOICES:
        found.append(("spec.n", f"{spec.n} is not in 1 to {MAX_CHOICES}"))
    if not -MAX_PRIORITY <= spec.priority <= MAX_PRIORITY:
        text = f"{spec.priority} is not in -{MAX_PRIORITY} to {MAX_PRIORITY}"
        found.append(("spec.priority", text))
    if spec.HasField("time_limit_seconds") and not 0 < spec.time_limit_seconds < math.inf:
        text = f"{spec.time_limit_seconds:g} is not a finite number above 0"
        found.append(("spec.time_limit_seconds", text))
    return found


def inexpressible(error: InexpressibleTextError, kind: str) -> str:
    """The error's own advice is for whoever trains models; a caller has only the text."""
    return (
        f"character {error.char!r} (U+{ord(error.char):04X}) at offset {error.offset} has no token "
        f"in the model's {kind} vocabulary; leave it out"
    )
