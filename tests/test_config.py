"""GPTConfig: derived widths, presets, and one-line errors that name the field."""

from __future__ import annotations

import json

import pytest
import torch

from gpt.config import PRESETS, GPTConfig
from gpt.errors import ConfigError
from gpt.model import GPT


def test_widths_follow_from_the_model_unless_given() -> None:
    config = GPTConfig(d_model=96, n_head=6)
    assert (config.head_width, config.kv_heads, config.mlp_width) == (16, 6, 384)
    free = GPTConfig(d_model=90, n_head=6, n_kv_head=2, head_dim=32, d_ff=100)
    assert (free.head_width, free.kv_heads, free.mlp_width) == (32, 2, 100)
    swiglu = GPTConfig(d_model=768, mlp="swiglu")
    assert swiglu.mlp_width == 2048  # 8/3 of the width: as many parameters as 4 without the gate


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"d_model": 100, "n_head": 3}, "d_model 100 is not divisible by n_head 3"),
        ({"n_head": 4, "n_kv_head": 3}, "n_head 4 is not divisible by n_kv_head 3"),
        ({"head_dim": 7}, "head_dim is 7, but rotary"),
        ({"position": "rope"}, "position is 'rope', but must be one of none, learned, sinusoidal"),
        ({"position": "sinusoidal", "d_model": 9, "n_head": 3}, "d_model is 9, but sinusoidal"),
        ({"position": "relative", "relative_distance": 0}, "relative_distance is 0"),
        ({"relative_distance": 8}, "is 8, but only position relative reads it, and position is r"),
        ({"position": "alibi", "rope_dims": 4}, "rope_dims is 4, but only position rotary reads"),
        ({"rope_dims": 3}, "rope_dims is 3, but rotary positions need an even one"),
        ({"rope_dims": 64}, "rope_dims is 64, but a head has only 32"),
        ({"rope_dims": 0}, "rope_dims is 0"),
        ({"rope_layout": "split"}, "rope_layout is 'split', but must be one of half-split, inter"),
        ({"rope_scaling": "dynamic"}, "'dynamic', but must be one of none, linear, ntk, yarn, ll"),
        ({"rope_factor": 4.0}, "rope_factor is 4.0, but only rope_scaling linear or ntk or yarn"),
        ({"rope_scaling": "linear", "rope_beta_fast": 9.0}, "rope_beta_fast is 9.0, but only"),
        ({"rope_scaling": "linear", "rope_factor": 0.5}, "rope_factor is 0.5, but must be"),
        ({"rope_scaling": "ntk", "rope_dims": 2}, "rope_dims is 2, but rope_scaling ntk needs"),
        ({"rope_scaling": "yarn"}, "rope_original_block_size is None, but rope_scaling yarn"),
        (
            {"rope_scaling": "yarn", "rope_original_block_size": 64, "rope_base": 1.0},
            "rope_base is 1.0, but yarn",
        ),
        (
            {"rope_scaling": "llama3", "rope_original_block_size": 64, "rope_low_freq_factor": 4.0},
            "rope_low_freq_factor and rope_high_freq_factor are 4.0 and 4.0",
        ),
        (
            {
                "rope_scaling": "yarn",
                "rope_original_block_size": 64,
                "rope_attention_factor": 0.0,
            },
            "rope_attention_factor is 0.0",
        ),
        ({"n_layer": 0}, "n_layer is 0"),
        ({"block_size": -1}, "block_size is -1"),
        ({"dropout": 1.0}, r"dropout is 1.0, but must be in \[0, 1\)"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"attn_scale": float("inf")}, "attn_scale is inf"),
        ({"residual_scale": 0.0}, "residual_scale is 0.0"),
        (
            {"attn_softcap": 0.0},
            "attn_softcap is 0.0, but must be a finite number above 0 .or null",
        ),
        ({"conv_width": 1}, "conv_width is 1, but must be 0 .none. or 2 to 64"),
        ({"conv_width": 65}, "conv_width is 65"),
        ({"zero_init": 1}, "zero_init is 1, but must be true or false"),
        ({"attn_scale": float("nan")}, "attn_scale is nan"),
        ({"residual_scale": 1e300}, "residual_scale is 1e.300, but must be a number"),
        ({"n_layer": 2.0}, "n_layer is 2.0, but must be a whole number"),
        ({"n_layer": True}, "n_layer is True"),
        ({"d_model": 10**30}, "d_model is 10"),
        ({"rope_base": 10**400}, "rope_base is 1000"),
        ({"bias": 1}, "bias is 1, but must be true or false"),
        ({"pattern": 5}, "pattern is 5, but must be text or a list of texts"),
        ({"pattern": ["causal", 5]}, "but must be text or a list of texts"),
        ({"pattern": []}, "pattern lists 0 patterns, but must list 1 to n_layer"),
        (
            {"pattern": ["causal"] * 5},
            r"pattern lists 5 patterns, but must list 1 to n_layer \(4\)",
        ),
        ({"pattern": None}, "pattern is None"),
        ({"pattern": "window:" + "9" * 5000}, "pattern is 'window:9999"),
        ({"mlp": "relu"}, "mlp is 'relu', but must be one of gelu, gelu-exact, swiglu, relu2"),
        ({"norm_place": "mid"}, "norm_place is 'mid'"),
        ({"pattern": "window:0"}, "pattern is 'window:0'"),
        ({"pattern": "widow:4"}, "pattern is 'widow:4'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GPTConfig(**changes)


def test_a_configuration_survives_plain_data() -> None:
    config = GPTConfig(vocab_size=9, pattern="window:8", attn_scale=0.1, mlp="swiglu")
    assert GPTConfig.from_dict(config.to_dict()) == config
    listed = config.replace(pattern=["window:8", "causal"])
    assert GPTConfig.from_dict(json.loads(json.dumps(listed.to_dict()))) == listed
    with pytest.raises(
        ConfigError, match="unknown architecture field 'n_layers'; did you mean n_l"
    ):
        GPTConfig.from_dict({"n_layers": 2})


def test_a_configuration_from_before_the_family_of_positions_means_the_same() -> None:
    """Folders of models say only `position` and `rope_base`."""
    old = {"vocab_size": 9, "d_model": 16, "n_head": 2, "position": "rotary", "rope_base": 5e5}
    config = GPTConfig.from_dict(old)
    assert (config.rope_width, config.rope_layout, config.rope_scaling) == (8, "half-split", "none")
    assert config.rope_magnitude == 1
    assert GPTConfig.from_dict({**old, "position": "learned"}).position == "learned"


def test_an_unknown_preset_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean gpt2-124m"):
        GPTConfig.preset("gpt2-124")


@pytest.mark.parametrize(
    ("name", "millions"),
    # The published counts of GPT-2, tied head counted once.
    [("gpt2-124m", 124.4), ("gpt2-355m", 354.8), ("gpt2-774m", 774.0), ("gpt2-1558m", 1557.6)],
)
def test_gpt2_presets_have_gpt2s_parameter_counts(name: str, millions: float) -> None:
    with torch.device("meta"):
        assert round(GPT(GPTConfig.preset(name)).num_params() / 1e6, 1) == millions


def test_presets_span_from_small_to_large() -> None:
    with torch.device("meta"):
        sizes = {
            name: GPT(GPTConfig.preset(name, vocab_size=2048)).num_params() for name in PRESETS
        }
    assert min(sizes.values()) < 400_000
    assert max(sizes.values()) > 1e9
    assert GPTConfig.preset("tiny", n_layer=2).n_layer == 2


def test_a_model_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size is not set"):
        GPT(GPTConfig())
