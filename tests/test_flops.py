"""FLOPs are counted from the configuration; torch counts them from the calls."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gpt.config import GPTConfig
from gpt.flops import flops_per_token, mean_keys
from gpt.model import GPT
from gpt.patterns import parse_pattern

SHAPES = {
    "plain": {},
    "gpt-2": {"position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True},
    "grouped": {"n_head": 4, "n_kv_head": 2, "qk_norm": False},
    "multi-query": {"n_head": 4, "n_kv_head": 1, "head_dim": 8},
    "wide": {"mlp": "swiglu", "d_ff": 40, "tie_embeddings": False},
    "relative": {"position": "relative", "relative_distance": 6},
    "alibi": {"position": "alibi"},
    "post": {"norm_place": "post", "pattern": "window:5"},
}


def make(name: str) -> GPTConfig:
    options = {"vocab_size": 50, "block_size": 16, "n_layer": 2, "n_head": 2, "d_model": 16}
    return GPTConfig(**{**options, **SHAPES[name]})


@pytest.mark.parametrize("name", SHAPES)
def test_the_count_is_that_of_torch(name: str) -> None:
    config = make(name)
    B, T = 2, config.block_size
    model = GPT(config)
    ids = torch.randint(0, config.vocab_size, (B, T))
    # The plain kernel is two products that torch can count; it counts the whole square.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        loss = model(ids).sum()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        loss.backward()
    ours = flops_per_token(config)
    square = ours.attention * T / mean_keys(config, T)
    assert forward.get_total_flops() == B * T * (ours.blocks + square + ours.head)
    assert backward.get_total_flops() == 2 * forward.get_total_flops()
    assert ours.training == pytest.approx(3 * ours.forward)


def test_convolutions_count_as_linear_layers() -> None:
    config = make("plain")
    more = flops_per_token(config.replace(conv_width=4)).blocks - flops_per_token(config).blocks
    assert more == 2 * (2 * 2) * 4 * 16  # layers, two in each, taps, channels


@pytest.mark.parametrize(
    "pattern", ["causal", "window:1", "window:5", "window:999", "fixed:5:2", "dilated:2:3"]
)
@pytest.mark.parametrize("length", [1, 4, 16])
def test_attention_counts_the_keys_that_may_be_seen(pattern: str, length: int) -> None:
    config = make("plain").replace(pattern=pattern)
    at = torch.arange(length)
    allowed = parse_pattern(pattern).allowed(at[:, None], at)
    assert mean_keys(config, length) == pytest.approx(float(allowed.sum()) / length)


def test_it_is_about_six_per_parameter_where_attention_is_small() -> None:
    config = GPTConfig(vocab_size=1000, block_size=8, n_layer=4, n_head=4, d_model=256)
    with torch.device("meta"):
        n = GPT(config).num_params()
    assert flops_per_token(config).training == pytest.approx(6 * n, rel=0.02)
