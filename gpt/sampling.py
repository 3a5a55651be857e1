"""From logits to the next token.

One draw needs one number: `uniform(seed, choice, index)` is a hash of what identifies the draw, not
the next output of a generator. Whoever else is in the batch, however often a sequence was preempted
and recomputed, token `index` of choice `choice` under seed `seed` sees the same number. The token
is the first in vocabulary order at which the cumulative probability exceeds it (inverse CDF), so
nothing is sorted unless a filter asks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpt.params import SamplingParams

__all__ = ["NOT_FINITE", "Draw", "SamplingParams", "sample", "uniform"]

NOT_FINITE = -1
"""In place of a token: this row's logits were NaN or infinite."""

TOP_P_PREFIX = 1024
"""Top-p looks at this many of the most likely tokens before it sorts the whole vocabulary."""


@dataclass(frozen=True)
class Draw:
    """One row of the batch: how to choose, and which draw of which text this is."""

    params: SamplingParams
    choice: int
    index: int


def uniform(seeds: Seq[int], choices: Seq[int], indices: Seq[int]) -> np.ndarray:
    """One number in [0, 1) per (seed, choice, index), float64.

    Each part is folded in and mixed by the finaliser of SplitMix64 (Steele, Lea & Flood, "Fast
    splittable pseudorandom number generators", OOPSLA 2014); the top 53 bits make the fraction.
    """
    mixed = np.zeros(len(seeds), dtype=np.uint64)
    for part in (seeds, choices, indices):
        mixed += np.asarray(part, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    fractions: np.ndarray = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions


def sample(logits: Tensor, draws: Seq[Draw]) -> list[int]:
    """Choose a token per row.

    Args:
        logits: (M, V), any float type.
        draws: one per row.

    Returns:
        M token ids; NOT_FINITE where a row has no proper distribution.
    """
    best = logits.max(dim=-1)  # NaN counts as the maximum, so it cannot hide
    tokens = torch.where(best.values.isfinite(), best.indices, NOT_FINITE)
    rows = [i for i, draw in enumerate(draws) if not draw.params.greedy]
    if rows:
        drawn = [draws[i] for i in rows]
        where = torch.tensor(rows, device=logits.device)
        tokens[where] = torch.where(
            tokens[where] == NOT_FINITE, NOT_FINITE, _draw(logits[where], drawn)
        )
    return tokens.tolist()


def _draw(logits: Tensor, draws: list[Draw]) -> Tensor:
    """Inverse-CDF sampling of (M, V) logits: (M,) token ids."""
    device = logits.device
    exact = torch.float32 if device.type == "mps" else torch.float64

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    # The largest logit is taken off first, so that no temperature in float32's range can
    # overflow.
    logits = logits.float()
    logits = logits - logits.amax(-1, keepdim=True)
    logits = logits / column([min(max(draw.params.temperature, 1e-30), 1e30) for draw in draws])
    keep = _kept(logits, draws)
    if keep is not None:
        logits = _keep_most_likely(logits, keep)
    # float64: a float32 running sum over 50,000 tokens is off by more than a rare token's share.
    cdf = logits.to(exact).exp().cumsum(-1)
    u = uniform(
        [draw.params.seed for draw in draws],
        [draw.choice for draw in draws],
        [draw.index for draw in draws],
    )
    target = torch.from_numpy(u).to(device, exact)[:, None] * cdf[:, -1:]
    # `right`: the first token whose sum *exceeds* the target, which therefore has a share of its
    # own.
    tokens = torch.searchsorted(cdf, target, right=True)[:, 0]
    # u < 1, but u * total can round up to the total; the last token with a share is then meant.
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())[:, 0]
    return torch.minimum(tokens, last)


def _kept(logits: Tensor, draws: list[Draw]) -> Tensor | None:
    """How many of the most likely tokens each row may choose from: (M, 1), or None for all."""
    V = logits.shape[-1]
    top_k = [draw.params.top_k if 0 < draw.params.top_k < V else V for draw in draws]
    top_p = [draw.params.top_p for draw in draws]
    if min(top_k) == V and min(top_p) == 1:
        return None
    k = torch.tensor(top_k, device=logits.device)[:, None]
    if min(top_p) == 1:
        return k
    # Top-p acts on what top-k left over, so only its k tokens count, and their mass is the whole.
    prefix = min(V, max(TOP_P_PREFIX, max(x for x in top_k if x < V) if min(top_k) < V else 0))
    p = torch.tensor(top_p, device=logits.device)[:, None]
    while True:
        values = logits.topk(prefix, dim=-1).values.exp()  # (M, prefix), falling
        inside = torch.arange(prefix, device=logits.device) < k
        running = (values * inside).cumsum(-1)
        whole = torch.where(k < V, running[:, -1:], logits.exp().sum(-1, keepdim=True))
        enough = running >= p * whole
        if prefix == V or bool((enough.any(-1, keepdim=True) | (p >= 1)).all()):
            break
        prefix = V
    needed = torch.where(enough.any(-1, keepdim=True), enough.int().argmax(-1, keepdim=True) + 1, k)
    return torch.where(p < 1, torch.minimum(needed, k), k)


def _keep_most_likely(logits: Tensor, keep: Tensor) -> Tensor:
    """Set all but the `keep` (M, 1) largest of each row to -inf; of equals, the lowest ids stay."""
    V = logits.shape[-1]
    filtered = keep < V
    most = int(torch.where(filtered, keep, 1).max())  # rows that keep all must not sort all
    ranked = logits.topk(most, dim=-1).values
    border = ranked.gather(-1, keep.clamp(max=most) - 1)  # the smallest logit that stays
    above = logits > border
    equal = logits == border
    room = keep - above.sum(-1, keepdim=True)
    stays = above | (equal & (equal.cumsum(-1) <= room)) | ~filtered
    return logits.masked_fill(~stays, float("-inf"))
