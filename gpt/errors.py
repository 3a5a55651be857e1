"""What a user can get wrong: one exception type per kind of mistake.

Every message says what was given, what is allowed and what to do about it, in one line: the command
line prints it after `error:` and exits with 1, the server puts it into the RPC status. Anything
that is *not* a `UserError` is a fault of ours and keeps its traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the person or program at the other end can mend."""


class ConfigError(UserError):
    """An architecture or run setting that cannot work (a width not divisible, an unknown name)."""


class DataError(UserError):
    """A corpus that is missing, empty, unreadable or too short."""


class TokenizerError(UserError):
    """A tokenizer that cannot be built, loaded, or does not belong to this model."""


class InexpressibleTextError(TokenizerError):
    """Text with a character that the vocabulary has no tokens for.

    Attributes:
        char: the first such character.
        offset: its index in the text, in characters.
    """

    def __init__(self, char: str, offset: int, tokenizer: str) -> None:
        self.char = char
        self.offset = offset
        super().__init__(
            f"character {char!r} (U+{ord(char):04X}) at offset {offset} has no token in the "
            f"{tokenizer} vocabulary; leave it out, or train with the tokenizer bpe or bytes, "
            "which can express any text"
        )


class PromptError(UserError):
    """A prompt that the model cannot take (too long, ids beyond the vocabulary)."""


class SamplingError(UserError):
    """Sampling settings out of range.

    Attributes:
        violations: `(field, description)` for each setting that is wrong, all at once.
    """

    def __init__(self, violations: list[tuple[str, str]]) -> None:
        self.violations = violations
        super().__init__("; ".join(f"{field}: {description}" for field, description in violations))


class CheckpointError(UserError):
    """A model folder or checkpoint that is missing, damaged or of another kind."""


class ServerError(UserError):
    """The server cannot start or be reached (a port in use, nobody listening)."""


class ChatTemplateError(UserError):
    """A chat template that is missing, broken, or does not take these messages."""
