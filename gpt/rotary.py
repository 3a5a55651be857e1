"""Rotary positions: queries and keys are turned by angles that grow with their position.

Su et al., "RoFormer", arXiv 2104.09864, section 3.2.2. The first R numbers of a head are R / 2
points in a plane; pair i is turned by the angle p * f_i at position p:

    f_i = base**(-2i / R)        (a, b) -> (a cos - b sin, b cos + a sin)

A dot product of two turned vectors depends on their positions only through the difference, so a key
can be turned once, stored in the cache, and met by any later query.

**Which numbers are a pair** is a convention: `half-split` pairs i with i + R/2 (GPT-NeoX, Hugging
Face's Llama), `interleaved` pairs 2i with 2i + 1 (the paper, GPT-J, Llama's own weights and GGUF).
The two are one function up to an order of the projection's rows, but a checkpoint is of one kind.
With R below the head's width the other numbers carry no position (GPT-NeoX, Phi).

**Scaling** stretches the angles of a model that was trained on L tokens, so that it reads s * L.
With r_i = L f_i / 2 pi, how often pair i turns within L:

- `linear` (Chen et al., arXiv 2306.15595): f_i / s.
- `ntk` (Peng et al., arXiv 2309.00071, section 3.1): base * s**(R / (R - 2)) in place of base,
  which stretches the slowest pair by s and the fastest not at all.
- `yarn` (the same, sections 3.2 and 3.4): (1 - w_i) f_i + w_i f_i / s, where w_i climbs in a
  straight line over i, from 0 at the pair that turns `beta_fast` times to 1 at the one that turns
  `beta_slow` times; queries and keys are multiplied by 0.1 ln s + 1. The paper draws its line over
  r_i; its released code, and every model trained with it, over i.
- `llama3` (Llama 3.1's released code): the same mix, where w_i falls in a straight line over r_i,
  from 1 at `low_freq_factor` to 0 at `high_freq_factor`; nothing is multiplied.

A scaling that changes while a text grows ("dynamic") is not offered: keys in the cache were turned
under the old one, so what a text says would depend on how it was cut.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gpt.config import GPTConfig


class RotaryTable(NamedTuple):
    """What turns the tokens of one forward, shared by all layers.

    Attributes:
        cos, sin: (..., 1, R / 2) of every angle; the 1 is for the heads.
        interleaved: which numbers of a head are a pair.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


def rotary_table(positions: Tensor, config: GPTConfig, dtype: torch.dtype) -> RotaryTable:
    """Cosine and sine of every angle, made once a forward.

    Angles are taken in float64, since a float32 product of a large position and a small frequency
    is off by whole radians' hundredths; the tables are float32 (float64 for a float64 model), also
    for bf16 models, whose three digits cannot tell neighbouring positions apart.

    Args:
        positions: (...,) int64.
        dtype: the model's.
    """
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    angles = positions.to(exact)[..., None] * frequencies(config, positions.device, exact)
    table = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = angles.cos().to(table).unsqueeze(-2), angles.sin().to(table).unsqueeze(-2)
    magnitude = config.rope_magnitude
    if magnitude != 1:
        cos, sin = cos * magnitude, sin * magnitude
    return RotaryTable(cos, sin, config.rope_layout == "interleaved")


def frequencies(
    config: GPTConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64
) -> Tensor:
    """(R / 2,) radians a token by which each pair turns, as the head of this file defines them."""
    R, base, s = config.rope_width, config.rope_base, config.rope_factor
    pair = torch.arange(0, R, 2, dtype=dtype, device=device)
    if config.rope_scaling == "ntk":
        base *= s ** (R / (R - 2))
    plain = base ** (-pair / R)
    if config.rope_scaling in ("none", "ntk"):
        return plain
    if config.rope_scaling == "linear":
        return plain / s
    L = config.rope_original_block_size
    assert L is not None, "the configuration sees to it that these scalings have one"
    if config.rope_scaling == "llama3":
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        stretched = 1 - (L * plain / (2 * math.pi) - low) / (high - low)
    else:
        first, last = (
            R * math.log(L / (2 * math.pi * turns)) / (2 * math.log(base))
            for turns in (config.rope_beta_fast, config.rope_beta_slow)
        )
        if config.rope_truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, R - 1)
        # Both at one pair: a step there.
        stretched = (pair / 2 - first) / (last - first if last != first else 0.001)
    w = stretched.clamp(0, 1)
    return plain * (1 - w) + plain / s * w


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Turn queries or keys.

    Args:
        x: (..., H, D).
        table: from `rotary_table`, for the same leading shape.
    """
    cos, sin, interleaved = table
    R = 2 * cos.shape[-1]
    turned = x if x.shape[-1] == R else x[..., :R]
    if interleaved:
        wide = turned.to(cos.dtype)
        a, b = wide[..., ::2], wide[..., 1::2]
        y = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)
    else:
        a, b = turned.to(cos.dtype).chunk(2, dim=-1)
        y = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return y if turned is x else torch.cat((y, x[..., R:]), dim=-1)
