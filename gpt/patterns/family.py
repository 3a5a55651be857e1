"""The patterns of the literature, each with its predicate, its spans and what it remembers.

    query ↓ key →   causal     window:3   window:2+  dilated:   fixed:4:1  bigbird
                                          sinks:1    2:2
    0               ▪          ▪          ▪          ▪          ▪          a window, the first
    1               ▪▪         ▪▪         ▪▪         ·▪         ▪▪         tokens, and a few
    2               ▪▪▪        ▪▪▪        ▪▪▪        ▪·▪        ▪▪▪        blocks of 64 drawn
    3               ▪▪▪▪       ·▪▪▪       ▪·▪▪       ·▪·▪       ▪▪▪▪       for each block of
    4               ▪▪▪▪▪      ··▪▪▪      ▪··▪▪      ··▪·▪      ···▪▪      queries
    5               ▪▪▪▪▪▪     ···▪▪▪     ▪···▪▪     ···▪·▪     ···▪▪▪

`antiphon attention show PATTERN` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from gpt.patterns.base import Memory, Pattern, merge

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Causal(Pattern):
    """Everything up to and including itself (Vaswani et al., arXiv 1706.03762, section 3.2.3)."""

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos <= q_pos

    def spans(self, first: int, last: int) -> Sequence[range]:
        return [range(last + 1)]

    @property
    def sees_memory(self) -> bool:
        return True

    @property
    def causal_until(self) -> int:
        return 2**63 - 1

    @property
    def relative(self) -> bool:
        return True

    def pairs(self, length: int) -> int:
        return length * (length + 1) // 2


@dataclass(frozen=True)
class SlidingWindow(Pattern):
    """Itself and the `width - 1` positions before it, and the first `sinks` positions of all.

    The window is Longformer's (Beltagy et al., arXiv 2004.05150, section 3.1), and so are the first
    tokens that everybody may look at ("global attention"; under a causal mask, what such a token
    sees in turn is what stands before it). StreamingLLM (Xiao et al., arXiv 2309.17453) found that
    a model which generates past its window needs them: softmax must put its weight somewhere, and
    learns to put what is left over on the first tokens, the "sinks".

    Unlike in StreamingLLM, sinks keep their absolute positions. They are a mask, not a renumbering,
    and so the cached and the uncached model agree.
    """

    width: int
    sinks: int = 0

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        near = q_pos - k_pos < self.width
        if self.sinks:
            near = near | (k_pos < self.sinks)
        return (k_pos <= q_pos) & near

    def spans(self, first: int, last: int) -> Sequence[range]:
        sinks = range(min(self.sinks, last + 1))
        return merge([sinks, range(max(0, first - self.width + 1), last + 1)])

    @property
    def memory(self) -> Memory:
        return Memory(self.width, self.sinks)

    @property
    def sees_memory(self) -> bool:
        return True

    @property
    def causal_until(self) -> int:
        return self.width + self.sinks

    @property
    def relative(self) -> bool:
        return self.sinks == 0

    def pairs(self, length: int) -> int:
        """A triangle, then a band."""
        reach = min(length, self.width + self.sinks)
        return reach * (reach + 1) // 2 + (length - reach) * reach


@dataclass(frozen=True)
class Dilated(Pattern):
    """`width` positions at distances 0, `step`, 2 * `step`, …: a window with gaps (Longformer,
    arXiv 2004.05150, section 3.1).

    A token sees only those whose position leaves the same remainder by `step`, so the tokens fall
    into `step` classes, in each of which the pattern is a plain window. Layers of other kinds must
    mix the classes.
    """

    width: int
    step: int

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        back = q_pos - k_pos
        return (back >= 0) & (back < self.width * self.step) & (back % self.step == 0)

    def spans(self, first: int, last: int) -> Sequence[range]:
        if first == last:
            oldest = max(first - (self.width - 1) * self.step, first % self.step)
            return [range(oldest, last + 1, self.step)]
        return [range(max(0, first - (self.width - 1) * self.step), last + 1)]

    @property
    def memory(self) -> Memory:
        return Memory((self.width - 1) * self.step + 1)

    @property
    def causal_until(self) -> int:
        return self.width if self.step == 1 else 1

    @property
    def relative(self) -> bool:
        return True

    @property
    def residues(self) -> tuple[int, Pattern] | None:
        return (self.step, SlidingWindow(self.width)) if self.step > 1 else None

    def pairs(self, length: int) -> int:
        long, short = length % self.step, self.step - length % self.step
        inner = SlidingWindow(self.width)
        each = length // self.step
        return long * inner.pairs(each + 1) + short * inner.pairs(each)


@dataclass(frozen=True)
class Fixed(Pattern):
    """The own block, and the last `last` positions of every earlier block of `block` (Child et al.,
    "Sparse Transformers", arXiv 1904.10509, section 4.3, the fixed form).

    The last positions of a block gather what was in it, and later blocks read it there. With a
    block of about the root of the length, the pairs grow as its power 3/2.
    """

    block: int
    last: int

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        own = k_pos // self.block == q_pos // self.block
        return (k_pos <= q_pos) & (own | (k_pos % self.block >= self.block - self.last))

    def spans(self, first: int, last: int) -> Sequence[range]:
        begin = first // self.block * self.block
        ends = range(self.block, begin + 1, self.block)
        return merge([*(range(end - self.last, end) for end in ends), range(begin, last + 1)])

    @property
    def causal_until(self) -> int:
        return self.block

    def pairs(self, length: int) -> int:
        def of(n: int) -> int:  # the block's own triangle
            return n * (n + 1) // 2

        whole, rest = divmod(length, self.block)
        earlier = self.block * self.last * (whole * (whole - 1) // 2) + rest * self.last * whole
        return whole * of(self.block) + of(rest) + earlier


@dataclass(frozen=True)
class BigBird(Pattern):
    """A window, the first `sinks` tokens, and `random` blocks of `BLOCK` keys drawn for each block
    of queries among those that are wholly in its past (Zaheer et al., arXiv 2007.14062, section 2),
    in a causal form.

    Which blocks are drawn depends on the seed and the block of queries alone, not on the length, so
    a text that grows keeps what its tokens saw.
    """

    width: int
    sinks: int
    random: int
    seed: int = 0

    BLOCK = 64

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        import torch

        near = (q_pos - k_pos < self.width) | (k_pos < self.sinks)
        q_block, k_block = q_pos // self.BLOCK, k_pos // self.BLOCK
        if self.random:
            rows = int(q_block.max()) + 1 if q_block.numel() else 1
            drawn = torch.tensor(
                [
                    self._drawn(row) + (-1,) * (self.random - len(self._drawn(row)))
                    for row in range(rows)
                ],
                device=q_block.device,
            )  # fmt: skip  (rows, random); -1: fewer blocks than that are past
            for choice in drawn[q_block.clamp(min=0)].unbind(-1):
                near = near | (k_block == choice)
        return (k_pos <= q_pos) & near

    def spans(self, first: int, last: int) -> Sequence[range]:
        rows = range(first // self.BLOCK, last // self.BLOCK + 1)
        drawn = {block for row in rows for block in self._drawn(row)}
        return merge([
            range(min(self.sinks, last + 1)),
            *(range(block * self.BLOCK, (block + 1) * self.BLOCK) for block in drawn),
            range(max(0, first - self.width + 1), last + 1),
        ])  # fmt: skip

    @property
    def causal_until(self) -> int:
        return self.width + self.sinks

    def _drawn(self, q_block: int) -> tuple[int, ...]:
        return _draw(self.seed, self.random, q_block)


@lru_cache(maxsize=2**16)
def _draw(seed: int, count: int, n: int) -> tuple[int, ...]:
    """`count` distinct numbers below n (all of them if there are no more), the same everywhere."""
    if n <= count:
        return tuple(range(n))
    drawn: list[int] = []
    state = _mix(_mix(seed) ^ n)
    # Floyd's way to draw without repetition: one number each, no list of n.
    for top in range(n - count, n):
        state = _mix(state)
        choice = state % (top + 1)
        drawn.append(top if choice in drawn else choice)
    return tuple(sorted(drawn))


def _mix(x: int) -> int:
    """One step of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators")."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31
