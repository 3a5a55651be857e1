"""What a training step does besides its large products, as kernels with gradients of their own.

torch makes a root-mean-square norm, a turn by the position, a squared ReLU and a short convolution
of up to ten passes over memory each, and of more for the gradients. In a small model on a processor
they took as long as the products. The kernels (`gradients.inl`) take one or two.

Whoever has such a step asks `suit` first and has torch's operations beside it, which say what is
computed: the tests hold the kernels to them. They are for float32 on a CPU, while gradients are
wanted; what generates reads its norms along with its products (`gpt.native.blocks`). The
norms of queries and keys are not called then, nor are their hooks.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gpt.native import kernels as native
from gpt.native.heap import keep_freed_memory
from gpt.native.kernels import Kernels


def fields(kind: str, names: str) -> tuple[tuple[str, Any], ...]:
    types = {"tensors": ctypes.c_void_p, "numbers": ctypes.c_int64}
    return tuple((name, types[kind]) for name in names.split())


class _Normed(ctypes.Structure):
    """`struct Normed` of kernels.cpp."""

    _fields_ = (
        *fields("tensors", "x weight dy y factors dx dweight"),
        *fields("numbers", "M C"),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int),
    )


class _Convolved(ctypes.Structure):
    """`struct Convolved` of kernels.cpp."""

    _fields_ = (
        *fields("tensors", "x weight dy y dx dweight positions"),
        *fields("numbers", "M T C k"),
        ("threads", ctypes.c_int),
    )


class _Turned(ctypes.Structure):
    """`struct Turned` of kernels.cpp."""

    _fields_ = (
        *fields("tensors", "rows drows q k v q_weight k_weight factors dweights cos sin"),
        *fields("numbers", "M H K D pairs period"),
        ("eps", ctypes.c_float),
        ("interleaved", ctypes.c_int),
        ("threads", ctypes.c_int),
    )


def get_ready() -> Kernels | None:
    """Have what trains on this processor, in this process, run through the kernels, and keep the
    memory that its steps free. None: there are none."""
    keep_freed_memory()
    return native.load()


def suit(x: Tensor, *weights: Tensor | None) -> Kernels | None:
    """The kernels, if a step from x to x's gradient can run through them; None: use torch."""
    if torch.compiler.is_compiling():
        return None  # first, as the compiler cannot look into the questions below
    kernels = native.current()
    if (
        kernels is None
        or not torch.is_grad_enabled()
        or not all(is_plain(each) for each in (x, *weights) if each is not None)
        or torch.is_autocast_enabled("cpu")
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # torch says nothing of it
        or torch._C._functorch.peek_interpreter_stack() is not None  # vmap, func.grad and the like
        or forward_ad._current_level >= 0
    ):
        return None
    return kernels


def is_plain(x: Tensor) -> bool:
    """Whether x is float32 numbers in this machine's memory, and none of torch's special tensors,
    whose memory says nothing of them."""
    kind = type(x) is Tensor or type(x) is torch.nn.Parameter
    return kind and x.dtype == torch.float32 and x.device.type == "cpu" and not x.is_neg()


