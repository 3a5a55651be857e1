from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.model import GPT
from gpt.training.optim import (
    OptimizerConfig,
    decay_share,
    learning_rate,
    make_optimizer,
    parameter_groups,
)


@given(
    schedule=st.sampled_from(["wsd", "trapezoid", "cosine", "constant", "sqrt"]),
    total=st.integers(1, 5000),
    warmup=st.integers(0, 6000),
    cooldown=st.floats(0, 1),
    low=st.floats(0, 1),
    data=st.data(),
)
def test_every_step_of_a_run_learns(schedule, total, warmup, cooldown, low, data):
    shape = "sqrt" if schedule == "sqrt" else "linear"
    config = OptimizerConfig(
        lr=0.1, schedule="wsd" if schedule == "sqrt" else schedule, warmup_steps=warmup,
        cooldown=cooldown, min_lr_ratio=low, cooldown_shape=shape,
    )  # fmt: skip
    step = data.draw(st.integers(0, total - 1))
    assert 0 < learning_rate(0, total, config) <= 0.1
    assert 0 < learning_rate(step, total, config) <= 0.1


def test_warm_up_climbs_in_a_straight_line_to_the_peak():
    config = OptimizerConfig(lr=1.0, warmup_steps=4, schedule="constant")
    assert [learning_rate(s, 100, config) for s in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]


def test_wsd_is_flat_and_then_falls_in_a_straight_line():
    config = OptimizerConfig(lr=1.0, warmup_steps=0, cooldown=0.4, min_lr_ratio=0.2)
    rates = [learning_rate(s, 10, config) for s in range(10)]
    assert rates[:7] == [1.0] * 7
    assert rates[7:] == pytest.approx([0.8, 0.6, 0.4])


def test_a_trapezoid_is_wsd_with_a_straight_fall():
    both = [
        OptimizerConfig(lr=1.0, warmup_steps=3, schedule=schedule, cooldown=0.5)
        for schedule in ("wsd", "trapezoid")
    ]
    assert len({tuple(learning_rate(s, 20, config) for s in range(20)) for config in both}) == 1
    with pytest.raises(ConfigError, match=r"optimizer\.cooldown_shape is sqrt, but a trapezoid"):
        OptimizerConfig(schedule="trapezoid", cooldown_shape="sqrt")


def test_wsd_can_fall_fast_at_first():
    config = OptimizerConfig(lr=1.0, warmup_steps=0, cooldown=0.4, cooldown_shape="sqrt")
    rates = [learning_rate(s, 10, config) for s in range(10)]
    assert rates[:7] == [1.0] * 7
    assert rates[7:] == pytest.approx([0.5, 1 - 0.5**0.5, 1 - 0.75**0.5])


def test_weight_decay_can_fall_over_the_run():
    shares = {
        name: [
            decay_share(step, 4, OptimizerConfig(weight_decay_schedule=name)) for step in range(4)
        ]
        for name in ("constant", "linear", "cosine")
    }
    assert shares["constant"] == [1, 1, 1, 1]
    assert shares["linear"] == [1, 0.75, 0.5, 0.25]
    assert shares["cosine"] == pytest.approx([1, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5])


def test_cosine_goes_from_the_peak_through_the_middle_to_the_floor():
    config = OptimizerConfig(lr=1.0, warmup_steps=10, schedule="cosine", min_lr_ratio=0.1)
    assert learning_rate(9, 110, config) == 1.0
    assert learning_rate(60, 110, config) == pytest.approx(0.55)
    expected = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.99))
    assert learning_rate(109, 110, config) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", 0.0), ("lr", float("nan")), ("weight_decay", -0.1), ("betas", (0.9, 1.0)),
        ("warmup_steps", -1), ("schedule", "linear"), ("cooldown", 1.5), ("min_lr_ratio", -0.1),
        ("kind", "sgd"), ("muon_lr", 0.0), ("muon_momentum", 1.0), ("muon_beta2", 1.0),
        ("muon_weight_decay", -1.0),
        ("decays", ("matrixes",)), ("decays", ("head", "head")), ("cooldown_shape", "steep"),
        ("weight_decay_schedule", "wsd"),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_named(setting, value):
    with pytest.raises(ConfigError, match=rf"optimizer\.{setting} "):
        OptimizerConfig(**{setting: value})


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_decay_vectors_do_not_and_each_parameter_is_in_one_group(tied):
    gpt = GPT(GPTConfig.preset("gpt2-124m", vocab_size=20, n_layer=1, n_head=2, d_model=8,
                               block_size=8, tie_embeddings=tied))  # fmt: skip
    config = OptimizerConfig(weight_decay=0.3)
    decaying, still = make_optimizer(
        gpt.named_parameters(), config, gpt.config, fused=False
    ).param_groups
    assert decaying["weight_decay"] == 0.3
    assert still["weight_decay"] == 0.0
    assert {p.ndim for p in decaying["params"]} == {2}
    assert {p.ndim for p in still["params"]} == {1}
    placed = [*decaying["params"], *still["params"]]
    assert len(placed) == len({id(p) for p in placed}) == len(list(gpt.parameters()))
    assert sum(p is gpt.embed.weight for p in placed) == 1


def test_a_parameter_that_would_be_in_two_groups_is_caught():
    matrix = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(AssertionError, match="exactly one"):
        parameter_groups([("a", matrix), ("b", matrix)], OptimizerConfig(), GPTConfig())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("decays", "parts"),
    [
        ((), set()),
        (("head",), {"head.weight"}),
        (("embeddings",), {"embed.weight", "embed_pos.weight"}),
        (("vectors",), {"norm.weight", "blocks.0.norm_attn.weight"}),
    ],
)
def test_it_can_be_said_what_decays(decays, parts, tied):
    gpt = GPT(GPTConfig(vocab_size=20, block_size=8, n_layer=1, n_head=2, d_model=8,
                        tie_embeddings=tied, position="learned", qk_norm=False))  # fmt: skip
    groups = parameter_groups(gpt.named_parameters(), OptimizerConfig(decays=decays), gpt.config)
    names = {id(p): name for name, p in gpt.named_parameters()}
    found = {names[id(p)] for group in groups if group["decays"] for p in group["params"]}
    if "vectors" in decays:
        parts = parts | {"blocks.0.norm_mlp.weight"}
    assert found == parts & set(names.values())


def test_only_matrices_shrink_when_there_is_no_gradient():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    config = OptimizerConfig(lr=0.1, weight_decay=0.5)
    named = [("m", matrix), ("v", vector)]
    optimizer = make_optimizer(named, config, GPTConfig(), fused=True)
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(vector, torch.ones(2))
