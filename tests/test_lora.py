"""Low-rank adaptation against the plain model with the sum of both matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.lora import MATRICES, NO_LORA, AdaptedLinear, LoRAConfig, adapt, adapter_count, merged
from gpt.model import GPT
from gpt.training.optim import OptimizerConfig, parameter_groups
from tests.strategies import configs

CONFIG = GPTConfig(
    vocab_size=50, block_size=16, n_layer=2, n_head=4, n_kv_head=2, d_model=24, mlp="swiglu",
    bias=True,
)  # fmt: skip
IDS = torch.arange(32).reshape(2, 16) * 7 % 50


def adapted(lora: LoRAConfig, *, learned: bool = True, config: GPTConfig = CONFIG) -> GPT:
    """An adapted model; `learned`: as if it had been trained, B no longer zero."""
    torch.manual_seed(0)
    gpt = GPT(config).double()
    adapt(gpt, lora)
    if learned:
        for name, parameter in gpt.named_parameters():
            if name.endswith("lora.b"):
                torch.nn.init.normal_(parameter, std=0.3)
    return gpt


def plain(gpt: GPT, lora: LoRAConfig) -> GPT:
    model = GPT(gpt.config).double()
    model.load_state_dict(merged(gpt.state_dict(), lora))
    return model


def loss(gpt: GPT) -> torch.Tensor:
    return F.cross_entropy(gpt(IDS)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


@pytest.mark.parametrize("matrices", [MATRICES, ("attn.qkv",), ("mlp.down", "attn.out")])
def test_gradients_are_those_of_the_whole_matrix_projected(matrices: Any) -> None:
    """With W' = W + s B A the chain rule gives dA = s Bᵀ dW' and dB = s dW' Aᵀ."""
    lora = LoRAConfig(rank=3, alpha=5.0, matrices=matrices)
    gpt = adapted(lora)
    dense = plain(gpt, lora)
    loss(gpt).backward()
    loss(dense).backward()
    whole = dict(dense.named_parameters())
    seen = 0
    for name, layer in gpt.named_modules():
        if isinstance(layer, AdaptedLinear):
            gradient = whole[f"{name}.weight"].grad
            a, b = layer.lora.a, layer.lora.b
            assert gradient is not None
            torch.testing.assert_close(a.grad, 5 / 3 * b.detach().T @ gradient)
            torch.testing.assert_close(b.grad, 5 / 3 * gradient @ a.detach().T)
            seen += 1
    assert seen == 2 * len(matrices)
    learning = {name for name, p in gpt.named_parameters() if p.grad is not None}
    assert learning == {name for name, p in gpt.named_parameters() if p.requires_grad}
    assert all(".lora." in name for name in learning)


def test_an_adapted_model_begins_as_what_it_was_and_merges_to_what_it_is() -> None:
    lora = LoRAConfig(rank=4)
    torch.manual_seed(0)
    before = GPT(CONFIG).double()(IDS)
    assert torch.equal(adapted(lora, learned=False)(IDS), before)
    gpt = adapted(lora)
    after = gpt(IDS)
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(plain(gpt, lora)(IDS), after, rtol=1e-10, atol=1e-10)


def test_the_state_keeps_the_names_of_the_plain_model() -> None:
    state = adapted(LoRAConfig(rank=2)).state_dict()
    names = {name for name in state if ".lora." not in name}
    assert names == set(GPT(CONFIG).state_dict())
    assert set(merged(state, LoRAConfig(rank=2))) == names
    assert len(state) == len(names) + 2 * len(MATRICES) * CONFIG.n_layer  # merging took none away


@settings(max_examples=20, deadline=None)
@given(configs())
def test_adapters_are_counted_from_the_architecture(config: GPTConfig) -> None:
    lora = LoRAConfig(rank=2, matrices=("attn.qkv", "mlp.up", "mlp.down", "attn.out"))
    with torch.device("meta"):
        gpt = GPT(config)
        adapt(gpt, lora)
    trained = sum(p.numel() for p in gpt.parameters() if p.requires_grad)
    assert adapter_count(config, lora) == trained
    assert adapter_count(config, NO_LORA) == 0