def first_derivative_only(
    backward: Callable[..., tuple[Tensor | None, ...]],
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Refuse to be differentiated. torch's `once_differentiable` does so only where the gradient
    that comes in needs one, and is silently wrong where it is a constant."""

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "the kernels of training have no second derivatives; set ANTIPHON_NATIVE=off, or "
                "call gpt.native.kernels.use(None), and torch's operations are used"
            )
        return backward(ctx, *gradients)

    return checked


def call(kernels: Kernels, name: str, back: bool, structure: Any, **given: Any) -> None:
    """A kernel's forward or backward, with tensors and numbers by name."""
    for key, value in given.items():
        if isinstance(value, Tensor):
            value = value.data_ptr()
        setattr(structure, key, value)
    structure.threads = torch.get_num_threads()
    getattr(kernels, name)(kernels.level, back, ctypes.addressof(structure))


# --- Norm ----------------------------------------------------------------------------------------


def rms_norm(kernels: Kernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, (C,) of which weight is."""
    return _RMSNorm.apply(x, weight, eps, kernels)  # type: ignore[no-any-return, no-untyped-call]  # torch gives it no types


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernels: Kernels) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        M, C = x.numel() // x.shape[-1], x.shape[-1]
        y, factors = torch.empty_like(x), x.new_empty(M)
        call(
            kernels, "norm", False, _Normed(),
            x=x, weight=weight, y=y, factors=factors, M=M, C=C, eps=eps,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, factors)
        ctx.kernels = kernels
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, factors = ctx.saved_tensors
        dy, dx = dy.contiguous(), torch.empty_like(x)
        dweight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        call(
            ctx.kernels, "norm", True, _Normed(),
            x=x, weight=weight, dy=dy, factors=factors, dx=dx, dweight=dweight,
            M=len(factors), C=x.shape[-1],
        )  # fmt: skip
        return dx, dweight, None, None


# --- Convolution ---------------------------------------------------------------------------------


def convolve(kernels: Kernels, x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Each token and those before it, as `gpt.conv.ShortConv` mixes them.

    Args:
        x: (B, T, C).
        weight: (C, 1, k).
        positions: (T,), or (B, T) within documents; within one they rise by 1 from token to token.
    """
    within = positions.contiguous() if positions.ndim > 1 else None
    return _Convolve.apply(x, weight, within, kernels)  # type: ignore[no-any-return, no-untyped-call]  # torch gives it no types


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, positions: Tensor | None, kernels: Kernels
    ) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        T, C = x.shape[-2:]
        y = torch.empty_like(x)
        call(
            kernels, "convolve", False, _Convolved(),
            x=x, weight=weight, y=y, positions=positions,
            M=x.numel() // C, T=T, C=C, k=weight.shape[-1],
        )  # fmt: skip
        ctx.save_for_backward(x, weight, positions)
        ctx.kernels = kernels
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, positions = ctx.saved_tensors
        T, C = x.shape[-2:]
        dy = dy.contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dweight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        call(
            ctx.kernels, "convolve", True, _Convolved(),
            x=x, weight=weight, dy=dy, dx=dx, dweight=dweight, positions=positions,
            M=x.numel() // C, T=T, C=C, k=weight.shape[-1],
        )  # fmt: skip
        return dx, dweight, None, None


# --- Squared ReLU --------------------------------------------------------------------------------


def square_relu(kernels: Kernels, x: Tensor) -> Tensor:
    """max(x, 0)^2"""
    return _SquareReLU.apply(x, kernels)  # type: ignore[no-any-return, no-untyped-call]  # torch gives it no types


class _SquareReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Kernels) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        return _squared(kernels, x, None)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return _squared(ctx.kernels, x, dy.contiguous()), None


def _squared(kernels: Kernels, x: Tensor, dy: Tensor | None) -> Tensor:
    y, given = torch.empty_like(x), None if dy is None else dy.data_ptr()
    threads = torch.get_num_threads()
    kernels.square_relu(kernels.level, x.data_ptr(), given, y.data_ptr(), x.numel(), threads)
    return y


# --- Dropout -------------------------------------------------------------------------------------


def add_dropped(
    kernels: Kernels, x: Tensor | None, branch: Tensor, p: float, scale: float = 1.0
) -> Tensor:
    """x, or 0, plus scale times what dropout with probability p leaves of a branch.

    torch's own draws each number for itself and keeps them all; here one is drawn, the seed, from
    the same generator.
    """
    seed = int(torch.randint(2**63 - 1, ()))
    return _AddDropped.apply(x, branch, seed, p, scale / (1 - p), kernels)  # type: ignore[no-any-return, no-untyped-call]  # torch gives it no types


class _AddDropped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor | None, branch: Tensor, seed: int, p: float, factor: float,
        kernels: Kernels,
    ) -> Tensor:  # fmt: skip
        ctx.settings = seed, p, factor, kernels
        return _dropped(None if x is None else x.contiguous(), branch.contiguous(), *ctx.settings)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = dy if ctx.needs_input_grad[0] else None
        return dx, _dropped(None, dy.contiguous(), *ctx.settings), None, None, None, None


