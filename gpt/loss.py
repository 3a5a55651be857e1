"""The loss of a language model without its logits: cross-entropy a few tokens at a time.

Logits are tokens × vocabulary numbers, in float32 and several times over (logits, probabilities,
their gradient). With a vocabulary of 50,257 a batch of 4 × 1,024 tokens makes 0.8 GB of each. Only
three things of them are ever wanted: the sum of the losses, its gradient by the stream, and by the
head's matrix. All three are sums over tokens, so they are made share by share, and each share's
logits are gone, and were still in the processor's cache, before the next one's are made:

    z = x W^T        loss = sum of logsumexp(z) - z[target]
    dz = softmax(z) - onehot(target), 0 where the target is ignored
    dx = dz W        dW = sum of dz^T x

The gradients are made together with the loss, so z is computed once; the backward pass multiplies
them by the number that it is given. (Liger kernel, arXiv 2410.10989, section 3.2; Wijmans et al.,
"Cut your losses", arXiv 2411.09009, computes z twice to hold less.) Products are in the type that
autocast says, everything else and every sum over shares is in float32 or better.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt.shares import in_shares, share_tokens

IGNORE = -100
"""A target that counts for nothing; the default `ignore_index` of torch's cross-entropy."""


def total_nats(
    x: Tensor, weight: Tensor, targets: Tensor, *, softcap: float | None = None, share: int = 0
) -> Tensor:
    """The sum over all targets of the negative log-likelihood.

    Args:
        x: (N, C) the stream that the head reads.
        weight: (V, C) the head's.
        targets: (N,) int64; IGNORE counts for nothing.
        softcap: logits become `c * tanh(logits / c)`.
        share: tokens at a time; 0: as the size says, perhaps all.
    """
    device, V = x.device.type, len(weight)
    if not share and not in_shares(len(x), V, device):
        logits = cap(F.linear(x, weight), softcap)
        return F.cross_entropy(_exact(logits), targets, ignore_index=IGNORE, reduction="sum")
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not wanted:
        return token_nats(x, weight, targets, softcap=softcap, share=share).sum()
    found: Tensor = _by_shares(x, weight, targets, softcap, share or share_tokens(V, device))
    return found


def token_nats(
    x: Tensor, weight: Tensor, targets: Tensor, *, softcap: float | None = None, share: int = 0
) -> Tensor:
    """(N,) of each target, 0 where it is ignored. As `total_nats`, but no memory is spared where a
    gradient is wanted."""
    device, V = x.device.type, len(weight)
    if not share and not in_shares(len(x), V, device):
        return _each(x, weight, targets, softcap)
    found: Tensor = _each_by_shares(x, weight, targets, softcap, share or share_tokens(V, device))
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it would write the loop out
def _each_by_shares(
    x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, share: int
) -> Tensor:
    shares = _shares(len(x), share)
    return torch.cat([_each(x[few], weight, targets[few], softcap) for few in shares])


def _each(x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    logits = cap(F.linear(x, weight), softcap)
    return F.cross_entropy(_exact(logits), targets, ignore_index=IGNORE, reduction="none")


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits within ±softcap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _shares(n: int, share: int) -> Iterator[slice]:
    return (slice(first, min(first + share, n)) for first in range(0, n, share))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
def _by_shares(
    x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, share: int
) -> Tensor:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    with torch.autocast(device, enabled=False):
        # torch gives `apply` no types
        return _Nats.apply(x, weight, targets, softcap, share, dtype)  # type: ignore[no-any-return, no-untyped-call]  # torch gives it no types


class _Nats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, share: int,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        by_x, by_weight = ctx.needs_input_grad[:2]
        exact = torch.promote_types(dtype, torch.float32)
        w, inputs = weight.to(dtype), x.to(dtype)
        dx = torch.empty_like(x) if by_x else None
        dw = torch.zeros_like(weight, dtype=exact) if by_weight else None
        total = torch.zeros((), dtype=exact, device=x.device)
        for few in _shares(len(x), share):
            inp, target = inputs[few], targets[few]
            z = (inp @ w.t()).to(exact)
            bent = None
            if softcap is not None:
                bent = z.div_(softcap).tanh_()
                z = bent * softcap
            counts = target != IGNORE
            at = torch.where(counts, target, 0)[:, None]
            lse = z.logsumexp(-1, keepdim=True)
            total += (lse - z.gather(-1, at)).masked_fill_(~counts[:, None], 0).sum()
            dz = z.sub_(lse).exp_()
            dz.scatter_add_(-1, at, dz.new_full(at.shape, -1.0))
            if bent is not None:
                dz.mul_(bent.square_().neg_().add_(1))
            if not bool(counts.all()):
                dz.mul_(counts[:, None])
            g = dz.to(dtype)
            if dx is not None:
                dx[few] = g @ w
            if dw is not None and dtype == exact:
                dw.addmm_(g.t(), inp)
            elif dw is not None:
                dw += g.t() @ inp
        ctx.save_for_backward(*(d for d in (dx, dw) if d is not None))
        ctx.types = (x.dtype, weight.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        found = [
            # Not in place: a graph that is kept may be gone through again.
            (saved.pop(0) * grad).to(dtype) if wanted else None
            for wanted, dtype in zip(ctx.needs_input_grad[:2], ctx.types, strict=True)
        ]
        return (*found, None, None, None, None)
