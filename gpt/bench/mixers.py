"""The rows of `antiphon bench attention`: ways to mix the tokens of a sequence.

Each is split into what is given (`Mixer.__init__` makes inputs and weights), what is made once for
a length (`ready`: a mask, a plan) and the work (`forward`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.attention import attend
from gpt.blocks import cut
from gpt.flops import BACKWARD_PER_FORWARD
from gpt.patterns import Causal, Dilated, Fixed, Pattern, SlidingWindow, parse_pattern, trust
from gpt.plan import AttentionPlan

NAIVE_SQUARES = 5
"""Squares of numbers that naive attention holds at once in its backward pass, about."""
WARM_UP_LENGTH = 1024
"""Long enough for every kernel that a longer sequence meets."""

FORWARD, BOTH = "forward", "both"
PHASES = (FORWARD, BOTH)


@dataclass(frozen=True)
class Shape:
    """What is mixed: `batch` sequences of `length` tokens, `heads` queries and `kv_heads` keys and
    values of `width` numbers each."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    width: int
    dtype: str = "float32"
    device: str = "cpu"

    def randn(self, *sizes: int) -> Tensor:
        """A leaf that takes a gradient. Drawn on the CPU: the same everywhere."""
        drawn = torch.randn(*sizes).to(self.device, getattr(torch, self.dtype))
        return drawn.requires_grad_()


class Mixer(Protocol):
    """Attributes:
    given: the tensors that gradients are taken for.
    flops: of the matrix products of a forward pass that are of use.
    """

    given: tuple[Tensor, ...]
    flops: float

    def ready(self) -> None: ...

    def forward(self) -> Tensor: ...


class _Attention:
    """Queries, keys and values at hand; what differs is how they meet."""

    def __init__(self, shape: Shape, pattern: Pattern) -> None:
        B, T, H, K, D = shape.batch, shape.length, shape.heads, shape.kv_heads, shape.width
        self.shape, self.pattern = shape, pattern
        self.q, self.k, self.v = (shape.randn(B, heads, T, D) for heads in (H, K, K))
        self.given: tuple[Tensor, ...] = (self.q, self.k, self.v)
        self.flops = 4.0 * B * H * D * pattern.pairs(T)

    def ready(self) -> None:
        """Nothing is made ahead."""


class Naive(_Attention):
    """Every score is made, masked and held."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, Causal())

    def ready(self) -> None:
        T = self.shape.length
        self.hidden = torch.ones(T, T, dtype=torch.bool, device=self.q.device).triu(1)

    def forward(self) -> Tensor:
        groups = self.shape.heads // self.shape.kv_heads
        k, v = (x.repeat_interleave(groups, dim=1) for x in (self.k, self.v))
        scores = (self.q @ k.transpose(-1, -2)) * self.shape.width**-0.5  # (B, H, T, T)
        weights: Tensor = scores.masked_fill(self.hidden, -torch.inf).softmax(-1)
        return weights @ v


class Fused(_Attention):
    """torch's fused kernel for the causal triangle."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, Causal())

    def forward(self) -> Tensor:
        gqa = self.shape.heads != self.shape.kv_heads
        return F.scaled_dot_product_attention(
            self.q, self.k, self.v, is_causal=True, enable_gqa=gqa
        )


class Patterned(_Attention):
    """A pattern as training has it."""

    def ready(self) -> None:
        shape = self.shape
        plan = AttentionPlan.dense(
            shape.batch, shape.length, pattern=self.pattern, device=shape.device
        )
        self.plan = plan.layer(0)

    def forward(self) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in self.given)
        return attend(q, k, v, self.plan, scale=self.shape.width**-0.5).transpose(1, 2)


class Flex(_Attention):
    """The same pattern by torch's compiled flex_attention, forward alone: it has no gradient on a
    CPU. Its block mask is made from the pattern's predicate."""

    def ready(self) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        T, allowed = self.shape.length, self.pattern.allowed

        def seen(b: Tensor, h: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
            return allowed(q_pos, k_pos)

        self.mask = create_block_mask(seen, None, None, T, T, device=self.shape.device)
        self.compiled = torch.compile(flex_attention, dynamic=False)

    def forward(self) -> Tensor:
        gqa = self.shape.heads != self.shape.kv_heads
        found = self.compiled(self.q, self.k, self.v, block_mask=self.mask, enable_gqa=gqa)
        assert isinstance(found, Tensor)
        return found


class Recurrent:
    """One layer of nn.LSTM or nn.RNN, as wide as the heads together."""

    def __init__(self, shape: Shape, kind: type[nn.LSTM | nn.RNN]) -> None:
        C = shape.heads * shape.width
        self.x = shape.randn(shape.batch, shape.length, C)
        self.net = kind(C, C, batch_first=True).to(self.x)
        self.given: tuple[Tensor, ...] = (self.x, *self.net.parameters())
        matrices = sum(p.numel() for p in self.net.parameters() if p.dim() == 2)
        self.flops = 2.0 * shape.batch * shape.length * matrices

    def ready(self) -> None:
        """Nothing is made ahead."""

    def forward(self) -> Tensor:
        found: Tensor = self.net(self.x)[0]
        return found


def make(row: str, shape: Shape) -> Mixer:
    """The mixer of a row: `naive`, `fused`, `lstm`, `rnn`, `flex PATTERN` or a pattern."""
    if row == "naive":
        return Naive(shape)
    if row == "fused":
        return Fused(shape)
    if row in ("lstm", "rnn"):
        return Recurrent(shape, nn.LSTM if row == "lstm" else nn.RNN)
    if row.startswith("flex "):
        return Flex(shape, parse_pattern(row.removeprefix("flex ")))
    return Patterned(shape, parse_pattern(row))


def flex_can(pattern: Pattern) -> bool:
    """Whether the predicate is plain arithmetic, which flex_attention can trace."""
    return isinstance(pattern, Causal | SlidingWindow | Dilated | Fixed)


def phase_of(mixer: Mixer, phase: str) -> Callable[[], object]:
    """What is timed: `forward` without gradients, or `both` forward and backward."""
    if phase == FORWARD:
        return torch.no_grad()(mixer.forward)
    weight = torch.randn_like(mixer.given[0].detach())  # what comes out is like what goes in
    return lambda: torch.autograd.grad(mixer.forward(), mixer.given, weight)


def flops_of(mixer: Mixer, phase: str) -> float:
    """Of one run of it."""
    return mixer.flops * (1 if phase == FORWARD else 1 + BACKWARD_PER_FORWARD)


def naive_bytes(shape: Shape) -> int:
    """What naive attention needs, about."""
    size = getattr(torch, shape.dtype).itemsize
    return int(NAIVE_SQUARES * shape.batch * shape.heads * shape.length**2 * size)


class Once:
    """One run of a row, for `gpt.bench.memory`: the plan or mask counts, inputs do not."""

    def __init__(self, row: str, phase: str, shape: Shape) -> None:
        self.row, self.phase, self.shape = row, phase, shape

    def prepare(self) -> None:
        trust(self.row if ":" in self.row else ())
        self.mixer = make(self.row, self.shape)

    def warm_up(self) -> None:
        small = replace(self.shape, length=min(self.shape.length, WARM_UP_LENGTH))
        mixer = make(self.row, small)
        mixer.ready()
        phase_of(mixer, self.phase)()
        cut.cache_clear()  # or a plan of this length would be there already

    def __call__(self) -> None:
        self.mixer.ready()
        phase_of(self.mixer, self.phase)()
