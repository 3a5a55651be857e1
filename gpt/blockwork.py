"""How block-sparse attention lays its tensors out, and the pieces into which it cuts the work.

Queries are (b * K, rows, G * size, D): those of the G heads that share a key head, of one block
row, are the rows of one matrix. Keys are (b * K, t, D). A piece is one block row, or several of a
bucket, for some of the b * K. Where a row is alone its queries are a view, and so are its keys if
they lie side by side; a step of Python counts here, since a row takes only a millisecond or two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.blocks import BlockPlan, Bucket
from gpt.positions import ScoreTerm

SCORES_AT_ONCE = {"cpu": 2**17, "default": 2**26}
"""Scores that are worked on at a time. On CPU, by each thread: 512 KiB of float32, to stay in a
core's cache. Elsewhere enough that a kernel's launch is nothing beside its work."""


@dataclass(frozen=True)
class Extra:
    """What there is besides the pattern; tensors are per sequence, so heads stay together.

    Attributes:
        term: added to the scores.
        q_pos, k_pos: (b|1, t) positions, as the term understands them.
        first_key: (b, t) no query may see a key before this one: where its document begins.
        cap: scaled scores become cap * tanh(scores / cap) before the term is added.
    """

    term: ScoreTerm | None = None
    q_pos: Tensor | None = None
    k_pos: Tensor | None = None
    first_key: Tensor | None = None
    cap: float | None = None

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Learned tensors in the term that want gradients."""
        return () if self.term is None else self.term.tables

    @property
    def per_sequence(self) -> bool:
        return self.term is not None or self.first_key is not None


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of a bucket, worked on at once.

    Attributes:
        rows: (c,) block rows; `row` is the number if it is one alone.
        keys: (c, n); `run` is (first, length) if they lie side by side and the row is alone.
        bias: (size, n), or (c, 1, size, n) if there are several rows.
    """

    rows: Tensor
    row: int | None
    keys: Tensor
    run: tuple[int, int] | None
    bias: Tensor


@lru_cache(maxsize=128)
def pieces(plan: BlockPlan, heads: int, group: int, at_once: int) -> tuple[Piece, ...]:
    """The work on `heads` key heads, each shared by `group` query heads."""
    found: list[Piece] = []
    for bucket in plan.buckets:
        c = max(1, at_once // (heads * group * plan.size * bucket.keys.shape[1]))
        found += (_piece(bucket, i, min(i + c, len(bucket.rows)))
                  for i in range(0, len(bucket.rows), c))  # fmt: skip
    return tuple(found)


def _piece(bucket: Bucket, first: int, end: int) -> Piece:
    rows, keys = bucket.rows[first:end], bucket.keys[first:end]
    if end - first > 1:
        bias = torch.stack(bucket.biases[first:end]).unsqueeze(1)
        return Piece(rows, None, keys, None, bias)
    run = bucket.runs[first]
    span = (run[0], run[1] - run[0]) if run else None
    return Piece(rows, bucket.numbers[first], keys, span, bucket.biases[first])


class Rows:
    """A tensor that has something for each query, (h, rows, …), by block rows."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._each = x.unbind(1)

    def at(self, piece: Piece) -> Tensor:
        """(h * c, …); a view of a row that is alone."""
        if piece.row is not None:
            return self._each[piece.row]
        return self._x.index_select(1, piece.rows).flatten(0, 1)

    def put(self, piece: Piece, value: Tensor) -> None:
        """Store (h * c, …) of several rows."""
        self._x.index_copy_(1, piece.rows, torch.unflatten(value, 0, (-1, len(piece.rows))))


class Keys:
    """A tensor that has something for each key, (h, t, D)."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def at(self, piece: Piece) -> Tensor:
        """(h * c, n, D); a view if the keys lie side by side."""
        if piece.run is not None:
            return self._x.narrow(1, *piece.run)
        found = self._x.index_select(1, piece.keys.flatten())
        return found.view(-1, piece.keys.shape[1], found.shape[-1])

    def add_product(self, piece: Piece, left: Tensor, right: Tensor, alpha: float = 1.0) -> None:
        """Add alpha * left @ right, (h * c, n, D), to the piece's keys."""
        if piece.run is not None:
            self._x.narrow(1, *piece.run).baddbmm_(left, right, alpha=alpha)
        else:
            product = torch.bmm(left, right).view(len(self._x), -1, right.shape[-1])
            self._x.index_add_(1, piece.keys.flatten(), product, alpha=alpha)


@dataclass(frozen=True)
class Square:
    """Room for the scores of a piece, seen in three ways.

    Attributes:
        flat: (h * c, G * size, n).
        turned: (h * c, n, G * size).
        split: (h, G, size, n) for a row alone, (h, c, G, size, n) for several.
    """

    flat: Tensor
    turned: Tensor
    split: Tensor


