"""From logits to the next token.

One draw needs one number: `uniform(seed, choice, index)` is a hash of what identifies the draw, not
the next output of a generator. Whoever else is in the batch, however often a sequence was preempted
and recomputed, token `index` of choice `choice` under seed `seed` sees the same number. The token
is the first in vocabulary order at which the cumulative probability exceeds it (inverse CDF), so
nothing is sorted unless a filter asks.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpt.filters import bias, keep, mask, penalise, within_range
from gpt.history import History
from gpt.params import NO_TOKEN, NOT_FINITE, SamplingParams

__all__ = ["NOT_FINITE", "Draw", "SamplingParams", "sample", "uniform"]


@dataclass(frozen=True)
class Draw:
    """One row of the batch: how to choose, and which draw of which text this is.

    Attributes:
        params: what the request asked for.
        choice: which of several texts for one prompt.
        index: which token of the text.
        history: the tokens that the text has had; needed if `params` has penalties.
        banned: tokens that may not be made at this place.
        bitmask: what a constraint allows at this place, as `gpt.filters.mask` takes it.
    """

    params: SamplingParams
    choice: int
    index: int
    history: History | None = None
    banned: Collection[int] = ()
    bitmask: np.ndarray | None = None


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
        M token ids; NOT_FINITE where a row has no proper distribution, NO_TOKEN where nothing that
        it may make has a probability above 0.
    """
    best = logits.max(dim=-1)  # NaN counts as the maximum, so it cannot hide
    proper = best.values.isfinite()
    shaped = mask(bias(penalise(logits, draws), draws), draws)
    if shaped is not logits:
        best = shaped.max(dim=-1)
    tokens = best.indices
    rows = [i for i, draw in enumerate(draws) if not draw.params.greedy]
    if rows:
        drawn = [draws[i] for i in rows]
        where = torch.tensor(rows, device=logits.device)
        tokens[where] = _draw(shaped[where], drawn)
    if shaped is not logits:
        tokens = torch.where(best.values.isfinite(), tokens, NO_TOKEN)
    return torch.where(proper, tokens, NOT_FINITE).tolist()


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
    logits = logits / column([within_range(draw.params.temperature) for draw in draws])
    logits = keep(logits, [draw.params for draw in draws])
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
