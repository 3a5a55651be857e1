"""Sizes and memory are counted from the configuration, and here from the real thing."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from hypothesis import given, settings

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.footprint import Training, footprint, kept_bytes
from gpt.lora import NO_LORA, LoRAConfig, adapt
from gpt.model import GPT
from gpt.native import gradients
from gpt.size import (
    kv_bytes,
    kv_bytes_per_token,
    matrix_count,
    parameter_count,
    parts,
    state_bytes,
)
from gpt.subject import DEFAULT_BATCH, DEFAULT_BPE
from gpt.training.optim import OptimizerConfig, make_optimizer
from tests.strategies import configs

B, T = 2, 64


@settings(max_examples=40, deadline=None)
@given(configs())
def test_every_parameter_is_in_one_part(config: GPTConfig) -> None:
    with torch.device("meta"):
        model = GPT(config)
    assert parameter_count(config) == model.num_params()
    shapes = {
        tuple(p.shape) for name, p in model.named_parameters() if name.endswith(("weight", "scale"))
    }
    for part in parts(config):
        split = part.name.startswith(("attention query", "attention key", "attention value"))
        if not split and part.name not in ("mlp up", "mlp gate", "biases"):
            assert part.shape in shapes, part


@settings(max_examples=20, deadline=None)
@given(configs())
def test_a_token_s_keys_and_values_take_what_the_cache_holds(config: GPTConfig) -> None:
    pages = KVCache.page_bytes(config, 1)
    state = 2 * config.n_layer * config.d_model * 4 if config.conv_width else 0  # of one token
    assert kv_bytes_per_token(config, "float32") + state == sum(pages)
    assert kv_bytes_per_token(config, "bfloat16") * 2 + state == sum(pages)
    assert kv_bytes(config, "float32", 1) == kv_bytes_per_token(config, "float32") + state


def test_convolutions_hold_their_width_but_one_whatever_the_length() -> None:
    config = GPTConfig(vocab_size=9, n_layer=3, n_head=2, d_model=8, conv_width=4)
    plain = config.replace(conv_width=0)
    for length, kept in ((1, 1), (3, 3), (100, 3)):
        more = kv_bytes(config, "float32", length) - kv_bytes(plain, "float32", length)
        assert more == 3 * 2 * 8 * kept * 4
    assert state_bytes(config, "float32") == 3 * 2 * 8 * 3 * 4
    assert state_bytes(plain, "float32") == 0
    held = KVCache.page_bytes(config, 16)
    assert held[-1] == state_bytes(config, "float32"), "a page holds a whole state, once"


def test_a_window_s_cache_is_the_window_s() -> None:
    config = GPTConfig(
        vocab_size=9, n_layer=4, n_head=2, d_model=8, pattern=["window:5+sinks:2", "causal"]
    )
    number = 2 * 2 * 4 * 4  # keys and values, heads of 4, bytes
    assert kv_bytes(config, "float32", 100) == number * (2 * 7 + 2 * 100)


def kept_by_autograd(
    config: GPTConfig, *, half: str = "", recompute: bool = False, adapters: LoRAConfig = NO_LORA
) -> int:
    """Bytes that autograd keeps between forward and backward, parameters left out."""
    torch.manual_seed(0)
    model = GPT(config).train()
    model.activation_checkpointing = recompute
    if adapters.on:
        adapt(model, adapters)
    if half == "true":
        model = model.bfloat16()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # holds it, so no address comes back
        return tensor

    ids = torch.randint(config.vocab_size, (B, config.block_size))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=half == "mixed"),
    ):
        model(ids, targets=ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


BASE = {"vocab_size": 300, "block_size": T, "n_layer": 3, "n_head": 4, "d_model": 64}
VARIANTS = {
    "plain": {},
    "gpt-2": {"position": "learned", "norm": "layernorm", "mlp": "gelu", "qk_norm": False},
    "swiglu": {"mlp": "swiglu", "n_kv_head": 1},
    "post": {"norm_place": "post", "dropout": 0.1, "bias": True},
    "window": {"pattern": "window:8", "logit_softcap": 5.0},
    "attention dropout": {"attn_dropout": 0.1},
    "none": {"position": "none"},
    "alibi": {"position": "alibi", "pattern": "window:8"},
    "relative": {"position": "relative"},
    "block rows": {"pattern": ["window:64", "causal"], "block_size": 512, "vocab_size": 40},
    "softcap": {"attn_softcap": 20.0},
    "softcap, shared heads": {"attn_softcap": 20.0, "n_kv_head": 2, "qk_norm": False},
    "softcap, long": {"attn_softcap": 20.0, "block_size": 512, "vocab_size": 40},
    "convolutions": {"conv_width": 4},
    "convolutions, post": {"conv_width": 4, "norm_place": "post"},
    "values of ids": {"value_embeddings": True, "qk_norm": False},
    "scalars": {"residual_scalars": True, "x0_scalars": True},
    "large vocabulary": {"vocab_size": 70_000, "logit_softcap": 9.0},
    "relative, long": {"position": "relative", "block_size": 512, "vocab_size": 40},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_what_is_kept_for_the_backward_is_what_autograd_keeps(name: str, precision: str) -> None:
    config = GPTConfig(**{**BASE, **VARIANTS[name]})
    real = kept_by_autograd(config, half=precision.partition("-")[2] * precision.startswith("bf"))
    ours = kept_bytes(config, Training(B, precision=precision))
    if precision == "bf16-mixed":
        kept = matrix_count(config)  # the copies that autocast makes
        if name == "large vocabulary":
            kept -= config.vocab_size * config.d_model
        ours += 2 * kept
    assert ours == pytest.approx(real, rel=0.04)


@pytest.mark.parametrize("name", VARIANTS)
def test_with_kernels_of_our_own_no_more_is_kept(name: str) -> None:
    if gradients.get_ready() is None:
        pytest.skip("none can be compiled here")
    config = GPTConfig(**{**BASE, **VARIANTS[name]})
    ours = kept_bytes(config, Training(B))
    assert 0.7 * ours < kept_by_autograd(config) <= 1.04 * ours


def test_checkpointing_keeps_what_enters_each_block() -> None:
    config = GPTConfig(**BASE)
    real = kept_by_autograd(config, recompute=True)
    assert kept_bytes(config, Training(B, checkpointing=True)) == pytest.approx(real, rel=0.04)


def test_the_peak_is_the_largest_moment_of_a_step() -> None:
    config = GPTConfig(**BASE)
    n, tokens = parameter_count(config), 4 * T
    need = footprint(config, Training(4), slack=0.0)
    assert need.weights == 4 * n
    assert need.optimizer == 8 * n
    assert need.peak == need.weights + need.optimizer + max(
        4 * n + kept_bytes(config, Training(4)) + 4 * tokens * 300,
        kept_bytes(config, Training(4)) + 8 * tokens * 300,
    )
    more = footprint(config, Training(4, accumulate=2, average=True), slack=0.0)
    assert more.average == 4 * n
    assert more.gradients == 4 * n
    large = footprint(config, Training(4, eval_batch_size=4000), slack=0.0)
    assert large.logits == 13_968 * 300 * 8, "a share of 4000 * T tokens"
    assert (
        footprint(config, Training(4, checkpointing=True)).peak
        < footprint(config, Training(4)).peak
    )


def test_adapters_alone_have_gradients_and_optimizer_state() -> None:
    config = GPTConfig(**BASE)
    n, few = parameter_count(config), 1000
    need = footprint(config, Training(4, precision="bf16-true", adapters=few, average=True))
    assert need.weights == 2 * n + 4 * few  # they are float32 beside a model in half precision
    assert (need.optimizer, need.average) == (8 * few, 4 * few)
    assert need.gradients in (0, 4 * few)
    short = footprint(config, Training(4, block_size=T // 2))
    assert short == footprint(config.replace(block_size=T // 2), Training(4))


def test_frozen_weights_let_autograd_keep_no_more() -> None:
    lora = LoRAConfig(rank=2)
    for name in ("plain", "swiglu", "gpt-2"):
        config = GPTConfig(**{**BASE, **VARIANTS[name]})
        real = kept_by_autograd(config, adapters=lora)
        assert 0.7 < real / kept_bytes(config, Training(B, adapters=1)) < 1.05


def test_muon_keeps_one_number_for_each_in_the_blocks_matrices() -> None:
    config = GPTConfig(vocab_size=50, block_size=8, n_layer=2, n_head=2, d_model=16, mlp="swiglu")
    gpt = GPT(config)
    optimizer = make_optimizer(
        gpt.named_parameters(), OptimizerConfig(kind="muon"), config, fused=False
    )
    for p in gpt.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    muon, adamw = (footprint(config, Training(1, muon=muon)) for muon in (True, False))
    assert muon.optimizer == 4 * sum(x.numel() for x in kept) < adamw.optimizer
    assert muon.peak > muon.weights + muon.optimizer + muon.gradients


def test_defaults_are_those_of_the_trainer() -> None:
    from gpt.training.data import TextDataModule

    defaults = inspect.signature(TextDataModule).parameters
    assert defaults["batch_size"].default == DEFAULT_BATCH
    assert defaults["eval_batch_size"].default == DEFAULT_BATCH
    assert defaults["vocab_size"].default == DEFAULT_BPE
    assert {field.name for field in dataclasses.fields(Training)} >= {"batch_size", "precision"}
