"""Attention over block rows (`gpt.blocks`): time and memory follow the pattern, not the square.

A row of `size` queries meets the keys it is given in two matrix products, and is done with before
the next begins, so its scores stay in the processor's cache and nothing of size T x T ever exists:

    S = scale * q k^T + term      m = max S     P = exp(S - m)     l = sum P     out = P v / l

The backward pass does not keep P. As in FlashAttention (Dao et al., arXiv 2205.14135, section 3.1)
it is computed again from the saved log-sum-exp L = m + log l, and with D = sum(dout * out):

    P  = exp(S - L)     dS = P * (dout v^T - D)
    dq = scale * dS k     dk = scale * dS^T q     dv = P^T dout

Everything is counted in powers of two (S is multiplied by log2 e, and exp is `exp2`), which torch
computes in half the time. A soft-cap (`gpt.softcap`) makes c tanh(s / c) of scaled scores s ahead
of the term, and dq and dk take its slope, 1 - tanh**2, besides. Heads that share a key head are
rows of one product, so keys are never repeated. bfloat16 and float16 are computed in float32: a
score rounded to bfloat16 is off by more than the probabilities that come of it are worth.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt.blocks import BlockPlan
from gpt.blockwork import Extra, Keys, Piece, Room, Rows, Square, Work

LOG2E = math.log2(math.e)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, extra: Extra | None = None
) -> Tensor:
    """Softmax attention of whole sequences under a pattern.

    Args:
        q: (b, H, t, D).
        k, v: (b, K, t, D); query head h reads key head h // (H / K).
        scale: multiplies the scores.
        extra: a term that is added to them, borders of documents.

    Returns:
        (b, H, t, D).
    """
    extra = extra or Extra()
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    with torch.autocast(device, enabled=False):
        # torch gives `apply` no types
        return _BlockSparse.apply(q, k, v, plan, scale, extra, *extra.tables)  # type: ignore[no-any-return, no-untyped-call]


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, extra: Extra,
        *tables: Tensor,
    ) -> Tensor:  # fmt: skip
        work = Work(q.shape, k.shape[1], plan, extra)
        dtypes = (q.dtype, k.dtype, v.dtype)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        Q = work.pack(q, dtype)
        K, V = (x.flatten(0, 1).to(dtype).contiguous() for x in (k, v))  # (b * K, t, D)
        out = torch.empty_like(Q)  # P v, not yet divided
        top = Q.new_empty((*Q.shape[:-1], 1))
        total = torch.empty_like(top)
        room = Room(Q, work.G, work.size)
        for share, pieces in work.shares(q.device.type):
            q_rows, out_rows, tops, totals = (Rows(x[share]) for x in (Q, out, top, total))
            all_k, all_v = Keys(K[share]), Keys(V[share])
            for piece in pieces:
                q, k, v = q_rows.at(piece), all_k.at(piece), all_v.at(piece)
                square = room.of(share.stop - share.start, piece)
                P = _scores(work, square, q, k, piece, share, scale)
                if piece.row is not None:
                    P.sub_(torch.amax(P, -1, keepdim=True, out=tops.at(piece))).exp2_()
                    torch.sum(P, -1, keepdim=True, out=totals.at(piece))
                    torch.bmm(P, v, out=out_rows.at(piece))
                else:
                    m = P.amax(-1, keepdim=True)
                    P.sub_(m).exp2_()
                    tops.put(piece, m)
                    totals.put(piece, P.sum(-1, keepdim=True))
                    out_rows.put(piece, torch.bmm(P, v))
        ctx.work, ctx.scale, ctx.tables, ctx.dtypes = work, scale, tables, dtypes
        lse = top.add_(total.log2())  # of base two
        ctx.save_for_backward(Q, K, V, out, total, lse)
        return work.unpack(out, dtypes[0], by=total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        work, scale, tables = ctx.work, ctx.scale, ctx.tables
        Q, K, V, out, total, lse = ctx.saved_tensors
        dout = work.pack(grad, Q.dtype)
        dQ, dK, dV = torch.empty_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        # -D of the formulas above
        shared = torch.mul(dout, out, out=dQ).sum(-1, keepdim=True).div_(total).neg_()
        d_tables = [torch.zeros_like(table) for table in tables]
        lse = lse.view(*lse.shape[:2], work.G, work.size, 1)
        p_room, ds_room = Room(Q, work.G, work.size), Room(Q, work.G, work.size)
        for share, pieces in work.shares(Q.device.type):
            q_rows, dq_rows, do_rows = (Rows(x[share]) for x in (Q, dQ, dout))
            lses, shares = Rows(lse[share]), Rows(shared[share])
            all_k, all_v, dk, dv = (Keys(x[share]) for x in (K, V, dK, dV))
            heads = share.stop - share.start
            for piece in pieces:
                q, k, v, do = (x.at(piece) for x in (q_rows, all_k, all_v, do_rows))
                square, slope = p_room.of(heads, piece), ds_room.of(heads, piece)
                less = lses.at(piece)
                if piece.row is None:
                    less = less.view(*slope.split.shape[:-1], 1)
                P = _scores(work, square, q, k, piece, share, scale, less, slope).exp2_()
                # Of the cap, while the room is still the slope's.
                bent = None if work.extra.cap is None else slope.flat.square().neg_().add_(1)
                dv.add_product(piece, square.turned, do)
                dS = slope.flat.copy_(shares.at(piece))
                dS.baddbmm_(do, v.transpose(1, 2)).mul_(P)
                of_term = None
                if work.extra.term is not None:
                    of_term, *found = _term_gradients(work, piece, share, q * scale, dS, tables)
                    for table, part in zip(d_tables, found, strict=True):
                        table.add_(part)
                if bent is not None:
                    dS.mul_(bent)
                dk.add_product(piece, slope.turned, q, alpha=scale)
                if piece.row is not None:
                    dq = dq_rows.at(piece).baddbmm_(dS, k, beta=0, alpha=scale)
                else:
                    dq = torch.bmm(dS, k).mul_(scale)
                if of_term is not None:
                    dq.add_(of_term, alpha=scale)
                if piece.row is None:
                    dq_rows.put(piece, dq)
        q_type, k_type, v_type = ctx.dtypes
        shape = (work.b, work.K, work.t, work.D)
        return (
            work.unpack(dQ, q_type), dK.view(shape).to(k_type), dV.view(shape).to(v_type),
            None, None, None, *d_tables,
        )  # fmt: skip


def _scores(
    work: Work,
    square: Square,
    q: Tensor,
    k: Tensor,
    piece: Piece,
    share: slice,
    scale: float,
    less: Tensor | None = None,
    slope: Square | None = None,
) -> Tensor:
    """log2 e times the piece's scores minus `less`, -inf where a query may not look.

    Args:
        slope: room for the tanh of scores that are capped; None: nobody asks for it.
    """
    cap = work.extra.cap
    if cap is None:
        work.hide(square, piece, less)
        square.flat.baddbmm_(q, k.transpose(1, 2), alpha=scale * LOG2E)
    else:
        into = (square if slope is None else slope).flat
        bent = torch.bmm(q, k.transpose(1, 2), out=into).mul_(scale / cap).tanh_()
        capped = bent.mul(cap * LOG2E)
        work.hide(square, piece, less)
        square.flat.add_(capped)
    work.add_extra(square, q, piece, share, scale, LOG2E)
    return square.flat


def _term_gradients(
    work: Work, piece: Piece, share: slice, q: Tensor, dS: Tensor, tables: tuple[Tensor, ...]
) -> list[Tensor]:
    """Compute the piece's term again, this time with a graph, and go back through it to the scaled
    queries and the tables."""
    with torch.enable_grad():
        wanted = [q.detach().requires_grad_(), *tables]
        term = work.term(wanted[0], piece, share)
        if not term.requires_grad:
            return [torch.zeros_like(x) for x in wanted]
        found = torch.autograd.grad(term, wanted, dS, allow_unused=True)
    return [torch.zeros_like(x) if d is None else d for x, d in zip(wanted, found, strict=True)]
