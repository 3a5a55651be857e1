"""What each layer's cache must keep, and which layers keep it together. Pure Python, no torch.

A layer declares by its pattern what it must remember (`Pattern.memory`): every position, or a
window of the latest and perhaps the first few. Layers that remember the same form a group with a
pool of pages and, for each sequence, a block table of their own, also if they look at it through
different patterns:

    pattern [window:256, dilated:64:4, causal]   layer  0 1 2 3 4 5 …
                                                 group  0 1 2 0 1 2 …      the last 256, 253, all

**State.** Layers with short convolutions (`gpt.conv`) need the inputs of the last few tokens
besides. That is a group of its own, the last one, of all layers: it remembers a window of the
convolutions' width, but of the tokens in a page only the last few are kept, so its pages are small,
and its pool has as many as the largest of the others. What may be found again as keys and values
can then be found as state, too.

**The seam for layers that keep no keys.** A recurrent form of attention (kernel features, a
compressed memory) has a `state` of so many bytes a sequence, whatever the length, and could be a
group of that kind: `CacheGroup.numbers` per page, and a window of one. What a page of it holds is
the state at the page's end. Admission, preemption, the prefix cache and the plan go by groups
already. No such pattern is offered today.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from gpt.config import GPTConfig
from gpt.pages import most_pages, pages_for
from gpt.patterns import LayerPatterns, Memory, parse_patterns

_SHARES = 1024
"""Pools are sized in fractions of a sequence this fine."""


def ring(conv_width: int, page_size: int) -> int:
    """Tokens of a page whose inputs the state keeps."""
    return min(conv_width - 1, page_size)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that remember the same.

    Attributes:
        memory: what they remember.
        layers: their numbers.
        numbers: keys and values of one token, over all of these layers; of a state, the inputs.
        conv_width: of the convolutions whose state this is; 0: it is keys and values.
    """

    memory: Memory
    layers: tuple[int, ...]
    numbers: int
    conv_width: int = 0

    def __str__(self) -> str:
        layers = f"{len(self.layers)} layer{'s' * (len(self.layers) > 1)}"
        if self.conv_width:
            return f"convolutions of {layers}"
        return f"{layers} with {self.memory}"

    def page_tokens(self, page_size: int) -> int:
        """Tokens of which a page holds something."""
        return ring(self.conv_width, page_size) if self.conv_width else page_size

    def kept(self, length: int) -> int:
        """Tokens of which something is kept, of a text of `length`."""
        if self.conv_width:
            return min(length, self.conv_width - 1)
        return self.memory.positions(length)


@dataclass(frozen=True)
class CacheSpec:
    """The cache of a model.

    Attributes:
        patterns: who may look at whom; parsed here once, for the plans.
        groups: what is kept; in the order of `patterns.memories`, the state of convolutions last.
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
        width = config.conv_width
        if width:
            numbers = 2 * config.n_layer * config.d_model
            layers = tuple(range(config.n_layer))
            groups.append(CacheGroup(Memory(width), layers, numbers, width))
        forgets = all(group.memory.window is not None for group in groups)
        return cls(patterns, tuple(groups), config.extrapolates and forgets)

    @property
    def memories(self) -> tuple[Memory, ...]:
        """What each group remembers."""
        return tuple(group.memory for group in self.groups)

    @property
    def conv_width(self) -> int:
        return self.groups[-1].conv_width

    def group_of(self, layer: int) -> int:
        """Which group a layer's keys and values are in."""
        kinds = self.patterns.layer_kinds
        return self.patterns.kind_memories[kinds[layer % len(kinds)]]

    def page_bytes(self, page_size: int, itemsize: int) -> list[int]:
        """Bytes of one page of each group, for numbers of `itemsize` bytes."""
        return [group.numbers * group.page_tokens(page_size) * itemsize for group in self.groups]

    def text_bytes(self, length: int, itemsize: int) -> int:
        """Bytes that a text of `length` tokens holds, pages apart."""
        return itemsize * sum(group.numbers * group.kept(length) for group in self.groups)

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
            found = [
                1 + min(share * most // _SHARES, share * few // _SHARES + more)
                for most, few, more in zip(alone, steady, extra, strict=True)
            ]
            if self.conv_width:
                found[-1] = max(found)
            return found

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
