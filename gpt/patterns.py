"""Attention patterns: which earlier positions a token may look at.

A pattern is a predicate on absolute positions. The predicate *is* the definition, and the oracle
that the tests hold every kernel to; at run time `gpt.plan` asks it for a mask only where the
fused causal kernel cannot be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gpt.errors import ConfigError

if TYPE_CHECKING:  # reading a configuration checks its pattern, and should not cost a torch import
    from torch import Tensor


class Pattern(Protocol):
    """What `gpt.plan` needs to know of a pattern."""

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Whether the query at `q_pos` may look at the key at `k_pos`; the shapes broadcast.

        Must be False for every key after the query (`k_pos > q_pos`): the plan relies on that to
        hide the padding of a batch as well as the future.
        """


@dataclass(frozen=True)
class Causal:
    """Everything up to and including itself (Vaswani et al., arXiv 1706.03762, section 3.2.3)."""

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos <= q_pos


@dataclass(frozen=True)
class SlidingWindow:
    """Itself and the `width - 1` positions before it (Beltagy et al., arXiv 2004.05150)."""

    width: int

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos <= q_pos) & (q_pos - k_pos < self.width)


def parse_pattern(text: str) -> Pattern:
    """`causal` or `window:N`, as `GPTConfig.pattern` spells them. Raises ConfigError."""
    kind, _, argument = text.partition(":")
    if text == "causal":
        return Causal()
    if kind == "window" and argument.isdecimal() and len(argument) < 10 and int(argument) > 0:
        return SlidingWindow(int(argument))
    raise ConfigError(
        f"pattern is {text[:40]!r}, but must be 'causal' or 'window:N' with N at least 1"
    )


@dataclass(frozen=True)
class LayerPatterns:
    """The patterns of a model's layers.

    Attributes:
        kinds: the distinct ones.
        layer_kinds: which of them each layer has; repeats if there are more layers.
    """

    kinds: tuple[Pattern, ...]
    layer_kinds: tuple[int, ...] = (0,)


def parse_patterns(texts: str | Sequence[str]) -> LayerPatterns:
    """One pattern, or the list of them that repeats over the layers. Raises ConfigError."""
    listed = [texts] if isinstance(texts, str) else list(texts)
    distinct = list(dict.fromkeys(listed))
    return LayerPatterns(
        tuple(map(parse_pattern, distinct)), tuple(distinct.index(text) for text in listed)
    )
