"""AttentionPlan: what one forward knows about its tokens before any layer runs.

Built on the host once a forward and shared by all layers. It answers three questions for
`gpt.attention.attend`: where in the cache do the new keys go, which rows attend together, and what
may they see. Training hands in one dense group; serving hands in whatever mix of prefill chunks and
decode steps the scheduler chose. Attention itself never asks which of the two it is.

    tokens   a a a a a a | b | c | d d          N = 10: a prefill chunk, two decodes, a chunk
    groups   0 0 0 0 0 0 | 1 | 1 | 2 2          b and c see contexts of like length: one group
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt.pages import NULL_PAGE, pages_for
from gpt.patterns import Causal, Pattern


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence that a forward runs.

    Attributes:
        start: position of the first; everything before it is in the cache already.
        length: how many.
        pages: the sequence's block table; covers at least `start + length` positions.
    """

    start: int
    length: int
    pages: Seq[int]


@dataclass(frozen=True)
class Group:
    """Rows that go through one kernel call: `b` sequences, `t` queries each, against `s` keys each.

    Attributes:
        q_pos, k_pos: (b or 1, t) and (b or 1, s) absolute positions of the queries and keys, for
            terms that are added to the scores.
        rows: (b*t,) which of the tokens (flat, if they are (B, T)), sequence by sequence; None: all
            of them, in order.
        causal: the keys are exactly the queries' own positions and the pattern is causal, so the
            fused kernel may apply the triangle itself.
        mask: (b or 1, 1, t, s) bool, True where a query may look; None: no mask is needed.
        bias: (b or 1, H, t, s) a term of the scores that is the same in every layer, -inf where a
            query may not look; None: there is none.
        pages: (b, pages) block tables, padded with the null page; None: nothing is cached.
        first_slot: when one sequence's pages lie side by side, the slot of its first token: its
            keys are then a view of the cache, not a copy.
    """

    b: int
    t: int
    s: int
    q_pos: Tensor
    k_pos: Tensor
    rows: Tensor | None = None
    causal: bool = False
    mask: Tensor | None = None
    bias: Tensor | None = None
    pages: Tensor | None = None
    first_slot: int | None = None

    def hide(self, term: Tensor) -> Tensor:
        """(b or 1, H, t, s) `term`, -inf where a query may not look."""
        sight = self.mask
        if sight is None:  # nothing before a query is hidden from it
            sight = self.k_pos[:, None, None, :] <= self.q_pos[:, None, :, None]
        return term.masked_fill(~sight, float("-inf"))