def test_the_optimizer_gets_the_adapters_alone_and_all_of_them_decay_alike() -> None:
    gpt = adapted(LoRAConfig(rank=2))
    (group,) = parameter_groups(gpt.named_parameters(), OptimizerConfig(), gpt.config)
    assert {id(p) for p in group["params"]} == {
        id(p) for name, p in gpt.named_parameters() if ".lora." in name
    }


def test_adapters_stay_in_full_precision_beside_half_a_model() -> None:
    torch.manual_seed(0)
    gpt = GPT(CONFIG)
    adapt(gpt, LoRAConfig(rank=2))
    before = gpt.blocks[0].attn.qkv.lora.a.detach().clone()
    gpt.bfloat16()
    layer = gpt.blocks[0].attn.qkv
    assert (layer.weight.dtype, layer.lora.a.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(layer.lora.a, before)  # not there and back
    logits = gpt(IDS)
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()
    assert layer.lora.b.grad.dtype == torch.float32
    assert GPT(CONFIG).bfloat16().blocks[0].attn.qkv.weight.dtype == torch.bfloat16
    assert gpt.double().blocks[0].attn.qkv.lora.a.dtype == torch.float64


def test_a_merge_is_made_in_full_precision() -> None:
    """A change too small for bf16 is there in float32, and rounded only at the end in bf16."""
    torch.manual_seed(0)
    gpt = GPT(CONFIG).bfloat16()
    lora = LoRAConfig(rank=2, alpha=2.0)
    adapt(gpt, lora)
    layer = gpt.blocks[0].attn.out
    torch.nn.init.constant_(layer.lora.b, 1e-4)
    exact = layer.weight.double() + layer.lora.b.double() @ layer.lora.a.double()
    name = "blocks.0.attn.out.weight"
    wide = merged(gpt.state_dict(), lora, torch.float32)[name]
    torch.testing.assert_close(wide.double(), exact, rtol=0, atol=1e-8)
    assert torch.equal(merged(gpt.state_dict(), lora)[name], exact.bfloat16())


def test_dropout_is_of_training_alone() -> None:
    gpt = adapted(LoRAConfig(rank=2, dropout=0.5))
    assert torch.equal(gpt.eval()(IDS), gpt(IDS))
    gpt.train()
    assert not torch.equal(gpt(IDS), gpt(IDS))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda state: state.pop("blocks.0.attn.qkv.lora.b"), "blocks.0.attn.qkv"),
        (lambda state: state.pop("blocks.1.mlp.up.weight"), "blocks.1.mlp.up"),
        (lambda state: state.update({"blocks.0.mlp.down.lora.a": torch.ones(3, 2)}), "mlp.down"),
        (lambda state: state.update({"x.lora.a": torch.ones(())}), "adapter of x "),
        (lambda state: state.update({"blocks.0.attn.out.weight": torch.ones(())}), "attn.out"),
    ],
)
def test_adapters_that_fit_no_matrix_are_refused(damage: Any, told: str) -> None:
    state = adapted(LoRAConfig(rank=2)).state_dict()
    damage(state)
    with pytest.raises(CheckpointError, match=told):
        merged(state, LoRAConfig(rank=2))


def test_another_rank_than_the_adapters_is_refused() -> None:
    state = adapted(LoRAConfig(rank=2)).state_dict()
    for rank in (0, 3):
        with pytest.raises(CheckpointError, match="does not fit"):
            merged(state, LoRAConfig(rank=rank))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rank": -1}, r"lora\.rank is -1"),
        ({"rank": 1.5}, r"lora\.rank is 1\.5"),
        ({"alpha": 0}, r"lora\.alpha is 0"),
        ({"alpha": float("nan")}, r"lora\.alpha is nan"),
        ({"dropout": 1.0}, r"lora\.dropout is 1"),
        ({"matrices": ()}, "is empty"),
        ({"matrices": ("head",)}, "is head, but must name some of attn.qkv"),
        ({"matrices": ("mlp.up", "mlp.up")}, "each once"),
    ],
)
def test_settings_that_cannot_be_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LoRAConfig(**given)


def test_settings_survive_plain_data() -> None:
    lora = LoRAConfig(rank=3, alpha=7.0, dropout=0.1, matrices=("mlp.up",))
    assert LoRAConfig.from_dict(lora.to_dict()) == lora
