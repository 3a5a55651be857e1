"""What a pattern is: a predicate, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reading a configuration checks its pattern, and should not cost a torch import
    from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """What a layer's cache must remember for the queries to come.

    Attributes:
        window: how many of the latest positions, the query's own included; None: all of them.
        sinks: how many of the first positions besides.
    """

    window: int | None = None
    sinks: int = 0

    def positions(self, length: int) -> int:
        """Positions held once `length` tokens are there."""
        return length if self.window is None else min(length, self.window + self.sinks)

    def first(self, query: int) -> int:
        """The earliest position, the first ones apart, that a query at `query` or later needs."""
        return 0 if self.window is None else max(0, query - self.window + 1)

    def __str__(self) -> str:
        if self.window is None:
            return "every position"
        first = f" and the first {self.sinks:,}" if self.sinks else ""
        return f"the last {self.window:,} positions{first}"


class Pattern:
    """Base of all patterns. Your own needs `allowed`; the rest has safe defaults that follow from
    it, which a subclass replaces where it knows better.

    A pattern is a value: immutable and hashable (a frozen dataclass), since plans are cached by it.
    """

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Whether the query at `q_pos` may look at the key at `k_pos`; the shapes broadcast.

        Every token must see itself: a softmax over nothing has no value. What is said of a later
        key (`k_pos > q_pos`) does not matter, nobody sees one.
        """
        raise NotImplementedError

    def seen(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """`allowed`, and never a later key: plans hide padding, which lies behind a query, as well
        as the future by it."""
        return self.allowed(q_pos, k_pos) & (k_pos <= q_pos)

    def spans(self, first: int, last: int) -> Sequence[range]:
        """Where the keys are that any of the queries `first` to `last` (inclusive) may see.

        Returns:
            Ascending, disjoint ranges. They may hold more keys than that, but for a single query
            (`first == last`) they are exact.
        """
        import torch

        queries = torch.arange(first, last + 1)[:, None]
        seen = self.seen(queries, torch.arange(last + 1)).any(0).nonzero()[:, 0]
        return merge(range(key, key + 1) for key in seen.tolist())

    @property
    def memory(self) -> Memory:
        """What the cache must keep: pages of other positions are given back while a text grows, and
        never read. The default is everything."""
        return Memory()

    @property
    def sees_memory(self) -> bool:
        """Whether a query sees all that its memory keeps of the positions up to its own, so that a
        single one needs no mask."""
        return False

    @property
    def causal_until(self) -> int:
        """A length up to which the pattern is plain causal, so that it can be run as such."""
        return 1

    @property
    def relative(self) -> bool:
        """Whether only the distance `q_pos - k_pos` counts."""
        return False

    @property
    def residues(self) -> tuple[int, Pattern] | None:
        """`(n, inner)` if positions of unequal residue modulo n never see one another, and those of
        one residue see one another as `inner` says of `position // n`: the plan then runs each
        residue class as a sequence of its own. None: there is no such n."""
        return None

    def pairs(self, length: int) -> int:
        """How many (query, key) pairs `length` tokens have."""
        return sum(len(keys) for q in range(length) for keys in self.spans(q, q))

    def key_blocks(self, q_block: int, size: int) -> list[int]:
        """Which blocks of `size` keys hold one that a query of block `q_block` may see."""
        spans = self.spans(q_block * size, (q_block + 1) * size - 1)
        blocks: set[int] = set()
        for keys in spans:
            if keys.step >= size:
                blocks.update(key // size for key in keys)
            else:
                blocks.update(range(keys[0] // size, keys[-1] // size + 1))
        return sorted(blocks)


@dataclass(frozen=True)
class LayerPatterns:
    """The patterns of a model's layers.

    Attributes:
        kinds: the distinct ones.
        layer_kinds: which of them each layer has; repeats if there are more layers.
    """

    kinds: tuple[Pattern, ...]
    layer_kinds: tuple[int, ...] = (0,)

    def of_layer(self, index: int) -> Pattern:
        return self.kinds[self.layer_kinds[index % len(self.layer_kinds)]]

    @cached_property
    def memories(self) -> tuple[Memory, ...]:
        """What the layers' caches must keep, each once: layers that keep the same share pages."""
        return tuple(dict.fromkeys(kind.memory for kind in self.kinds))

    @cached_property
    def kind_memories(self) -> tuple[int, ...]:
        """Which of the memories each kind has."""
        return tuple(self.memories.index(kind.memory) for kind in self.kinds)


def merge(spans: Iterable[range]) -> list[range]:
    """The same keys as ascending, disjoint ranges with a step of 1; empty ones are dropped."""
    merged: list[range] = []
    for span in sorted((s for s in spans if len(s)), key=lambda s: s.start):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return merged
