"""Hypothesis strategies for small models and for the ways to cut their input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.pages import CachePages
from gpt.patterns import Memory, Pattern

BLOCK_SIZE = 24
PATTERNS = [
    "causal", "window:1", "window:4", "window:100", "window:3+sinks:2", "dilated:3:2", "fixed:5:2",
    "bigbird:4:2:1:7", "tests.strategies:Beside(3)", "tests.strategies:Beside(3, forgets=True)",
]  # fmt: skip


@dataclass(frozen=True)
class Beside(Pattern):
    """A pattern of one's own: those up to `reach` away, and position 1. The predicate leaves the
    future to the plan.

    Attributes:
        forgets: whether it says what it remembers; else its cache keeps everything.
    """

    reach: int
    forgets: bool = False

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return ((q_pos - k_pos).abs() <= self.reach) | (k_pos == 1)

    @property
    def memory(self) -> Memory:
        return Memory(self.reach + 1, sinks=2) if self.forgets else Memory()


@st.composite
def position_fields(draw: st.DrawFn, head_dim: int) -> dict[str, Any]:
    """Any position scheme, with any of its options."""
    position = draw(
        st.sampled_from(["none", "learned", "sinusoidal", "relative", "rotary", "rotary", "alibi"])
    )
    fields: dict[str, Any] = {"position": position}
    if position == "relative":
        fields["relative_distance"] = draw(st.sampled_from([1, 3, 100]))
    if position == "rotary":
        width = draw(st.sampled_from(range(2, head_dim + 1, 2)))
        scaling = ["none", "linear", "yarn", "llama3"] + (["ntk"] if width > 2 else [])
        fields |= {
            "rope_base": draw(st.sampled_from([10000.0, 20.0])),
            "rope_dims": draw(st.sampled_from([None, width])) if width < head_dim else None,
            "rope_layout": draw(st.sampled_from(["half-split", "interleaved"])),
            "rope_scaling": draw(st.sampled_from(["none", *scaling])),
        }
        if fields["rope_scaling"] != "none":
            fields["rope_factor"] = draw(st.sampled_from([1.0, 4.0]))
        if fields["rope_scaling"] in ("yarn", "llama3"):
            fields["rope_original_block_size"] = draw(st.sampled_from([6, 40, 300]))
        if fields["rope_scaling"] == "yarn":
            fields["rope_attention_factor"] = draw(st.sampled_from([None, 0.8]))
            fields["rope_truncate"] = draw(st.booleans())
    return fields


@st.composite
def configs(draw: st.DrawFn) -> GPTConfig:
    """Any architecture, small. Weights start large so that attention is far from uniform."""
    n_kv_head = draw(st.sampled_from([1, 2, 4]))
    head_dim = draw(st.sampled_from([2, 4, 8]))
    n_layer = draw(st.integers(1, 2))
    return GPTConfig(
        vocab_size=draw(st.sampled_from([17, 32])),
        block_size=BLOCK_SIZE,
        n_layer=n_layer,
        n_head=n_kv_head * draw(st.sampled_from([1, 2, 3])),
        n_kv_head=n_kv_head,
        d_model=16,
        head_dim=head_dim,
        d_ff=draw(st.sampled_from([None, 24])),
        **draw(position_fields(head_dim)),
        pattern=draw(
            st.sampled_from(PATTERNS)
            | st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=n_layer)
        ),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        norm_place=draw(st.sampled_from(["pre", "post"])),
        mlp=draw(st.sampled_from(["gelu", "gelu-exact", "swiglu", "relu2"])),
        bias=draw(st.booleans()),
        qkv_bias=draw(st.sampled_from([None, True, False])),
        mlp_bias=draw(st.sampled_from([None, True, False])),
        tie_embeddings=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        attn_scale=draw(st.sampled_from([None, 0.3])),
        residual_scale=draw(st.sampled_from([1.0, 0.5])),
        logit_softcap=draw(st.sampled_from([None, 5.0])),
        attn_softcap=draw(st.sampled_from([None, None, 2.0])),
        value_embeddings=draw(st.booleans()),
        conv_width=draw(st.sampled_from([0, 0, 2, 4, 6])),
        residual_scalars=draw(st.booleans()),
        x0_scalars=draw(st.booleans()),
        zero_init=draw(st.booleans()),
        init_std=0.4,
    )


def build(config: GPTConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> GPT:
    """A model with random weights everywhere, also where training begins with constants."""
    torch.manual_seed(seed)
    model = GPT(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "conv" in name or name.endswith(("bias", "scale")):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif config.zero_init and name.endswith(("attn.out.weight", "mlp.down.weight")):
                assert not parameter.any()
                parameter.normal_(std=config.init_std / 2)
    return model


def poison(cache: KVCache, pages: CachePages) -> None:
    """Fill every page that nobody holds or can find with NaN: a reader says NaN from then on."""
    for group, pool in enumerate(pages.pools):
        for numbers in cache.paged(group):
            numbers[:, pool.blank_pages] = torch.nan


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    """A way to cut `length` tokens into consecutive chunks."""
    borders = draw(st.sets(st.integers(1, length - 1))) if length > 1 else set()
    ends = [*sorted(borders), length]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
