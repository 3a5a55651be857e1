"""Block rows: which keys a few dozen neighbouring queries look at, so that no others are touched.

A kernel that computes every score and hides most of them costs T^2 whatever the pattern. Here the
queries are cut into block rows of `size`, and each row is given the list of keys that any of its
queries may see (`Pattern.spans`). Only those are read. Rows that look at equally many keys form a
bucket: they can run side by side without padding each other, and a row that sees everything does
not inflate the rest.

    window:5, size 4                  row 0  ▪▪▪▪                     keys  0..3
    T = 16                            row 1  ▪▪▪▪▪▪▪▪                 keys  0..7
                                      row 2      ▪▪▪▪▪▪▪▪             keys  4..11
                                      row 3          ▪▪▪▪▪▪▪▪         keys  8..15

Where a row's keys are not for each of its queries, the predicate's mask says so. Masks of equal
content are kept once (the inner rows of a window all have the same), so a plan takes memory in
proportion to the length; it is shared over layers, batch and heads, and kept for the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gpt.patterns import Pattern

SIZES = (64, 128)
"""Queries of a block row, to choose from. Smaller ones compute less in vain at the edges of a
pattern, larger ones need fewer steps."""

WORTH = 1.25
"""How many times the scores larger rows may compute: measured at 8,192 tokens, 8 heads of 64 and a
window of 256, where rows of 128 compute 1.2 times as much, they take 0.8 of the time on two threads
and 1.1 on one."""

ALIGN = 16
"""Rows look at a multiple of this many keys: vector registers hold up to 16 numbers."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Block rows that look at equally many keys.

    Attributes:
        rows: (r,) their numbers; `numbers` on the host.
        keys: (r, n) the keys each looks at; what pads a row is hidden.
        biases: of each row, (size, n): -inf where a query may not look and 0 elsewhere, to which
            the scores are added. Rows may share one.
        runs: of each row, its keys as (first, end) if they lie side by side: they are then read in
            place.
    """

    rows: Tensor
    numbers: tuple[int, ...]
    keys: Tensor
    biases: tuple[Tensor, ...]
    runs: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """A pattern over `time` tokens, as block rows.

    Attributes:
        size: queries a row; the last row is filled up with queries that see all of its keys.
        buckets: together they hold every row once.
    """

    pattern: Pattern
    time: int
    size: int
    buckets: tuple[Bucket, ...]

    @property
    def rows(self) -> int:
        return -(-self.time // self.size)

    @property
    def scores(self) -> int:
        """How many scores a head computes."""
        return sum(bucket.keys.numel() for bucket in self.buckets) * self.size


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
def sparse_plan(
    pattern: Pattern, time: int, device: torch.device | str, most: float
) -> BlockPlan | None:
    """The block rows of a pattern over `time` tokens; None if they compute more than `most` of the
    square."""
    finest = cut(pattern, time, SIZES[0], torch.device(device))
    return block_plan(pattern, time, device) if finest.scores <= most * time * time else None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
def block_plan(pattern: Pattern, time: int, device: torch.device | str = "cpu") -> BlockPlan:
    """The block rows of a pattern over `time` tokens, of the size that suits it."""
    small, *larger = (cut(pattern, time, size, torch.device(device)) for size in SIZES)
    chosen: BlockPlan = small
    for plan in larger:
        if plan.scores <= WORTH * small.scores:
            chosen = plan
    return chosen


@lru_cache(maxsize=64)
def cut(pattern: Pattern, time: int, size: int, device: torch.device | None = None) -> BlockPlan:
    """The block rows of this size; kept, since training asks every step."""
    known: dict[object, Tensor] = {}
    by_width: dict[int, list[tuple[int, Tensor, Tensor, tuple[int, int] | None]]] = {}
    for row in range(-(-time // size)):
        first = row * size
        spans = _widen(pattern.spans(first, min(first + size, time) - 1))
        keys = torch.cat([torch.arange(s.start, s.stop, s.step) for s in spans])
        n = len(keys)
        run = (spans[0].start, spans[0].stop) if len(spans) == 1 and spans[0].step == 1 else None
        if run is None:
            n = -(-n // ALIGN) * ALIGN
        # Where only distances count, rows that lie alike look alike.
        whole = run is not None and first + size <= time
        alike = (spans[0].start - first, n) if pattern.relative and whole else None
        bias = known.get(alike) if alike else None
        if bias is None:
            hidden = _hidden(pattern, first, size, time, keys, n)
            made = torch.zeros(size, n).masked_fill_(hidden, float("-inf")).to(device)
            bias = known.setdefault((n, hidden.numpy().tobytes()), made)
            if alike:
                known[alike] = bias
        padded = torch.cat([keys, keys[:1].expand(n - len(keys))])
        by_width.setdefault(n, []).append((row, padded, bias, run))
    buckets = tuple(
        Bucket(
            torch.tensor([row for row, _, _, _ in members], device=device),
            tuple(row for row, _, _, _ in members),
            torch.stack([keys for _, keys, _, _ in members]).to(device),
            tuple(bias for _, _, bias, _ in members),
            tuple(run for _, _, _, run in members),
        )
        for members in by_width.values()
    )
    return BlockPlan(pattern, time, size, buckets)


def _widen(spans: Sequence[range]) -> list[range]:
    """A lone run, grown to the left to a multiple of ALIGN keys if there is room."""
    if len(spans) == 1 and spans[0].step == 1:
        start, stop = spans[0].start, spans[0].stop
        missing = (start - stop) % ALIGN
        return [range(start - missing if missing <= start else start, stop)]
    return list(spans)


def _hidden(pattern: Pattern, first: int, size: int, time: int, keys: Tensor, n: int) -> Tensor:
    """(size, n) bool, True where a query of the row may not look."""
    queries = torch.arange(first, first + size)[:, None]
    hidden = torch.ones(size, n, dtype=torch.bool)
    hidden[:, : len(keys)] = ~pattern.seen(queries, keys)
    hidden[time - first :] = False  # there is no such query; it must see something, or it is NaN
    return hidden