class Room:
    """Memory for the scores of one piece after the other."""

    def __init__(self, like: Tensor, group: int, size: int) -> None:
        self._room = like.new_empty(0)
        self._group, self._size = group, size
        self._squares: dict[tuple[int, int, int], Square] = {}

    def of(self, heads: int, piece: Piece) -> Square:
        c, n = piece.keys.shape
        found = self._squares.get((heads, c, n))
        if found is None:
            G, size = self._group, self._size
            numbers = heads * c * G * size * n
            if self._room.numel() < numbers:
                self._room = self._room.new_empty(numbers)
                self._squares.clear()
            flat = self._room[:numbers].view(heads * c, G * size, n)
            shape = (heads, G, size, n) if piece.row is not None else (heads, c, G, size, n)
            found = Square(flat, flat.transpose(1, 2), flat.view(shape))
            self._squares[heads, c, n] = found
        return found


class Work:
    """One call: its sizes, and what there is besides the pattern.

    Args:
        shape: (b, H, t, D) of the queries.
        K: key heads.
    """

    def __init__(self, shape: torch.Size, K: int, plan: BlockPlan, extra: Extra) -> None:
        self.b, self.H, self.t, self.D = shape
        self.K, self.G = K, self.H // K
        self.plan, self.extra = plan, extra
        self.size, self.rows = plan.size, plan.rows

    def shares(self, device: str) -> Iterator[tuple[slice, tuple[Piece, ...]]]:
        """As many of the b * K key heads, then block rows, at a time as keep the scores small."""
        at_once = SCORES_AT_ONCE.get(device, SCORES_AT_ONCE["default"])
        if device == "cpu":
            at_once *= torch.get_num_threads()
        widest = max(bucket.keys.shape[1] for bucket in self.plan.buckets)
        # Where something is per sequence, the heads of a sequence stay together.
        unit, units = (self.K, self.b) if self.extra.per_sequence else (1, self.b * self.K)
        most = max(1, min(units, at_once // (unit * self.G * self.size * widest)))
        each = -(-units // -(-units // most)) * unit  # in shares of about equal size
        for first in range(0, units * unit, each):
            share = slice(first, min(first + each, units * unit))
            yield share, pieces(self.plan, share.stop - share.start, self.G, at_once)

    def pack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """(b, H, t, D) → (b * K, rows, G * size, D); what fills up the last row is 0."""
        b, K, G, R, size, D = self.b, self.K, self.G, self.rows, self.size, x.shape[-1]
        if G == 1 and self.t == R * size:  # this is how it lies in memory, perhaps
            return x.to(dtype).contiguous().view(b * K, R, size, D)
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

    def unpack(self, packed: Tensor, dtype: torch.dtype, by: Tensor | None = None) -> Tensor:
        """The inverse of `pack`. What is divided `by` something (like `packed`, or 1 wide) lies in
        memory as (b, t, H, D), as the output projection wants it."""
        b, K, G, R, size = self.b, self.K, self.G, self.rows, self.size
        if by is None and G == 1 and self.t == R * size:
            return packed.view(b, K, self.t, -1).to(dtype)
        x = packed.new_empty((b, self.t, K, G, packed.shape[-1]), dtype=dtype)
        whole = self.t // size
        rest = self.t - whole * size

        def of_whole(y: Tensor) -> Tensor:  # (b, whole, size, K, G, D)
            return y.view(b, K, R, G, size, -1)[:, :, :whole].permute(0, 2, 4, 1, 3, 5)

        def of_rest(y: Tensor) -> Tensor:  # (b, rest, K, G, D)
            return y.view(b, K, R, G, size, -1)[:, :, whole, :, :rest].permute(0, 3, 1, 2, 4)

        into = torch.unflatten(x[:, : whole * size], 1, (whole, size))
        if by is None:
            into.copy_(of_whole(packed))
        else:
            torch.div(of_whole(packed), of_whole(by), out=into)
        if rest:
            part = of_rest(packed)
            x[:, whole * size :] = part if by is None else part / of_rest(by)
        return x.flatten(2, 3).transpose(1, 2)

    # --- Scores ---------------------------------------------------------------------------------

    def hide(self, square: Square, piece: Piece, less: Tensor | None = None) -> None:
        """Begin the scores: -inf where a query may not look, elsewhere minus `less` (like
        `Square.split`, 1 wide)."""
        if less is None:
            square.split.copy_(piece.bias)
        else:
            torch.sub(piece.bias, less, out=square.split)

    def add_extra(
        self, square: Square, q: Tensor, piece: Piece, share: slice, scale: float, unit: float
    ) -> None:
        """Add what there is besides the pattern, in units of 1 / `unit`."""
        if self.extra.term is not None:
            square.flat.add_(self.term(q * scale, piece, share), alpha=unit)
        if self.extra.first_key is not None:
            first = self._of_rows(self.extra.first_key, piece, share)  # (b', c, size)
            outside = piece.keys[:, None] < first.unsqueeze(-1)  # (b', c, size, n)
            c, n = piece.keys.shape
            square.flat.view(-1, self.K, c, self.G, self.size, n).masked_fill_(
                outside[:, None, :, None], float("-inf")
            )

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
