"""What reading a model of another format comes down to: tensors, and a `Foreign` made of them.

A format's reader has two halves. Its `Tensors` gives out one tensor at a time, so that a model of
the size of the memory can pass through it; its `open_…` function turns the format's settings into
a `GPTConfig` and names, for every weight that such a model has, how to read it. Whatever the
reader does not know it refuses by name: a setting passed over in silence is a model that computes
something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from gpt.config import GPTConfig
from gpt.tokenizer import Tokenizer


class Tensors(Protocol):
    """The tensors of a file or folder in somebody else's format, read one at a time."""

    def names(self) -> list[str]:
        """All tensors, whether or not anybody wants them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """From the file's index: reads no numbers."""

    def read(self, name: str) -> Tensor:
        """A fresh tensor in the dtype that the stored numbers stand for (quantised: float32)."""


@dataclass(frozen=True)
class Foreign:
    """A model of another format in this project's terms.

    Attributes:
        config: the architecture.
        weights: how to read each weight, by the name it has in `GPT.state_dict()`; without
            `head.weight` when it is the embedding. Each call reads one and keeps nothing.
        tokenizer: None: the source has none.
        chat_template: the Jinja text that lays out a conversation.
        origin: plain data for the record: format, family, the source's name, dtype.
    """

    config: GPTConfig
    weights: Mapping[str, Callable[[], Tensor]]
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    origin: dict[str, Any] = field(default_factory=dict)
