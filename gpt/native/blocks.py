"""Blocks of a model in few calls: what lies between two attentions is two or three, for few tokens.

A decode step of one token is made of products that take a tenth of a millisecond each, and of small
things between them: norms, sums, a bend. Each of those is a call through Python and torch, whose
code the weights have driven out of the processor's caches meanwhile, so it takes as long as reading
a megabyte. Here they are done where rows enter and leave the products:

    norm, queries, keys, values             one call
    norms and turns of queries and keys     one, if there are such
    attention                               `Attention.mix`, as always
    out, sum, norm, up, bend, down, sum     one call
"""

from __future__ import annotations

import ctypes
from typing import cast

from torch import Tensor, nn

from gpt.attention import Attention
from gpt.cache import LayerCache
from gpt.model import MLP, Block, Tokens
from gpt.native.kernels import DTYPES, Kernels, Product, prepared
from gpt.native.linear import RoutedLinear, plainly
from gpt.norms import RMSNorm
from gpt.plan import LayerPlan
from gpt.rotary import RotaryTable

BENDS = ("gelu", "relu2", "swiglu")
"""Of `MLP.kind`, those that the kernels know."""


class Steps:
    """A block's products, prepared once: what is called often must be found ready.

    Attributes:
        until: most rows for which this is the way to go.
    """

    def __init__(self, block: Block, kernels: Kernels, until: int) -> None:
        attn, mlp = block.attn, block.mlp
        self._kernels, self.until, self.dtype = kernels, until, attn.qkv.weight.dtype
        self._before = (Product * 1)(_product(attn.qkv, block.norm_attn))
        self._behind = (Product * 3)(
            _product(attn.out, scale=block.scale),
            _product(mlp.up, block.norm_mlp),
            _product(mlp.down, bend=mlp.kind, onto_y_of=0, scale=block.scale),
        )
        self._heads = (attn.sizes[0], attn.sizes[1], attn.head_dim)
        self._norms = None
        if attn.q_norm is not None and attn.k_norm is not None:
            weights = (attn.q_norm.weight.detach(), attn.k_norm.weight.detach())
            self._norms = (*weights, cast(float, attn.q_norm.eps))
        # Kept, so that no address is ever of memory that was given back.
        self._kept = [p.detach() for p in block.parameters()]
        parts = list(block.modules())
        self._parts = [
            (part._modules, name, child) for part in parts for name, child in part._modules.items()
        ]
        self._addresses = [
            (part._parameters, name, p.data_ptr())
            for part in parts
            for name, p in part._parameters.items()
            if p is not None
        ]
        self._hooks = [
            hooks
            for part in parts
            if part is not block
            for hooks in (part._forward_hooks, part._forward_pre_hooks)
        ]

    def __deepcopy__(self, memo: object) -> None:
        """None: a copy of the block has weights of its own, and goes torch's way."""

    def hold(self) -> bool:
        """Whether the block is still what it was, so that these are its products."""
        for parts, name, child in self._parts:
            if parts.get(name) is not child:
                return False
        for own, name, address in self._addresses:
            p = own.get(name)
            if p is None or p.data_ptr() != address:
                return False
        return True

    def suit(self, x: Tensor) -> bool:
        """Whether this is the way to go for rows x, (..., C)."""
        if not plainly(x, self.dtype) or x.numel() > self.until * x.shape[-1]:
            return False
        return x.is_contiguous() and not any(self._hooks)  # nobody looks on at what is not called

    def enter(self, x: Tensor) -> Tensor:
        """The stream's rows, to queries, keys and values."""
        return self._run(self._before, x)

    def turn(self, qkv: Tensor, rotary: RotaryTable | None) -> None:
        """Norm queries and keys, and turn them by their positions, in place."""
        if self._norms is None and rotary is None:
            return
        table = None
        if rotary is not None:
            lead = (*qkv.shape[:-1], 1, rotary.cos.shape[-1])  # of all tokens, where they share one
            cos, sin = (each.expand(lead).contiguous() for each in rotary[:2])
            table = (cos, sin, rotary.interleaved)
        self._kernels.turn(qkv, self._heads, self._norms, table)

    def leave(self, y: Tensor, x: Tensor) -> Tensor:
        """What attention made of them, and the rows themselves, to the stream behind the block."""
        return self._run(self._behind, y, x)

    def _run(self, steps: ctypes.Array[Product], x: Tensor, onto: Tensor | None = None) -> Tensor:
        own = type(steps).from_buffer_copy(steps)  # another thread may be in the same block
        y = x.new_empty((*x.shape[:-1], own[-1].N))
        self._kernels.chain(own, x, y, onto)
        return y


class RoutedBlock(Block):
    """A block that goes this way for few rows."""

    steps: Steps | None

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTable | None,
        plan: LayerPlan,
        cache: LayerCache | None,
        tokens: Tokens,
    ) -> Tensor:
        steps = self.steps
        if steps is None or self.training or not steps.suit(x):
            return super().forward(x, rotary, plan, cache, tokens)
        if not steps.hold():
            self.steps = None  # with what it keeps; `route_blocks` makes another
            return super().forward(x, rotary, plan, cache, tokens)
        qkv = steps.enter(x)
        steps.turn(qkv, rotary)
        y = self.attn.mix(*self.attn.heads(qkv), plan, cache, tokens.ids)
        return steps.leave(y, x)


def route_blocks(model: nn.Module, kernels: Kernels, until: int) -> int:
    """Have the blocks of a model go this way.

    Returns:
        How many do: some architectures have something between the products that is not known here.
    """
    routed = 0
    for block in model.modules():
        if type(block) not in (Block, RoutedBlock):
            continue
        if not _known(cast(Block, block)):
            block.__class__ = Block
            continue
        steps = Steps(cast(Block, block), kernels, until)
        block.__class__ = RoutedBlock
        cast(RoutedBlock, block).steps = steps
        routed += 1
    return routed


def _known(block: Block) -> bool:
    attn, mlp = block.attn, block.mlp
    between = (block.conv_attn, block.conv_mlp, block.stream_scale, block.x0_scale)
    if not block.pre or any(part is not None for part in between) or mlp.kind not in BENDS:
        return False
    if type(attn) is not Attention or type(mlp) is not MLP:
        return False
    for norm in (block.norm_attn, block.norm_mlp):
        if type(norm) not in (RMSNorm, nn.LayerNorm) or norm.weight is None or norm.eps is None:
            return False
    # Not what is derived of them: an adapter adds something of its own.
    linears = (attn.qkv, attn.out, mlp.up, mlp.down)
    if not all(type(each) in (nn.Linear, RoutedLinear) for each in linears):
        return False
    tensors = list(block.parameters())
    alike = {(p.dtype, p.device.type) for p in tensors}
    return (
        len(alike) == 1
        and tensors[0].dtype in DTYPES
        and tensors[0].device.type == "cpu"
        and all(p.is_contiguous() for p in tensors)
    )


def _product(
    linear: nn.Linear,
    norm: nn.Module | None = None,
    *,
    bend: str = "",
    onto_y_of: int = -1,
    scale: float = 1.0,
) -> Product:
    if norm is None:
        return prepared(linear.weight, linear.bias, before=bend, onto_y_of=onto_y_of, scale=scale)
    assert isinstance(norm, RMSNorm | nn.LayerNorm)
    kind = "layernorm" if isinstance(norm, nn.LayerNorm) else "rmsnorm"
    values = (norm.weight, getattr(norm, "bias", None), cast(float, norm.eps))
    return prepared(linear.weight, linear.bias, before=kind, norm=values)
