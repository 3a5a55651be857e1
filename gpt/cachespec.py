"""What each layer's cache must keep, and which layers keep it together. Pure Python, no torch.

A layer declares by its pattern what it must remember (`Pattern.memory`): every position, or a
window of the latest and perhaps the first few. Layers that remember the same form a group with a
pool of pages and, for each sequence, a block table of their own, also if they look at it through
different patterns:

    pattern [window:256, dilated:64:4, causal]   layer  0 1 2 3 4 5 …
                                                 group  0 1 2 0 1 2 …      the last 256, 253, all

**The seam for layers that keep no keys.** A recurrent form of attention (kernel features, a
compressed memory) would remember neither: it has a `state` of so many bytes a sequence, whatever
the length. It would be a third kind of memory beside the two that `Memory` spells; a group of such
layers, `CacheGroup`, whose pool holds a state in place of a page; and a table of one entry, which
`gpt.pages.CachePages` hands out when a sequence starts. Admission, preemption and the plan go by
groups already. No such pattern is offered today.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from gpt.config import GPTConfig
from gpt.pages import most_pages, pages_for
from gpt.patterns import LayerPatterns, Memory, parse_patterns

_SHARES = 1024
"""Pools are sized in fractions of a sequence this fine."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers that remember the same.

    Attributes:
        memory: what they remember.
        layers: their numbers.
        numbers: keys and values of one token, over all of these layers.
    """

    memory: Memory
    layers: tuple[int, ...]
    numbers: int

    def __str__(self) -> str:
        layers = f"{len(self.layers)} layer{'s' * (len(self.layers) > 1)}"
        return f"{layers} with {self.memory}"


@dataclass(frozen=True)
class CacheSpec:
    """The cache of a model.

    Attributes:
        patterns: who may look at whom; parsed here once, for the plans.
        groups: what is kept; in the order of `patterns.memories`.
        endless: whether a text may grow without end in constant memory: every layer forgets, and
            positions are defined beyond the context.
    """

    patterns: LayerPatterns
    groups: tuple[CacheGroup, ...]
    endless: bool

    @classmethod
    def of(cls, config: GPTConfig) -> CacheSpec:
        patterns = parse_patterns(config.patterns)
        found = [patterns.of_layer(i).memory for i in range(config.n_layer)]
        groups = []
        for memory in patterns.memories:
            layers = tuple(i for i, own in enumerate(found) if own == memory)
            numbers = 2 * len(layers) * config.kv_heads * config.head_width
            groups.append(CacheGroup(memory, layers, numbers))
        forgets = all(group.memory.window is not None for group in groups)
        return cls(patterns, tuple(groups), config.extrapolates and forgets)

    @property
    def memories(self) -> tuple[Memory, ...]:
        return self.patterns.memories

    def group_of(self, layer: int) -> int:
        """Which group a layer is in."""
        kinds = self.patterns.layer_kinds
        return self.patterns.kind_memories[kinds[layer % len(kinds)]]

    def page_bytes(self, page_size: int, itemsize: int) -> list[int]:
        """Bytes of one page of each group, for numbers of `itemsize` bytes."""
        return [group.numbers * page_size * itemsize for group in self.groups]

    def text_bytes(self, length: int, itemsize: int) -> int:
        """Bytes that a text of `length` tokens holds, pages apart."""
        return itemsize * sum(g.numbers * g.memory.positions(length) for g in self.groups)

    def pool_sizes(
        self,
        block_size: int,
        *,
        page_size: int,
        itemsize: int,
        texts: int,
        chunk: int,
        budget: float,
        together: bool = True,
    ) -> list[int] | None:
        """Pages of each group's pool for `texts` full contexts, or for as many as the budget holds.

        Args:
            block_size: the context, which bounds a text unless the model is `endless`.
            chunk: most prompt tokens in a step.
            budget: bytes.
            together: whether texts share the room that a chunk takes beside the window, as under
                a scheduler which runs about one at a time and can preempt; otherwise each has its
                own.

        Returns:
            Null pages included; None if the budget holds not even one.
        """
        tokens = None if self.endless else block_size
        memories = [group.memory for group in self.groups]
        alone = [most_pages(memory, tokens, chunk, page_size) for memory in memories]
        steady, extra = alone, [0] * len(memories)
        if together:
            steady = [most_pages(memory, tokens, 1, page_size) for memory in memories]
            # Together with the steady pages at least what a lone text takes at most.
            extra = [
                pages_for(chunk, page_size) if few < most else 0
                for few, most in zip(steady, alone, strict=True)
            ]
        each = self.page_bytes(page_size, itemsize)

        def pools(share: int) -> list[int]:
            """For `share` / _SHARES texts."""
            return [
                1 + min(share * most // _SHARES, share * few // _SHARES + more)
                for most, few, more in zip(alone, steady, extra, strict=True)
            ]

        def fits(share: int) -> bool:
            return _dot(pools(share), each) <= budget

        low, high = _SHARES, max(1, texts) * _SHARES
        if not fits(low):
            return None
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return pools(low)


def _dot(a: Seq[int], b: Seq[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
