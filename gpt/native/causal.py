"""Causal attention of whole sequences on a processor, with gradients: what training runs on.

torch's fused kernel for processors takes a tile of queries through tiles of keys, each a product
of its own of the library, which small heads are too small for. Ours (`causal.inl`) has products of
its own. `gpt.attention` picks it; it is exact, like torch's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from gpt.native.gradients import call, fields, first_derivative_only
from gpt.native.kernels import Kernels

LONGEST = 1024
"""Tokens up to which it is used."""


class _Causal(ctypes.Structure):
    """`struct Causal` of kernels.cpp."""

    _fields_ = (
        *fields("tensors", "q k v dout out lse dq dk dv"),
        *fields("numbers", "B T H K D q_b q_t q_h k_b k_t k_h v_b v_t v_h"),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int),
    )


def causal_attention(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v, each token over itself and those before.

    Args:
        q: (B, T, H, D).
        k, v: (B, T, K, D); K divides H.

    Returns:
        (B, T, H, D).
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _CausalAttention.apply(q, k, v, scale, kernels)  # type: ignore[no-any-return, no-untyped-call]  # torch gives it no types


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, kernels: Kernels
    ) -> Tensor:
        B, T, H, D = q.shape
        out, lse = q.new_empty(B, T, H, D), q.new_empty(B, H, T)
        call(kernels, "causal", False, _shaped(q, k, v, scale), out=out, lse=lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.kernels = scale, kernels
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        call(
            ctx.kernels, "causal", True, _shaped(q, k, v, ctx.scale),
            out=out, lse=lse, dout=dout.contiguous(), dq=dq, dk=dk, dv=dv,
        )  # fmt: skip
        return dq, dk, dv, None, None


def _shaped(q: Tensor, k: Tensor, v: Tensor, scale: float) -> _Causal:
    B, T, H, D = q.shape
    made = _Causal(B=B, T=T, H=H, K=k.shape[2], D=D, scale=scale)
    for name, x in (("q", q), ("k", k), ("v", v)):
        setattr(made, name, x.data_ptr())
        for letter, stride in zip("bth", x.stride(), strict=False):
            setattr(made, f"{name}_{letter}", stride)
    return made
