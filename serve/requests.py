"""From a request to a Sequence, or to everything that is wrong with it at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from gpt.config import GPTConfig
from gpt.errors import InexpressibleTextError, PromptError, SamplingError, TokenizerError, UserError
from gpt.params import SamplingParams
from gpt.sequence import Sequence
from gpt.tokenizer import Tokenizer
from serve.v1 import generation_pb2 as pb
from serve.wire import settings_of


class InvalidRequestError(UserError):
    """Attributes:
    violations: `(field path, description)` of each fault of the request.
    """

    def __init__(self, violations: list[tuple[str, str]]) -> None:
        self.violations = violations
        super().__init__("; ".join(f"{field}: {description}" for field, description in violations))


class SequenceReader:
    """Checks requests against one model. Tokenizing takes time: not for an event loop's thread."""

    def __init__(self, tokenizer: Tokenizer, config: GPTConfig) -> None:
        self._tokenizer = tokenizer
        self._block_size = config.block_size
        self._longest_token = max(
            len(tokenizer.token_bytes(token)) for token in range(tokenizer.n_vocab)
        )

    @property
    def max_prompt_bytes(self) -> int:
        """A text of more bytes cannot fit, however it is tokenized; it is refused unread."""
        return self._block_size * self._longest_token

    def to_generate(self, spec: pb.GenerationSpec) -> Sequence:
        """The sequence that the spec asks for.

        Raises:
            InvalidRequestError: lists all violations.
        """
        violations: list[tuple[str, str]] = []
        try:
            params = SamplingParams(**settings_of(spec))
        except SamplingError as error:
            violations += [(f"spec.{field}", text) for field, text in error.violations]
            params = SamplingParams()  # the prompt is still to be checked
        return self._sequence(Sequence.start, spec, "prompt", "spec.", params, violations)

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
        return self._sequence(Sequence.score, request, "content", "", params, violations)

    def _sequence(
        self,
        make: Callable[..., Sequence],
        request: Any,
        oneof: str,
        path: str,
        params: SamplingParams,
        violations: list[tuple[str, str]],
    ) -> Sequence:
        """Add what is wrong with the text to the violations, and raise if there are any."""
        kind = request.WhichOneof(oneof)
        try:
            sequence = make(
                self._ids(request, kind, begins=make == Sequence.start),
                params,
                block_size=self._block_size,
                n_vocab=self._tokenizer.n_vocab,
                eot=self._tokenizer.start,
            )
        except InexpressibleTextError as error:
            violations.append((f"{path}text", inexpressible(error, self._tokenizer.kind)))
        except (PromptError, TokenizerError) as error:
            violations.append((f"{path}{kind or oneof}", str(error)))
        if violations:
            raise InvalidRequestError(violations)
        return sequence

    def _ids(self, request: Any, kind: str | None, *, begins: bool) -> Seq[int]:
        """The ids of the text; as a prompt it begins as a document does."""
        if kind is None:
            raise PromptError("not given; set text or token_ids")
        if kind == "token_ids":
            return request.token_ids.ids  # type: ignore[no-any-return]  # copied if it fits
        size = len(request.text.encode())
        if size > self.max_prompt_bytes:
            least = math.ceil(size / self._longest_token)
            raise PromptError(
                f"the text has {size} bytes, which is at least {least} tokens, but the model's "
                f"context holds {self._block_size}; shorten it"
            )
        return (self._tokenizer.prompt if begins else self._tokenizer.encode)(request.text)


def inexpressible(error: InexpressibleTextError, kind: str) -> str:
    """The error's own advice is for whoever trains models; a caller has only the text."""
    return (
        f"character {error.char!r} (U+{ord(error.char):04X}) at offset {error.offset} has no token "
        f"in the model's {kind} vocabulary; leave it out"
    )
