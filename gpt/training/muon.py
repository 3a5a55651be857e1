"""Muon for the matrices of the blocks and AdamW for all else, as one optimizer.

A step of Muon moves a matrix by its gradient's running mean with all singular values made about
equal (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024,
kellerjordan.github.io/posts/muon). A gradient is mostly a few large directions; made equal, the
small ones are learned as well. It means something only where a matrix takes one stream to another:
embeddings, the head and vectors are AdamW's.

torch.optim.Muon (torch 2.9 and later) does the matrices alone, so a second optimizer would have to
do the rest; it computes in bf16 on any device, one matrix after the other; and a layer that holds
queries, keys and values in one is one matrix to it. Hence this one. Its Newton-Schulz iteration
takes all matrices of a shape at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer

from gpt.footprint import MUON_AT_ONCE

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5 (Jordan et al.): steep at 0, so that small singular values
grow fast, at the price of ending anywhere in about 0.7 to 1.2 instead of at 1."""

ITERATIONS = 5
MUON, ADAMW = "muon", "adamw"


@torch.no_grad()
def orthogonalize(x: Tensor) -> Tensor:
    """Make all singular values about 1 and keep the singular vectors: U S V^T becomes about U V^T.

    Singular values from 1/500 of the Frobenius norm on arrive in 0.65 to 1.25; smaller ones are on
    their way there, and zero stays zero.

    Args:
        x: (b, M, N) matrices.

    Returns:
        (b, M, N).
    """
    # No singular value may be above 1 at first. The floor keeps a zero gradient zero.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny ** 0.5)
    M, N = x.shape[-2:]
    if max(M, N) >= 2 * min(M, N) and x.dtype != torch.bfloat16:
        factor = _factor(torch.bmm(x, x.mT) if M < N else torch.bmm(x.mT, x))
        return torch.bmm(factor, x) if M < N else torch.bmm(x, factor)
    a, b, c = COEFFICIENTS
    # New memory costs as much as a small product, so two buffers take turns.
    gram = x.new_empty(x.shape[0], min(M, N), min(M, N))
    poly, other = torch.empty_like(gram), torch.empty_like(x)
    for _ in range(ITERATIONS):
        left, right = (x, x.mT) if M <= N else (x.mT, x)
        torch.bmm(left, right, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
        left, right = (poly, x) if M <= N else (x, poly)
        torch.baddbmm(x, left, right, beta=a, out=other)
        x, other = other, x
    return x


def _factor(gram: Tensor) -> Tensor:
    """What the iteration multiplies x by in all, from the products of its rows alone.

    Each turn multiplies x by a polynomial P of x x^T, and so x x^T by P twice: x itself is not
    needed until the end, which spares most of the work where it is long. bf16 is too coarse for it.

    Args:
        gram: (b, M, M), x x^T; is written over.
    """
    a, b, c = COEFFICIENTS
    factor, poly, other = (torch.empty_like(gram) for _ in range(3))
    for i in range(ITERATIONS):
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
        poly.diagonal(dim1=-2, dim2=-1).add_(a)
        if i == 0:
            factor.copy_(poly)
        else:
            torch.bmm(poly, factor, out=other)
            factor, other = other, factor
        if i + 1 < ITERATIONS:
            torch.bmm(poly, gram, out=other)
            torch.bmm(other, poly, out=gram)
    return factor


class MuonAdamW(Optimizer):
    """Groups of kind `muon` and of kind `adamw`, each with its own rate and weight decay.

    A group of kind `muon` also has `momentum`, and `rows`: of how many rows each of the matrices
    is that lie upon one another in its parameters; empty: a parameter is one matrix.

    Sharded parameters (DTensor) are gathered, some at a time, and every process computes the same
    step; what is kept stays sharded.

    Args:
        groups: dicts with `params`, `kind` and settings.
        lr: of groups that name none.
        fused: update all of AdamW's parameters in one kernel.

    Raises:
        ValueError: a group of neither kind, or one of kind `muon` with what is no matrix or whose
            `rows` do not add up.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float = 1e-3, *, fused: bool = False
    ) -> None:
        super().__init__(list(groups), {"lr": lr, "weight_decay": 0.0})
        for group in self.param_groups:
            _check(group)
        # It shares our groups and our state, gives the former its defaults, and keeps nothing.
        rest = self._of_kind(ADAMW)
        self._adamw = AdamW(rest, lr=lr, fused=fused) if rest else None

    def _of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["kind"] == kind]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """One step of both kinds."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self._of_kind(MUON):
            alike: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault(p.shape, []).append(p)
            for shape, params in alike.items():
                some = max(1, MUON_AT_ONCE // shape.numel())
                for i in range(0, len(params), some):
                    self._move(params[i : i + some], group)
        if self._adamw is not None:
            # Loading a state puts others in their place.
            self._adamw.param_groups, self._adamw.state = self._of_kind(ADAMW), self.state
            self._adamw.step()
        return loss

    def _move(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Muon's step for parameters of one shape."""
        grads = [_local(p.grad) for p in params if p.grad is not None]
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        means = [_local(self.state[p]["momentum"]) for p in params]
        torch._foreach_lerp_(means, grads, 1 - group["momentum"])
        # Nesterov's: the newest gradient counts once more.
        found = torch._foreach_lerp(grads, means, group["momentum"])
        whole = [_gathered(update, p) for update, p in zip(found, params, strict=True)]
        updates = equalized(torch.stack(whole), group["rows"])
        here = [_part(update, p) for update, p in zip(updates.unbind(), params, strict=True)]
        weights = [_local(p) for p in params]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, here, alpha=-group["lr"])


def equalized(updates: Tensor, rows: tuple[int, ...] = ()) -> Tensor:
    """Muon's steps at a rate of 1.

    Each is scaled by sqrt(rows / columns) where it has more rows than columns, so that it changes
    what comes out by as much as the numbers that go in, however wide the layer is (Jordan et al.).

    Args:
        updates: (b, M, N) of as many parameters, changed in place.
        rows: of each matrix in a parameter; empty: M.
    """
    N = updates.shape[-1]
    first = 0
    for r, run in itertools.groupby(rows or (updates.shape[1],)):
        last = first + r * len(list(run))
        matrices = updates[:, first:last].view(len(updates), -1, r, N)
        x = orthogonalize(matrices.to(_work_dtype(updates)).reshape(-1, r, N))
        matrices.copy_(x.mul_(max(1.0, r / N) ** 0.5).view(matrices.shape))
        first = last
    return updates


def _work_dtype(x: Tensor) -> torch.dtype:
    """bf16 is enough, but only GPUs are faster with it."""
    if x.device.type == "cuda":
        return torch.bfloat16
    return torch.promote_types(x.dtype, torch.float32)


def _check(group: dict[str, Any]) -> None:
    if group["kind"] not in (MUON, ADAMW):
        raise ValueError(f"a group is of kind {group['kind']!r}, but must be of {MUON} or {ADAMW}")
    if group["kind"] == ADAMW:
        return
    group.setdefault("momentum", 0.95)
    group.setdefault("rows", ())
    for p in group["params"]:
        if p.ndim != 2 or sum(group["rows"]) not in (0, p.shape[0]):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} cannot be matrices of "
                f"{group['rows'] or 'all'} rows"
            )


# --- Sharded parameters -------------------------------------------------------------------------


def _local(x: Tensor) -> Tensor:
    """What this process holds of it, to be changed in place."""
    return x.to_local() if isinstance(x, DTensor) else x


def _gathered(update: Tensor, p: Tensor) -> Tensor:
    """All of an update of which each process has what it has of the parameter."""
    if not isinstance(p, DTensor):
        return update
    spread = DTensor.from_local(
        update, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return spread.full_tensor()


def _part(update: Tensor, p: Tensor) -> Tensor:
    """The inverse of `_gathered`. Nothing is sent: every process has all of it."""
    if not isinstance(p, DTensor):
        return update
    everywhere = [Replicate()] * p.device_mesh.ndim
    whole = DTensor.from_local(update, p.device_mesh, everywhere, run_check=False)
    return whole.redistribute(placements=p.placements).to_local()
