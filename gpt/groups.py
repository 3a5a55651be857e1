"""Group and LayerPlan: what `gpt.attention.attend` is told of a layer's tokens.

A group is rows that go through one kernel call, with what they may see; a layer's plan is the
groups that together cover every token once, and where the tokens' keys go in the cache. They are
made by `gpt.plan`, for the cache by `gpt.paged`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.blocks import BlockPlan


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
        blocks: the pattern as block rows, where most keys are out of every query's sight; there is
            no mask then.
        first_key: (b, t) besides, a query may not see a key before this one: where its document
            begins. Only with blocks; otherwise the mask holds it.
        pages: (b, pages) the pages to read the keys from, padded with the null page; None: they are
            read in place, or nothing is cached.
        skip: how many of the first keys in the pages to leave out.
        fixed: the result must not depend on the group's shape (`gpt.deterministic`): the keys are
            all positions from 0 to a fixed border, and there is a mask.
        first_slot: when one sequence's pages lie side by side, the slot of its first key: its keys
            are then a view of the cache, not a copy.
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
    blocks: BlockPlan | None = None
    first_key: Tensor | None = None
    pages: Tensor | None = None
    skip: int = 0
    first_slot: int | None = None
    fixed: bool = False

    def hide(self, term: Tensor) -> Tensor:
        """(b or 1, H, t, s) `term`, -inf where a query may not look."""
        return term.masked_fill(~self.sight(torch.arange(self.t, device=term.device)), -torch.inf)

    def sight(self, queries: Tensor) -> Tensor:
        """(b or 1, 1, c, s) bool, whether the group's queries at `queries` (c,) may look at each of
        its keys; counted within the group."""
        if self.mask is not None:
            return self.mask[:, :, queries]
        keys = torch.arange(self.s, device=queries.device)
        if self.blocks is not None:
            seen = self.blocks.pattern.seen(queries[:, None], keys)[None]
            if self.first_key is not None:
                seen = seen & (keys >= self.first_key[:, queries, None])
            return seen.unsqueeze(1)
        # The fused kernel's triangle is the plan's word that keys are the queries' own positions.
        seen = keys <= queries[:, None] if self.causal else (keys >= 0).expand(len(queries), -1)
        return seen[None, None]


@dataclass(frozen=True)
class LayerPlan:
    """What a layer's attention needs to know of the tokens; shared by all layers of one kind.

    Attributes:
        groups: together they cover every token once.
        slots: (N,) where each token's key and value go in the layer's cache; None: nothing is
            cached.
        begun: pages that the tokens begin and do not fill: what others have left in them is
            zeroed first. None: there are none.
    """

    groups: tuple[Group, ...]
    slots: Tensor | None = None
    begun: Tensor | None = None
