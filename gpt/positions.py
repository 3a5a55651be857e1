"""How a model knows in which order its tokens stand.

Attention itself does not: it is a mean over a set. `GPTConfig.position` names one of six ways to
tell it. Here p is a query's position, j that of a key it may look at, j <= p.

    none         nothing is added; a causal model can still count, since the first token sees one
                 key and the hundredth a hundred (Haviv et al., arXiv 2203.16634; Kazemnejad et al.,
                 arXiv 2305.19466, find that it extrapolates best of those they tried)
    learned      a vector per position, added to the embedding             `LearnedPositions`
    sinusoidal   fixed waves, added to the embedding                       `sinusoidal`
    relative     a learned key per distance p - j, added to the scores     `RelativeKeys`
    rotary       queries and keys are turned by angles of p and j          `gpt.rotary`
    alibi        scores fall in a straight line with p - j                 `Alibi`

Those that are added to the scores are a `ScoreTerm`, which `gpt.attention.attend` asks for the
numbers it needs. Keys in the cache carry nothing of it: where they stand is the plan's to know.
All but `learned` are defined at any position (`GPTConfig.extrapolates`), though a model does well
only where it has been trained or its scheme decays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from gpt.config import GPTConfig


class ScoreTerm(Protocol):
    """What a position scheme adds to the scores.

    It is asked for whole groups of the plan and for single blocks of them, so the numbers must
    depend on nothing but the arguments and learned tables.

    Attributes:
        tables: the learned ones, for kernels with a backward pass of their own.
    """

    @property
    def tables(self) -> tuple[Tensor, ...]: ...

    def __call__(self, q: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """The term of every query and key, also of those that a mask will hide.

        Args:
            q: (b, H, t, D) queries, scaled as the scores are.
            q_pos: (b or 1, t) int64 positions of the queries.
            k_pos: (b or 1, s) of the keys.

        Returns:
            (b or 1, H, t, s), added to scale * q k^T before mask and softmax.
        """


class LearnedPositions(nn.Embedding):
    """A vector of its own for every position, learned like those of the tokens.

        x_p = embed[id_p] + P[p]        P: (block_size, C)

    Gehring et al., arXiv 1705.03122; GPT-2. A position that training never reached has no vector,
    so such a model ends at its block size for good.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.block_size, config.d_model)


def sinusoidal(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Waves from 2 pi to 10,000 * 2 pi tokens long, to be added to the embedding; nothing learned.

        x_p = sqrt(C) embed[id_p] + P[p]
        P[p, 2i] = sin(p / 10000**(2i / C))        P[p, 2i + 1] = cos(p / 10000**(2i / C))

    Vaswani et al., arXiv 1706.03762, sections 3.4 and 3.5. P[p + d] is P[p] turned by angles of d
    alone, so a head can learn to look d tokens back. The model multiplies the embedding by sqrt(C)
    as the paper does: the waves' mean square is 1/2 from the start, beside which an embedding that
    begins at 0.02 would be noise.

    Args:
        positions: (...,) int64.
        width: C, even.

    Returns:
        (..., C). Angles are taken in float64.
    """
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    pair = torch.arange(0, width, 2, dtype=exact, device=positions.device)
    angles = positions.to(exact)[..., None] * 10000.0 ** (-pair / width)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).to(dtype)


class RelativeKeys(nn.Module):
    """A learned key for each distance, shared by the heads of a layer.

        score(p, j) = scale * q_p (k_j + a[min(p - j, m)])        a: (m + 1, D), m relative_distance

    Shaw et al., arXiv 1803.02155, section 3.2: their equation 4 with the keys' table alone (the
    values' helped them no further), and of the distances -m to m those that a causal model can
    see. Everything further back than m looks m back.

    As in their section 3.3, q a^T is made for the m + 1 distances and then spread over the keys, so
    no (t, s, D) tensor exists. The term depends on the queries, and torch's fused kernel has no
    gradient for it: long sequences are trained by block rows (`gpt.blocksparse`), which make it row
    by row, short ones by the plain kernel.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.keys = nn.Embedding(config.relative_distance + 1, config.head_width)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return (self.keys.weight,)

    def forward(self, q: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """See `ScoreTerm`."""
        by_distance = q @ self.keys.weight.to(q.dtype).T  # (b, H, t, m + 1)
        last = self.keys.num_embeddings - 1
        distance = (q_pos[:, None, :, None] - k_pos[:, None, None, :]).clamp(0, last)
        return by_distance.gather(-1, distance.expand(*q.shape[:3], -1))


@dataclass(frozen=True)
class Alibi:
    """Scores fall in a straight line with distance, each head at its own slope; nothing is learned.

        score(p, j) = scale * q_p k_j - m_h (p - j)
        m_h = 2**(-8 (h + 1) / H)        h = 0 … H - 1

    Press et al., arXiv 2108.12409: "attention with linear biases". For H that is no power of two,
    with n the power below it, the first n slopes are those of n heads and the rest every other one
    of 2n heads, from the first (their released code). The steepest head hardly sees 20 tokens back,
    whatever the length, which is why the scheme goes on to work beyond it.

    The numbers are the same in every layer, so the model has them made once a forward
    (`AttentionPlan.with_bias`).
    """

    heads: int
    tables: ClassVar[tuple[Tensor, ...]] = ()

    def __call__(self, q: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """See `ScoreTerm`; of q only the type counts."""
        return self.bias(q_pos, k_pos, torch.promote_types(q.dtype, torch.float32))

    def bias(self, q_pos: Tensor, k_pos: Tensor, dtype: torch.dtype) -> Tensor:
        """(b or 1, H, t, s) of `dtype`; half precision only rounds what is exact before."""
        slopes = self.slopes(q_pos.device, torch.promote_types(dtype, torch.float32))
        distance = q_pos[:, None, :, None] - k_pos[:, None, None, :]
        return (distance * -slopes[:, None, None]).to(dtype)

    def slopes(self, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """(H,) all of them positive."""
        n = 1 << (self.heads.bit_length() - 1)
        h = torch.arange(self.heads, device=device, dtype=dtype)
        exponents = torch.where(h < n, 8 / n * (h + 1), 4 / n * (2 * (h - n) + 1))
        return 2.0**-exponents


def score_term(config: GPTConfig) -> RelativeKeys | Alibi | None:
    """What a layer's attention adds to its scores; None: nothing."""
    if config.position == "relative":
        return RelativeKeys(config)
    return Alibi(config.n_head) if config.position == "alibi" else None
