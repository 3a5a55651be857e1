"""Attention maps: how much weight each token gives to each, head by head.

The fused kernels hand out no weights. So an ordinary forward is watched through hooks: each
`Attention` is asked for the queries and keys of the very input it was given
(`Attention.project`), and their weights are formed under the plan's own masks, in float32 and a few
queries at a time. The model is not changed, and what it computes does not depend on who watches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpt.attention import Attention
from gpt.model import GPT
from gpt.plan import Group, LayerPlan
from gpt.positions import ScoreTerm
from gpt.softcap import cap_scores

SCORES_AT_ONCE = 2**22
"""Numbers of the score matrix that exist at one time: 16 MiB."""


@dataclass(frozen=True)
class Looks:
    """What some queries of a group look at.

    Attributes:
        group: whose `t` queries these are some of.
        first: the first of them.
        index: (c,) all of them, one after another.
        sight: (b or 1, 1, c, s) bool, whether a query may look at a key.
        scores: (b, H, c, s) scaled, capped, with the position scheme's term, before the mask.
        weights: (b, H, c, s) their softmax within sight.
    """

    group: Group
    first: int
    index: Tensor
    sight: Tensor
    scores: Tensor
    weights: Tensor


def looks(
    q: Tensor,
    k: Tensor,
    plan: LayerPlan,
    *,
    scale: float,
    term: ScoreTerm | None = None,
    softcap: float | None = None,
) -> Iterator[Looks]:
    """The weights of all queries, group by group and a few at a time, in float32.

    Args:
        q: (..., H, D), the leading shape holding the plan's tokens in order.
        k: (..., K, D) of the same tokens: there is no cache.
        plan: who may look at whom.
        scale, term, softcap: of the scores, as in `gpt.attention.attend`.
    """
    H, D = q.shape[-2:]
    K = k.shape[-2]
    for group in plan.groups:
        rows = slice(None) if group.rows is None else group.rows
        queries = q.reshape(-1, H, D)[rows].float().view(group.b, group.t, K, H // K, D)
        keys = k.reshape(-1, K, D)[rows].float().view(group.b, group.s, K, D)
        queries = queries.permute(0, 2, 3, 1, 4)  # (b, K, G, t, D)
        keys = keys.permute(0, 2, 1, 3).unsqueeze(2).transpose(-1, -2)  # (b, K, 1, D, s)
        at_once = max(1, SCORES_AT_ONCE // (group.b * H * group.s))
        for first in range(0, group.t, at_once):
            index = torch.arange(first, min(first + at_once, group.t), device=q.device)
            few = queries[:, :, :, index] * scale
            scores = (few @ keys).flatten(1, 2)  # (b, H, c, s)
            if softcap is not None:
                scores = cap_scores(scores, softcap)
            if term is not None:
                scores = scores + term(few.flatten(1, 2), group.q_pos[:, index], group.k_pos)
            sight = group.sight(index)
            weights = scores.masked_fill(~sight, float("-inf")).softmax(-1)
            yield Looks(group, first, index, sight, scores, weights)


@torch.no_grad()
def see_maps(
    gpt: GPT, ids: Tensor, see: Callable[[int, Tensor], None], layers: Collection[int] | None = None
) -> None:
    """Run a text through a model, and hand on each layer's map as the layer runs.

    Args:
        ids: (T,) int64.
        see: is given the number of a layer and its map (H, T, T), queries by keys, float32; rows
            add up to 1.
        layers: which are wanted; None: all.
    """
    with contextlib.ExitStack() as undo:
        for i, block in enumerate(gpt.blocks):
            if layers is None or i in layers:
                assert isinstance(block.attn, Attention)
                hook = partial(_before_attention, i, see)
                handle = block.attn.register_forward_pre_hook(hook, with_kwargs=True)
                undo.callback(handle.remove)
        gpt.hidden(ids[None])


def _before_attention(
    layer: int,
    see: Callable[[int, Tensor], None],
    attn: nn.Module,
    given: tuple[Any, ...],
    named: dict[str, Any],
) -> None:
    assert isinstance(attn, Attention)
    call = dict(zip(("x", "rotary", "plan"), given, strict=False)) | named
    q, k, _ = attn.project(call["x"], call["rotary"])  # (1, T, H, D)
    T, H = q.shape[1:3]
    found = torch.zeros(H, T, T, device=q.device)
    seen = looks(q, k, call["plan"], scale=attn.scale, term=attn.term, softcap=attn.softcap)
    for look in seen:
        group = look.group
        rows = torch.arange(T, device=q.device) if group.rows is None else group.rows
        # A group's sequences are parts of the one text, which do not see each other.
        for part, places in zip(look.weights, rows.view(group.b, group.t), strict=True):
            found[:, places[look.index, None], places] = part
    see(layer, found)
