"""AttentionPlan: what one forward knows about its tokens before any layer runs.

Built on the host once a forward and shared by all layers. It answers three questions for
`gpt.attention.attend`: where in the cache do the new keys go, which rows attend together, and what
may they see. Training hands in one dense group; serving hands in whatever mix of prefill chunks and
decode steps the scheduler chose. Attention itself never asks which of the two it is.

Layers may differ in pattern. Those of one pattern see the same and share a `LayerPlan`, which is
all that `attend` needs; the `AttentionPlan` holds one for each kind and says which layer has which:

    pattern [window:256, window:256, causal]    layer  0 1 2 3 4 5 6 …
                                                kind   0 0 1 0 0 1 0 …

Within a kind, tokens are sorted into groups that go through one kernel call each:

    tokens   a a a a a a | b | c | d d          N = 10: a prefill chunk, two decodes, a chunk
    groups   0 0 0 0 0 0 | 1 | 1 | 2 2          b and c see contexts of like length: one group
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt.blocks import block_plan, sparse_plan
from gpt.conv import ShiftPlan, shift_plan
from gpt.groups import Group, LayerPlan
from gpt.paged import Chunk, paged_plans
from gpt.patterns import Causal, LayerPatterns, Pattern

__all__ = ["AttentionPlan", "Chunk", "Group", "LayerPlan"]

SPARSE_FROM = 512
"""Sequences from this length on are run by block rows if their pattern leaves out enough. Below,
one masked call of the fused kernel is as fast (measured on CPU: 12 against 15 ms at 256 tokens,
8 heads of 64, forward and backward; level at 512 with a window of half the length)."""

SPARSE_SHARE = 0.5
"""Largest share of the square that block rows may compute: at that they cost as much as the fused
kernel under a mask, which computes all of it."""


@dataclass(frozen=True)
class AttentionPlan:
    """Attributes:
    positions: absolute position of each token: (N,) for a paged plan, (T,) for a dense one, (B, T)
        for a packed one.
    kinds: one plan for each distinct pattern.
    layer_kinds: which of them each layer takes; repeats if there are more layers.
    logit_rows: (M,) the tokens whose logits are wanted; None: all of them.
    shift: of a paged plan, where short convolutions find the inputs of earlier tokens.
    """

    positions: Tensor
    kinds: tuple[LayerPlan, ...]
    layer_kinds: tuple[int, ...] = (0,)
    logit_rows: Tensor | None = None
    shift: ShiftPlan | None = None

    def layer(self, index: int) -> LayerPlan:
        """The plan of layer `index`, counted from 0."""
        return self.kinds[self.layer_kinds[index % len(self.layer_kinds)]]

    def with_bias(self, bias: Callable[[Tensor, Tensor], Tensor]) -> AttentionPlan:
        """The plan with a term for the scores that every layer shares, made once for all of them.

        Groups in block rows are left as they are: their kernel makes the term block by block.

        Args:
            bias: from the positions of queries (b or 1, t) and keys (b or 1, s), (b or 1, H, t, s).
        """
        kinds = []
        for kind in self.kinds:
            groups = tuple(
                group
                if group.blocks is not None
                else replace(group, bias=group.hide(bias(group.q_pos, group.k_pos)))
                for group in kind.groups
            )
            kinds.append(replace(kind, groups=groups))
        return replace(self, kinds=tuple(kinds))

    def by_block_rows(self, shortest: int) -> AttentionPlan:
        """The plan with whole causal sequences from `shortest` tokens on in block rows, which make
        a term of the scores row by row where the fused kernel wants all of it at once."""
        kinds = []
        for kind in self.kinds:
            groups = tuple(
                replace(g, causal=False, blocks=block_plan(Causal(), g.t, g.q_pos.device))
                if g.causal and kind.slots is None and g.t >= shortest
                else g
                for g in kind.groups
            )
            kinds.append(replace(kind, groups=groups))
        return replace(self, kinds=tuple(kinds))

    @classmethod
    def dense(
        cls,
        batch: int,
        time: int,
        *,
        pattern: Pattern | LayerPatterns,
        device: torch.device | str = "cpu",
    ) -> AttentionPlan:
        """`batch` whole sequences of `time` tokens, nothing cached: training, evaluation.

        Args:
            pattern: of all layers, or those of each; so for every constructor.
        """
        distinct, layer_kinds = _kinds(pattern)
        positions = torch.arange(time, device=device)
        kinds = tuple(LayerPlan(_whole(batch, positions, p)) for p in distinct)
        return cls(positions, kinds, layer_kinds)

    @classmethod
    def packed(
        cls, ids: Tensor, *, eot: int, pattern: Pattern | LayerPatterns, one_group: bool = False
    ) -> AttentionPlan:
        """Blocks cut from a stream of documents, none of which sees another: training, evaluation.

        A document begins with the end-of-text token that stands before it, as generation from an
        empty prompt does, and its positions count from there; what a block cuts off in front
        counts from the block's beginning. Blocks without a border keep the fused causal kernel.

        Args:
            ids: (B, T) int64.
            eot: id of end-of-text.
            one_group: put all blocks through one kernel call, so that a compiled model
                meets the same shapes whatever the text.
        """
        B, T = ids.shape
        distinct, layer_kinds = _kinds(pattern)
        begins = ids == eot
        begins[:, 0] = True
        index = torch.arange(T, device=ids.device)
        starts = torch.where(begins, index, 0).cummax(-1).values  # (B, T) where its document began
        positions = index - starts
        bordered = begins[:, 1:].any(-1)
        whole_rows = border_rows = None
        if not one_group:
            if not bool(bordered.any()):
                return cls.dense(B, T, pattern=pattern, device=ids.device)
            with_border = bordered.nonzero()[:, 0]
            starts = starts[with_border]
            border_rows = _rows_of(with_border, T)
            whole_rows = _rows_of((~bordered).nonzero()[:, 0], T)
        kinds = []
        for p in distinct:
            groups = [_packed_group(index, starts, p, border_rows)]
            if whole_rows is not None and len(whole_rows):
                groups = [*_whole(B - len(starts), index, p, rows=whole_rows), *groups]
            kinds.append(LayerPlan(tuple(groups)))
        return cls(positions, tuple(kinds), layer_kinds)

    @classmethod
    def paged(
        cls,
        chunks: Seq[Chunk],
        *,
        page_size: int,
        pattern: Pattern | LayerPatterns,
        device: torch.device | str = "cpu",
        logit_rows: Seq[int] | None = None,
        fixed: bool = False,
        in_place: bool = False,
        conv_width: int = 0,
    ) -> AttentionPlan:
        """Chunks of sequences whose earlier tokens are in the cache: serving (`gpt.paged`).

        Args:
            logit_rows: of which tokens logits are wanted, counted over all chunks; None: of all.
            fixed: attention adds up in an order that follows from positions alone
                (`gpt.deterministic`).
            in_place: single tokens read their keys where they lie (`KVCache.read_in_place`).
            conv_width: of the model's convolutions, whose state the last of a chunk's tables is of.
        """
        if not isinstance(pattern, LayerPatterns):
            pattern = LayerPatterns((pattern,))
        positions, kinds = paged_plans(chunks, page_size, pattern, device, fixed, in_place)
        rows, shift = None, None
        if logit_rows is not None:
            rows = torch.tensor(logit_rows, dtype=torch.int64, device=device)
        if conv_width:
            shift = shift_plan(chunks, len(pattern.memories), conv_width, page_size, device)
        return cls(positions, kinds, pattern.layer_kinds, rows, shift)


def _kinds(pattern: Pattern | LayerPatterns) -> tuple[tuple[Pattern, ...], tuple[int, ...]]:
    if isinstance(pattern, LayerPatterns):
        return pattern.kinds, pattern.layer_kinds
    return (pattern,), (0,)


def _whole(
    batch: int,
    index: Tensor,
    pattern: Pattern,
    rows: Tensor | None = None,
    at: Tensor | None = None,
) -> tuple[Group, ...]:
    """`batch` sequences that are there from the first token on; `index` counts it for the pattern,
    `at` (batch or 1, time) for terms that are added to the scores (None: the same)."""
    time = len(index)
    at = index[None] if at is None else at
    if time <= pattern.causal_until:
        return (Group(batch, time, time, at, at, rows=rows, causal=True),)
    if time >= SPARSE_FROM:
        if pattern.residues is not None:
            return _by_residue(batch, index, *pattern.residues, rows, at)
        blocks = sparse_plan(pattern, time, index.device, SPARSE_SHARE)
        if blocks is not None:
            return (Group(batch, time, time, at, at, rows=rows, blocks=blocks),)
    mask = pattern.seen(index[:, None], index)[None, None]
    return (Group(batch, time, time, at, at, rows=rows, mask=mask),)


def _by_residue(
    batch: int, index: Tensor, n: int, inner: Pattern, rows: Tensor | None, at: Tensor
) -> tuple[Group, ...]:
    """Tokens whose positions differ modulo n never meet: each class is a sequence of its own."""
    time = len(index)
    if rows is None:
        rows = torch.arange(batch * time, device=index.device)
    rows, at = rows.view(batch, time), at.expand(batch, -1)
    groups: list[Group] = []
    longer = time % n  # classes that have a token more than the others
    for classes in (range(longer), range(longer, min(n, time))):
        if classes:
            members = torch.stack([rows[:, r::n] for r in classes], dim=1)  # (batch, classes, t)
            places = torch.stack([at[:, r::n] for r in classes], dim=1).flatten(0, 1)
            t = members.shape[-1]
            groups.extend(_whole(len(places), index[:t], inner, members.flatten(), places))
    return tuple(groups)


def _packed_group(index: Tensor, starts: Tensor, pattern: Pattern, rows: Tensor | None) -> Group:
    """Blocks of several documents; `starts` (b, T) is where the document of each token begins.

    By block rows only if the pattern cares for nothing but distances: then its rows lie the same
    wherever documents begin, and a border only hides what is before it.
    """
    b, time = starts.shape
    places = index - starts  # counted within documents
    if time >= SPARSE_FROM and pattern.relative and time > pattern.causal_until:
        blocks = sparse_plan(pattern, time, index.device, SPARSE_SHARE)
        if blocks is not None:
            return Group(b, time, time, places, places, rows=rows, blocks=blocks, first_key=starts)
    same = starts[:, :, None] == starts[:, None, :]
    mask = same & pattern.seen(places[:, :, None], places[:, None, :])
    return Group(b, time, time, places, places, rows=rows, mask=mask.unsqueeze(1))


def _rows_of(blocks: Tensor, time: int) -> Tensor:
    """(b*T,) the flat tokens of some blocks of (B, T)."""
    return (blocks[:, None] * time + torch.arange(time, device=blocks.device)).flatten()