def _dropped(
    x: Tensor | None, branch: Tensor, seed: int, p: float, factor: float, kernels: Kernels
) -> Tensor:
    y, onto, threads = torch.empty_like(branch), None, torch.get_num_threads()
    if x is not None:
        onto = x.data_ptr()
    kernels.drop(
        kernels.level, onto, branch.data_ptr(), y.data_ptr(), y.numel(), seed, p, factor, threads
    )
    return y


# --- Queries, keys and values --------------------------------------------------------------------


class Heads(NamedTuple):
    """How a row of queries, keys and values is taken apart.

    Attributes:
        H, K, D: query heads, key and value heads, their width.
        eps: of the norms, if there are weights for them.
        interleaved: which numbers of a head are a pair (`gpt.rotary`).
    """

    H: int
    K: int
    D: int
    eps: float
    interleaved: bool


def take_apart(
    kernels: Kernels,
    qkv: Tensor,
    heads: Heads,
    norms: tuple[Tensor, Tensor] | None,
    table: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normed and turned, and values, each a tensor of its own.

    Args:
        qkv: (..., (H + 2 K) * D).
        norms: weights (D,) for queries and for keys; None: they are not normed.
        table: cosines and sines, (..., 1, pairs), of each token or of those of a sequence; None:
            they are not turned.

    Returns:
        (..., H, D), (..., K, D), (..., K, D).
    """
    weights, angles = norms or (None, None), table or (None, None)
    return _TakeApart.apply(qkv, *weights, *angles, heads, kernels)  # type: ignore[no-any-return, no-untyped-call]  # torch gives it no types


class _TakeApart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None,
        cos: Tensor | None, sin: Tensor | None, heads: Heads, kernels: Kernels,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        H, K, D = heads[:3]
        qkv, lead = qkv.contiguous(), qkv.shape[:-1]
        q, k, v = (qkv.new_empty(*lead, n, D) for n in (H, K, K))
        M = q.numel() // (H * D)
        factors = None
        if q_weight is not None and k_weight is not None:
            q_weight, k_weight = q_weight.contiguous(), k_weight.contiguous()
            factors = qkv.new_empty(M, H + K)
        if cos is not None and sin is not None:
            cos, sin = cos.contiguous(), sin.contiguous()
        # Without norms the gradients need no inputs.
        ctx.save_for_backward(
            qkv if factors is not None else None, q_weight, k_weight, cos, sin, factors
        )
        ctx.heads, ctx.kernels, ctx.shape = heads, kernels, qkv.shape
        call(
            kernels, "take_apart", False, _turned(heads, M, cos), rows=qkv, q=q, k=k, v=v,
            q_weight=q_weight, k_weight=k_weight, factors=factors, cos=cos, sin=sin,
        )  # fmt: skip
        return q, k, v

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, cos, sin, factors = ctx.saved_tensors
        heads: Heads = ctx.heads
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
        dqkv, dweights = dq.new_empty(ctx.shape), None
        if any(ctx.needs_input_grad[1:3]):
            dweights = dq.new_empty(2, heads.D)
        M = dq.numel() // (heads.H * heads.D)
        call(
            ctx.kernels, "take_apart", True, _turned(heads, M, cos),
            rows=qkv, drows=dqkv, q=dq, k=dk, v=dv, q_weight=q_weight, k_weight=k_weight,
            factors=factors, dweights=dweights, cos=cos, sin=sin,
        )  # fmt: skip
        of_q, of_k = (None, None) if dweights is None else dweights
        return dqkv, of_q, of_k, None, None, None, None


def _turned(heads: Heads, M: int, cos: Tensor | None) -> _Turned:
    made = _Turned(M=M, H=heads.H, K=heads.K, D=heads.D, period=1)
    made.eps, made.interleaved = heads.eps, heads.interleaved
    if cos is not None:
        made.pairs, made.period = cos.shape[-1], cos.numel() // cos.shape[-1]
    return made