@dataclass(frozen=True)
class AttentionPlan:
    """Attributes:
    positions: absolute position of each token: (N,) for a paged plan, (T,) for a dense one, (B, T)
        for a packed one.
    groups: together they cover every token once.
    slots: (N,) where each token's key and value go in the cache; None: nothing is cached.
    logit_rows: (M,) the tokens whose logits are wanted; None: all of them.
    """

    positions: Tensor
    groups: tuple[Group, ...]
    slots: Tensor | None = None
    logit_rows: Tensor | None = None

    def with_bias(self, bias: Callable[[Tensor, Tensor], Tensor]) -> AttentionPlan:
        """The plan with a term for the scores that every layer shares, made once for all of them.

        Args:
            bias: from the positions of queries (b or 1, t) and keys (b or 1, s), (b or 1, H, t, s).
        """
        groups = tuple(
            replace(group, bias=group.hide(bias(group.q_pos, group.k_pos))) for group in self.groups
        )
        return replace(self, groups=groups)

    @classmethod
    def dense(
        cls, batch: int, time: int, *, pattern: Pattern, device: torch.device | str = "cpu"
    ) -> AttentionPlan:
        """`batch` whole sequences of `time` tokens, nothing cached: training, evaluation."""
        positions = torch.arange(time, device=device)
        at = positions[None]
        causal = isinstance(pattern, Causal)
        mask = None if causal else pattern.allowed(positions[:, None], positions)[None, None]
        return cls(positions, (Group(batch, time, time, at, at, causal=causal, mask=mask),))

    @classmethod
    def packed(
        cls, ids: Tensor, *, eot: int, pattern: Pattern, one_group: bool = False
    ) -> AttentionPlan:
        """Blocks cut from a stream of documents, none of which sees another: training, evaluation.

        A document begins with the end-of-text token that stands before it, as generation from an
        empty prompt does, and its positions count from there; what a block cuts off in front
        counts from the block's beginning. Blocks without a border keep the fused causal kernel.

        Args:
            ids: (B, T) int64.
            eot: id of end-of-text.
            one_group: put all blocks through one masked kernel call, so that a compiled model
                meets the same shapes whatever the text.
        """
        B, T = ids.shape
        begins = ids == eot
        begins[:, 0] = True
        index = torch.arange(T, device=ids.device)
        starts = torch.where(begins, index, 0).cummax(-1).values  # (B, T) where its document began
        positions = index - starts
        bordered = begins[:, 1:].any(-1)
        if one_group:
            with_border, whole = None, 0
        else:
            if not bool(bordered.any()):
                return cls.dense(B, T, pattern=pattern, device=ids.device)
            with_border = bordered.nonzero()[:, 0]
            whole = B - len(with_border)
        mine = starts if with_border is None else starts[with_border]  # (b, T)
        same = mine[:, :, None] == mine[:, None, :]
        mask = (same & pattern.allowed(index[:, None], index)).unsqueeze(1)  # (b, 1, T, T)
        rows = None
        groups = []
        if whole:
            causal = isinstance(pattern, Causal)
            plain = (~bordered).nonzero()[:, 0]
            groups.append(
                Group(
                    whole, T, T, index[None], index[None],
                    rows=_rows_of(plain, T),
                    causal=causal,
                    mask=None if causal else pattern.allowed(index[:, None], index)[None, None],
                )
            )  # fmt: skip
            assert with_border is not None
            rows = _rows_of(with_border, T)
        at = index - mine
        groups.append(Group(len(mine), T, T, at, at, rows=rows, mask=mask))
        return cls(positions, tuple(groups))

    @classmethod
    def paged(
        cls,
        chunks: Seq[Chunk],
        *,
        page_size: int,
        pattern: Pattern,
        device: torch.device | str = "cpu",
        logit_rows: Seq[int] | None = None,
    ) -> AttentionPlan:
        """Chunks of sequences whose earlier tokens are in the cache."""
        positions: list[int] = []
        slots: list[int] = []
        firsts: list[int] = []
        for chunk in chunks:
            end = chunk.start + chunk.length
            if chunk.length < 1 or len(chunk.pages) < pages_for(end, page_size):
                raise ValueError(
                    f"a chunk of {chunk.length} tokens from {chunk.start} needs "
                    f"{pages_for(end, page_size)} pages of {page_size}, has {len(chunk.pages)}"
                )
            firsts.append(len(positions))
            positions.extend(range(chunk.start, end))
            slots.extend(
                chunk.pages[p // page_size] * page_size + p % page_size
                for p in range(chunk.start, end)
            )
        members = _group(chunks, page_size)
        at = torch.tensor(positions, device=device)
        groups = tuple(
            _paged_group(
                [chunks[i] for i in group],
                at,
                # One group over everything, in order, needs no gathering of rows.
                None if group == list(range(len(chunks))) else [firsts[i] for i in group],
                page_size,
                pattern,
                device,
            )
            for group in members
        )
        return cls(
            at,
            groups,
            torch.tensor(slots, device=device),
            None
            if logit_rows is None
            else torch.tensor(logit_rows, dtype=torch.int64, device=device),
        )


def _rows_of(blocks: Tensor, time: int) -> Tensor:
    """(b*T,) the flat tokens of some blocks of (B, T)."""
    return (blocks[:, None] * time + torch.arange(time, device=blocks.device)).flatten()


def _group(chunks: Seq[Chunk], page_size: int) -> list[list[int]]:
    """Which chunks share a kernel call.

    Single-token chunks go together with those whose contexts fill a like number of pages, so that
    one long sequence does not pad thirty short ones: keys padded in vain stay below a quarter.
    Longer chunks go together only if they have the same borders.
    """
    keyed: dict[tuple[int, ...], list[int]] = {}
    for i, chunk in enumerate(chunks):
        end = chunk.start + chunk.length
        if chunk.length == 1:
            key: tuple[int, ...] = (_bucket(pages_for(end, page_size)),)
        else:
            key = (chunk.start, chunk.length)
        keyed.setdefault(key, []).append(i)
    return list(keyed.values())


def _bucket(pages: int) -> int:
    """1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, …: four steps an octave."""
    step = max(1, 1 << max(0, (pages - 1).bit_length() - 3))
    return -(-pages // step) * step


def _paged_group(
    chunks: list[Chunk],
    positions: Tensor,
    firsts: list[int] | None,
    page_size: int,
    pattern: Pattern,
    device: torch.device | str,
) -> Group:
    t = chunks[0].length
    ends = [chunk.start + t for chunk in chunks]
    s = max(ends)
    n_pages = pages_for(s, page_size)
    tables = [
        [*chunk.pages[:n_pages], *[NULL_PAGE] * (n_pages - len(chunk.pages))] for chunk in chunks
    ]
    first_slot = None
    if len(chunks) == 1 and tables[0] == list(range(tables[0][0], tables[0][0] + n_pages)):
        first_slot = tables[0][0] * page_size

    rows = None
    if firsts is not None:
        rows = (torch.tensor(firsts)[:, None] + torch.arange(t)).flatten().to(device)
    q_pos = (positions if rows is None else positions[rows]).view(-1, t)  # (b, t)
    k_pos = torch.arange(s, device=device)

    fresh = isinstance(pattern, Causal) and all(chunk.start == 0 for chunk in chunks)
    sees_all = isinstance(pattern, Causal) and t == 1 and min(ends) == s
    mask = None
    if not fresh and not sees_all:
        mask = pattern.allowed(q_pos[:, None, :, None], k_pos)  # (b, 1, t, s)
    return Group(
        len(chunks), t, s, q_pos, k_pos[None],
        rows=rows,
        causal=fresh,
        mask=mask,
        pages=torch.tensor(tables, device=device),
        first_slot=first_slot,
    )  # fmt: skip
