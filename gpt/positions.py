"""Position schemes that act on queries and keys. (Learned positions are an embedding: see
`gpt.model`.)

Rotary positions, Su et al., "RoFormer", arXiv 2104.09864: pair `i` of a head's D numbers is
turned by the angle `p * base**(-2i/D)` at position p. A dot product of two turned vectors depends
on their positions only through the difference, so a key can be turned once, stored in the cache,
and met by any later query.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(
    positions: Tensor, head_dim: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, made once a forward and shared by all layers.

    Angles are taken in float64, since a float32 product of a large position and a small frequency
    is off by whole radians' hundredths; the tables are float32 (float64 for a float64 model), also
    for bf16 models, whose three digits cannot tell neighbouring positions apart.

    Args:
        positions: (...,) int64.

    Returns:
        Two tensors of shape (..., 1, head_dim / 2); the 1 is for the heads.
    """
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    pair = torch.arange(0, head_dim, 2, dtype=exact, device=positions.device)
    angles = positions.to(exact)[..., None] * base ** (-pair / head_dim)
    table = torch.float64 if dtype == torch.float64 else torch.float32
    return angles.cos().to(table).unsqueeze(-2), angles.sin().to(table).unsqueeze(-2)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn queries or keys. Half-split layout: number i is paired with number i + D/2.

    Args:
        x: (..., H, D).
        table: from `rotary_table`, for the same leading shape.
    """
    cos, sin = table
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
