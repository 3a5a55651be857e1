"""From a GenerationSpec to a Sequence, or to everything that is wrong with it at once."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from gpt.config import GPTConfig
from gpt.errors import InexpressibleTextError, PromptError, SamplingError, TokenizerError, UserError
from gpt.params import SamplingParams
from gpt.sequence import Sequence
from gpt.tokenizer import Tokenizer
from serve.v1 import generation_pb2 as pb

OPTIONAL = ("temperature", "top_k", "top_p", "max_tokens", "seed")


class InvalidRequestError(UserError):
    """Attributes:
    violations: `(field path, description)` of each fault of the request.
    """

    def __init__(self, violations: list[tuple[str, str]]) -> None:
        self.violations = violations
        super().__init__("; ".join(f"{field}: {description}" for field, description in violations))


class SpecReader:
    """Checks specs against one model. Tokenizing takes time: not for an event loop's thread."""

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

    def read(self, spec: pb.GenerationSpec) -> Sequence:
        """The sequence that the spec asks for.

        Raises:
            InvalidRequestError: lists all violations.
        """
        violations: list[tuple[str, str]] = []
        given = {name: getattr(spec, name) for name in OPTIONAL if spec.HasField(name)}
        try:
            params = SamplingParams(**given, stop=tuple(spec.stop))
        except SamplingError as error:
            violations += [(f"spec.{field}", text) for field, text in error.violations]
            params = SamplingParams()  # the prompt is still to be checked
        kind = spec.WhichOneof("prompt")
        try:
            sequence = Sequence.start(
                self._prompt(spec, kind),
                params,
                block_size=self._block_size,
                n_vocab=self._tokenizer.n_vocab,
                eot=self._tokenizer.eot,
            )
        except InexpressibleTextError as error:
            # The error's own advice is for whoever trains models; a caller has only the prompt.
            description = (
                f"character {error.char!r} (U+{ord(error.char):04X}) at offset {error.offset} has "
                f"no token in the model's {self._tokenizer.kind} vocabulary; leave it out"
            )
            violations.append(("spec.text", description))
        except (PromptError, TokenizerError) as error:
            violations.append((f"spec.{kind or 'prompt'}", str(error)))
        if violations:
            raise InvalidRequestError(violations)
        return sequence

    def _prompt(self, spec: pb.GenerationSpec, kind: str | None) -> Seq[int]:
        if kind is None:
            raise PromptError("not given; set text or token_ids (either may be empty)")
        if kind == "token_ids":
            return spec.token_ids.ids  # type: ignore[no-any-return]  # copied once it is known to fit
        size = len(spec.text.encode())
        if size > self.max_prompt_bytes:
            least = math.ceil(size / self._longest_token)
            raise PromptError(
                f"the prompt has {size} bytes, which is at least {least} tokens, but the model's "
                f"context holds {self._block_size}; shorten it"
            )
        return self._tokenizer.encode(spec.text)
