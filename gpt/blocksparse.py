"""Attention over block rows (`gpt.blocks`): time and memory follow the pattern, not the square.

A row of `size` queries meets the keys it is given in two matrix products, and is done with before
the next begins, so its scores stay in the processor's cache and nothing of size T x T ever exists:

    S = scale * q k^T + term      m = max S     P = exp(S - m)     l = sum P     out = P v / l

The backward pass does not keep P. As in FlashAttention (Dao et al., arXiv 2205.14135, section 3.1)
it is computed again from the saved log-sum-exp L = m + log l, and with D = sum(dout * out):

    P  = exp(S - L)     dS = P * (dout v^T - D)
    dq = scale * dS k     dk = scale * dS^T q     dv = P^T dout

Everything is counted in powers of two (S is multiplied by log2 e, and exp is `exp2`), which torch
computes in half the time. Heads that share a key head are rows of one product, so keys are never
repeated. bfloat16 and float16 are computed in float32: a score rounded to bfloat16 is off by more
than the probabilities that come of it are worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt.blocks import BlockPlan, Bucket

LOG2E = math.log2(math.e)

SCORES_AT_ONCE = {"cpu": 2**17, "default": 2**26}
"""Scores that are worked on at a time. On CPU, by each thread: 512 KiB of float32, to stay in a
core's cache. Elsewhere enough that a kernel's launch is nothing beside its work."""


class Term(Protocol):
    """Something that a position scheme adds to the scores."""

    def __call__(self, q: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """q (b, H, t, D), already scaled; q_pos (b|1, t); k_pos (b|1, s) → (b|1, H, t, s)."""


@dataclass(frozen=True)
class Extra:
    """What there is besides the pattern; tensors are per sequence, so heads stay together.

    Attributes:
        term: added to the scores.
        tables: learned tensors in the term that want gradients.
        q_pos, k_pos: (b|1, t) positions, as the term understands them.
        first_key: (b, t) no query may see a key before this one: where its document begins.
    """

    term: Term | None = None
    tables: tuple[Tensor, ...] = ()
    q_pos: Tensor | None = None
    k_pos: Tensor | None = None
    first_key: Tensor | None = None

    @property
    def per_sequence(self) -> bool:
        return self.term is not None or self.first_key is not None


@torch.compiler.disable  # type: ignore[untyped-decorator]
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
        return _BlockSparse.apply(q, k, v, plan, scale, extra, *extra.tables)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class Piece:
    """Some rows of a bucket, worked on at once.

    Attributes:
        rows: (c,) block rows; `row` is the number if it is one alone.
        keys: (c, n); `run` is (first, length) if they lie side by side and the row is alone.
        bias: (c, 1, size, n).
    """

    rows: Tensor
    row: int | None
    keys: Tensor
    run: tuple[int, int] | None
    bias: Tensor

    def queries(self, x: Tensor) -> Tensor:
        """(h * c, G * size, D) of (h, rows, G * size, D); a view if it is one row."""
        if self.row is not None:
            return x.select(1, self.row)
        return x.index_select(1, self.rows).flatten(0, 1)

    def put_queries(self, x: Tensor, value: Tensor) -> None:
        x.index_copy_(1, self.rows, torch.unflatten(value, 0, (-1, len(self.rows))))

    def of_keys(self, x: Tensor) -> Tensor:
        """(h * c, n, D) of (h, t, D); a view if they lie side by side."""
        if self.run is not None:
            return x.narrow(1, *self.run)
        return x.index_select(1, self.keys.flatten()).view(-1, self.keys.shape[1], x.shape[-1])

    def add_product(self, x: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> None:
        """Add alpha * left @ right, (h * c, n, D), to the keys of x (h, t, D)."""
        if self.run is not None:
            x.narrow(1, *self.run).baddbmm_(left, right, alpha=alpha)
        else:
            product = torch.bmm(left, right).view(len(x), -1, x.shape[-1])
            x.index_add_(1, self.keys.flatten(), product, alpha=alpha)


class _Work:
    """The tensors of one call, laid out for batched products, and the pieces they are cut into.

    Queries are (b * K, rows, G * size, D): those of the G heads that share a key head, of one block
    row, are the rows of one matrix. Keys are (b * K, t, D).
    """

    def __init__(self, shape: torch.Size, K: int, plan: BlockPlan, extra: Extra) -> None:
        self.b, self.H, self.t, self.D = shape
        self.K, self.G = K, self.H // K
        self.plan, self.extra = plan, extra
        self.size, self.rows = plan.size, plan.rows

    def pack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(b, H, t, D) → (b * K, rows, G * size, D); what fills up the last row is 0."""
        b, K, G, R, size, D = self.b, self.K, self.G, self.rows, self.size, x.shape[-1]
        packed = x.new_empty((b, K, R, G, size, D), dtype=dtype)
        x = torch.unflatten(x, 1, (K, G))  # (b, K, G, t, D)
        whole = self.t // size
        into = packed[:, :, :whole].transpose(2, 3)  # (b, K, G, whole, size, D)
        into.copy_(torch.unflatten(x[:, :, :, : whole * size], 3, (whole, size)))
        if whole < R:
            rest = self.t - whole * size
            packed[:, :, whole, :, :rest].copy_(x[:, :, :, whole * size :])
            packed[:, :, whole, :, rest:].zero_()
        return packed.view(b * K, R, G * size, D)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of `pack`. In memory (b, t, H, D), as the output projection wants it."""
        b, K, G, R, size = self.b, self.K, self.G, self.rows, self.size
        D = packed.shape[-1]
        x = packed.new_empty((b, self.t, K, G, D), dtype=dtype)
        packed = packed.view(b, K, R, G, size, D)
        whole = self.t // size
        # (b, whole, size, K, G, D)
        into = torch.unflatten(x[:, : whole * size], 1, (whole, size))
        into.copy_(packed[:, :, :whole].permute(0, 2, 4, 1, 3, 5))
        if whole < R:
            rest = self.t - whole * size
            x[:, whole * size :].copy_(packed[:, :, whole, :, :rest].permute(0, 3, 1, 2, 4))
        return x.flatten(2, 3).transpose(1, 2)

    def shares(self, device: str) -> Iterator[tuple[slice, list[Piece]]]:
        """As many heads, then rows, at a time as keep the scores small."""
        at_once = SCORES_AT_ONCE.get(device, SCORES_AT_ONCE["default"])
        if device == "cpu":
            at_once *= torch.get_num_threads()
        widest = max(bucket.keys.shape[1] for bucket in self.plan.buckets)
        # Sequences by heads; where something is per sequence its heads stay together.
        unit, units = (self.K, self.b) if self.extra.per_sequence else (1, self.b * self.K)
        most = max(1, min(units, at_once // (unit * self.G * self.size * widest)))
        each = -(-units // -(-units // most)) * unit  # in shares of about equal size
        for first in range(0, units * unit, each):
            share = slice(first, min(first + each, units * unit))
            at_most = at_once // (share.stop - share.start)
            yield share, [p for bucket in self.plan.buckets for p in self._cut(bucket, at_most)]

    def _cut(self, bucket: Bucket, at_most: int) -> Iterator[Piece]:
        r, n = bucket.keys.shape
        c = max(1, at_most // (self.G * self.size * n))
        for first in range(0, r, c):
            end = min(first + c, r)
            alone = end - first == 1
            run = bucket.runs[first] if alone else None
            bias = bucket.biases[first : first + 1] if alone else bucket.biases[first:end]
            yield Piece(
                bucket.rows[first:end],
                bucket.numbers[first] if alone else None,
                bucket.keys[first:end],
                (run[0], run[1] - run[0]) if run else None,
                bias[0][None, None] if alone else torch.stack(bias).unsqueeze(1),
            )

    def scores(
        self, q: Tensor, k: Tensor, piece: Piece, share: slice, scale: float, out: Tensor,
        less: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """log2 e times the piece's scores less `less`, (h * c, G * size, n); -inf where hidden."""
        S = _front(out, q.shape[0], q.shape[1], k.shape[1])
        c, n = piece.keys.shape
        by_query = S.view(-1, c, self.G, self.size, n)
        if less is None:
            by_query.copy_(piece.bias)
        else:
            torch.sub(piece.bias, less.view(-1, c, self.G, self.size, 1), out=by_query)
        S.baddbmm_(q, k.transpose(1, 2), alpha=scale * LOG2E)
        if self.extra.term is not None:
            S.add_(self.term(q * scale, piece, share), alpha=LOG2E)
        if self.extra.first_key is not None:
            first = self._of_rows(self.extra.first_key, piece, share)  # (b', c, size)
            outside = piece.keys[:, None] < first.unsqueeze(-1)  # (b', c, size, n)
            torch.unflatten(by_query, 0, (-1, self.K)).masked_fill_(
                outside[:, None, :, None], float("-inf")
            )
        return S

    # --- A term sees (sequence and row, head, query, key) ---------------------------------------

    def term(self, q: Tensor, piece: Piece, share: slice) -> Tensor:
        """The term for scaled queries (h * c, G * size, D): (h * c, G * size, n)."""
        extra, c = self.extra, len(piece.rows)
        b = len(q) // (self.K * c)
        assert extra.term is not None
        assert extra.q_pos is not None
        assert extra.k_pos is not None
        q_pos = self._of_rows(extra.q_pos, piece, share)  # (b|1, c, size)
        k_pos = self._sequences(extra.k_pos, share)[:, piece.keys]  # (b|1, c, n)
        if c > 1 or len(q_pos) != len(k_pos):  # the batch that the term is shown is b * c
            q_pos, k_pos = q_pos.expand(b, -1, -1), k_pos.expand(b, -1, -1)
        found = extra.term(self.by_sequence(q, c), q_pos.flatten(0, 1), k_pos.flatten(0, 1))
        return self.by_head(found, c, b)

    def by_sequence(self, x: Tensor, c: int) -> Tensor:
        """(h * c, G * size, m) → (b * c, H, size, m)."""
        x = x.view(-1, self.K, c, self.G, self.size, x.shape[-1])
        return x.transpose(1, 2).flatten(0, 1).flatten(1, 2)

    def by_head(self, x: Tensor, c: int, b: int) -> Tensor:
        """The inverse of `by_sequence`, for b sequences; a batch of 1 stands for all."""
        x = x.expand(b * c, -1, -1, -1).reshape(b, c, self.K, self.G * self.size, x.shape[-1])
        return x.transpose(1, 2).reshape(-1, self.G * self.size, x.shape[-1])

    def _sequences(self, x: Tensor, share: slice) -> Tensor:
        """The share's sequences of (b, t); all of (1, t)."""
        return x if len(x) == 1 else x[share.start // self.K : share.stop // self.K]

    def _of_rows(self, x: Tensor, piece: Piece, share: slice) -> Tensor:
        """(b'|1, c, size) of (b|1, t); what fills up the last row is 0."""
        x = F.pad(self._sequences(x, share), (0, self.rows * self.size - self.t))
        return torch.unflatten(x, 1, (self.rows, self.size)).index_select(1, piece.rows)


def _front(buffer: Tensor, *shape: int) -> Tensor:
    """The first numbers of a flat buffer, in this shape."""
    return buffer[: math.prod(shape)].view(shape)


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, extra: Extra,
        *tables: Tensor,
    ) -> Tensor:  # fmt: skip
        work = _Work(q.shape, k.shape[1], plan, extra)
        ctx.dtypes = (q.dtype, k.dtype, v.dtype)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        Q = work.pack(q, dtype)
        K, V = (x.flatten(0, 1).to(dtype).contiguous() for x in (k, v))  # (b * K, t, D)
        out = torch.empty_like(Q)
        lse = Q.new_empty((*Q.shape[:-1], 1))  # in powers of two
        buffer = _Buffer(Q)
        for share, pieces in work.shares(q.device.type):
            Qh, Kh, Vh, out_h, lse_h = (x[share] for x in (Q, K, V, out, lse))
            for piece in pieces:
                q, k, v = piece.queries(Qh), piece.of_keys(Kh), piece.of_keys(Vh)
                P = work.scores(q, k, piece, share, scale, buffer.of(q, k))
                top = P.amax(-1, keepdim=True)
                P.sub_(top).exp2_()
                total = P.sum(-1, keepdim=True)
                if piece.row is not None:
                    torch.bmm(P, v, out=piece.queries(out_h)).div_(total)
                    torch.add(top, total.log2_(), out=piece.queries(lse_h))
                else:
                    piece.put_queries(out_h, torch.bmm(P, v).div_(total))
                    piece.put_queries(lse_h, top.add_(total.log2_()))
        ctx.work, ctx.scale, ctx.tables = work, scale, tables
        ctx.save_for_backward(Q, K, V, out, lse)
        return work.unpack(out, ctx.dtypes[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        work, scale, tables = ctx.work, ctx.scale, ctx.tables
        Q, K, V, out, lse = ctx.saved_tensors
        dout = work.pack(grad, Q.dtype)
        dQ, dK, dV = torch.empty_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        shared = torch.mul(dout, out, out=dQ).sum(-1, keepdim=True).neg_()  # -D of the formulas
        d_tables = [torch.zeros_like(table) for table in tables]
        first, second = _Buffer(Q), _Buffer(Q)
        for share, pieces in work.shares(Q.device.type):
            Qh, Kh, Vh, dout_h, lse_h = (x[share] for x in (Q, K, V, dout, lse))
            shared_h, dQh, dKh, dVh = (x[share] for x in (shared, dQ, dK, dV))
            for piece in pieces:
                q, k, v = piece.queries(Qh), piece.of_keys(Kh), piece.of_keys(Vh)
                do, less = piece.queries(dout_h), piece.queries(lse_h)
                P = work.scores(q, k, piece, share, scale, first.of(q, k), less).exp2_()
                piece.add_product(dVh, P.transpose(1, 2), do)
                dS = _front(second.of(q, k), *P.shape).copy_(piece.queries(shared_h))
                dS.baddbmm_(do, v.transpose(1, 2)).mul_(P)
                piece.add_product(dKh, dS.transpose(1, 2), q, alpha=scale)
                if piece.row is not None:
                    dq = piece.queries(dQh).baddbmm_(dS, k, beta=0, alpha=scale)
                else:
                    dq = torch.bmm(dS, k).mul_(scale)
                if work.extra.term is not None:
                    found = _term_gradients(work, piece, share, q * scale, dS, tables)
                    dq.add_(found[0], alpha=scale)
                    for total, part in zip(d_tables, found[1:], strict=True):
                        total.add_(part)
                if piece.row is None:
                    piece.put_queries(dQh, dq)
        q_type, k_type, v_type = ctx.dtypes
        shape = (work.b, work.K, work.t, work.D)
        return (
            work.unpack(dQ, q_type), dK.view(shape).to(k_type), dV.view(shape).to(v_type),
            None, None, None, *d_tables,
        )  # fmt: skip


def _term_gradients(
    work: _Work, piece: Piece, share: slice, q: Tensor, dS: Tensor, tables: tuple[Tensor, ...]
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


class _Buffer:
    """Room for the scores of one piece after the other."""

    def __init__(self, like: Tensor) -> None:
        self._room = like.new_empty(0)

    def of(self, q: Tensor, k: Tensor) -> Tensor:
        need = q.shape[0] * q.shape[1] * k.shape[1]
        if self._room.numel() < need:
            self._room = self._room.new_empty(need)
        return self._room
