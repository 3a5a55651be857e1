"""GGUF models against transformers: files as llama.cpp's converter makes them, written here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from gpt.cache import KVCache
from gpt.errors import CheckpointError
from gpt.model import GPT
from gpt.plan import AttentionPlan, Chunk
from gpt.weights.gguf_model import open_gguf
from gpt.weights.source import Foreign
from tests.weights.gguf_files import LLAMA, llama_tensors, write

CONTEXT = 48
SMALL = {
    "vocab_size": 60, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    "rope_theta": 100.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", SMALL, "F32"),
    "llama-tied-q8_0": ("Llama", {**SMALL, "tie_word_embeddings": True}, "Q8_0"),
    "llama-wide-heads-q4_1": ("Llama", {**SMALL, "head_dim": 32}, "Q4_1"),
    "llama-attention-bias": ("Llama", {**SMALL, "attention_bias": True}, "Q4_0"),
    "llama-mlp-bias": ("Llama", {**SMALL, "mlp_bias": True}, "F32"),
    "llama3": ("Llama", {**SMALL, "head_dim": 64, "rope_scaling": LLAMA3}, "F32"),
    "llama-linear": ("Llama", {**SMALL, "rope_scaling": {"type": "linear", "factor": 4.0}}, "F32"),
    "llama-yarn": (
        "Llama",
        {**SMALL, "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12,
        }},
        "F32",
    ),
    "qwen2": ("Qwen2", SMALL, "Q8_0"),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 32, "tie_word_embeddings": True}, "F16"),
    "gpt2": (
        "GPT2",
        {"vocab_size": 60, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4},
        "Q5_1",
    ),
}  # fmt: skip
LINEAR = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "c_attn": "attn_qkv", "attn.c_proj": "attn_output", "c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm", "ln_2": "ffn_norm",
}  # fmt: skip
WHOLE = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}  # fmt: skip


def theirs(name: str) -> Any:
    """A model of theirs with random weights everywhere, biases and norms too."""
    family, settings, _ = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def their_name(name: str) -> str:
    """llama.cpp's name of a parameter of transformers."""
    stem, _, kind = name.rpartition(".")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{kind}"
    parts = stem.split(".")
    found = next(to for end, to in LINEAR.items() if f".{stem}".endswith(f".{end}"))
    return f"blk.{parts[2]}.{found}.{kind}"


def turned(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads with pairs side by side, as llama.cpp turns them in the family llama."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


@torch.no_grad()
def written(model: Any, name: str, path: Path) -> Path:
    """The model as GGUF, its own weights set to what the file's blocks stand for."""
    config, (family, _, kind) = model.config, MODELS[name]
    quantised = GGMLQuantizationType[kind]
    tensors: dict[str, np.ndarray] = {}
    for full, parameter in model.named_parameters():
        to, linear = their_name(full), "c_" in full and parameter.dim() == 2  # Conv1D: (in, out)
        x = (parameter.t() if linear else parameter).contiguous()
        if x.dim() == 2:
            x = torch.from_numpy(np.array(dequantize(quantize(x.numpy(), quantised), quantised)))
            parameter.copy_(x.t() if linear else x)
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(
            to.split(".")[-2]
        )
        tensors[to] = x.numpy()
        if family == "Llama" and heads:
            tensors[to] = turned(tensors[to], getattr(config, heads))
    arch = family.lower()
    settings: dict[str, Any] = {
        "context_length": CONTEXT, "embedding_length": 64, "block_count": 2,
        "attention.head_count": 4,
    }  # fmt: skip
    if family == "GPT2":
        settings |= {"feed_forward_length": 256, "attention.layer_norm_epsilon": 1e-5}
        return write(path, settings, tensors, arch, kind)
    settings |= {
        "feed_forward_length": 96,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else 16,
        "rope.freq_base": 100.0,
    }
    scaling = MODELS[name][1].get("rope_scaling", {})
    if scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = divisors(100.0, settings["attention.key_length"], 32)
        settings["rope.scaling.original_context_length"] = 32
    elif scaling:
        settings |= {"rope.scaling.type": scaling["type"], "rope.scaling.factor": 4.0}
        if scaling["type"] == "yarn":
            settings["rope.scaling.original_context_length"] = 12
    return write(path, settings, tensors, arch, kind)


def divisors(base: float, width: int, context: int, high: float = 4.0) -> np.ndarray:
    """What llama.cpp's converter makes of LLAMA3, by the formula that Llama 3.1 came with."""
    found = []
    for i in range(0, width, 2):
        wavelength = 2 * math.pi * base ** (i / width)
        if wavelength < context / high:
            found.append(1.0)
        elif wavelength > context:
            found.append(8.0)
        else:
            smooth = (context / wavelength - 1) / (high - 1)
            found.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(found, np.float32)


def model_of(foreign: Foreign) -> GPT:
    model = GPT(foreign.config).eval()
    state = {name: read().float() for name, read in foreign.weights.items()}
    if foreign.config.tie_embeddings:
        state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state)
    return model


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-4 * wanted.abs().max())


def token_by_token(model: GPT, ids: Tensor) -> Tensor:
    """(T, V) logits over a paged cache: a first chunk, then single tokens."""
    page, T = 16, len(ids)
    cache = KVCache(model.config, 1 + -(-T // page), page, dtype=model.dtype)
    tables = [list(range(1, 1 + -(-T // page)))] * len(cache.spec.groups)
    first = max(1, T // 2)
    logits, done = [], 0
    for n in [first, *[1] * (T - first)]:
        plan = AttentionPlan.paged([Chunk(done, n, tables)], page_size=page, pattern=model.pattern)
        logits.append(model(ids[done : done + n], plan, cache))
        done += n
    return torch.cat(logits)


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    wanted = theirs(name)
    foreign = open_gguf(written(wanted, name, tmp_path / "model.gguf"))
    model = model_of(foreign)
    assert foreign.origin["family"] == MODELS[name][0].lower()
    assert foreign.origin["dtype"] == MODELS[name][2]
    assert foreign.tokenizer is None
    assert foreign.config.tie_embeddings == wanted.config.tie_word_embeddings
    for length in (1, 2, 13, CONTEXT):
        ids = torch.randint(0, 60, (2, length))
        logits = wanted(ids).logits
        assert close(model(ids), logits)
        assert close(token_by_token(model, ids[0]), logits[0])


def test_the_limits_of_llama3_come_back_from_its_frequencies(tmp_path: Path) -> None:
    """Also where the file does not say the context that they are drawn from."""
    settings = {**LLAMA, "rope.freq_base": 500000.0, "attention.key_length": 128}
    settings["rope.dimension_count"] = 128
    tensors = llama_tensors()
    for i in range(2):
        for each, n in {"q": 512, "k": 256, "v": 256}.items():
            tensors[f"blk.{i}.attn_{each}.weight"] = np.ones((n, 32), np.float32)
        tensors[f"blk.{i}.attn_output.weight"] = np.ones((32, 512), np.float32)
    for context, high in ((8192, 4.0), (8192, 5.5), (4096, 4.0)):
        tensors["rope_freqs.weight"] = divisors(500000.0, 128, context, high)
        if context != 8192:
            settings["rope.scaling.original_context_length"] = context
        path = tmp_path / f"{context}-{high}.gguf"
        config = open_gguf(write(path, settings, tensors)).config
        assert config.rope_scaling == "llama3"
        assert config.rope_original_block_size == context
        limits = (config.rope_factor, config.rope_low_freq_factor, config.rope_high_freq_factor)
        assert limits == (8.0, 1.0, high)
    tensors["rope_freqs.weight"][40] *= 1.01
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight does not hold"):
        open_gguf(write(tmp_path / "other.gguf", settings, tensors))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"block_count": 10**9}, "block_count is 1000000000, but there are tensors of 2"),
    "no layers": ({"block_count": 0}, "block_count is 0"),
    "heads 0": ({"attention.head_count": 0}, "attention.head_count is 0"),
    "key heads 0": ({"attention.head_count_kv": 0}, "attention.head_count_kv is 0"),
    "heads that do not divide": ({"attention.head_count": 3}, "n_head 3 is not divisible"),
    "width 0": ({"embedding_length": 0}, "embedding_length is 0"),
    "another width": (
        {"embedding_length": 64, "attention.key_length": 8},
        "token_embd.weight has the shape [40, 32]",
    ),
    "huge heads": (
        {"attention.key_length": 2**31 - 2, "rope.dimension_count": None},
        "attn_q.weight has the shape [32, 32]",
    ),
    "context": ({"context_length": 2**32 - 1}, "context_length is 4294967295"),
    "no epsilon": ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    "epsilon": ({"attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
    "vocabulary": ({"vocab_size": 41}, "vocab_size is 41"),
    "part of a head": ({"rope.dimension_count": 4}, "rope.dimension_count is 4"),
    "experts": ({"expert_count": 8}, "expert_count is 8"),
    "not causal": ({"attention.causal": False}, "attention.causal is"),
    "scaling": ({"rope.scaling.type": "longrope"}, "rope.scaling.type is longrope"),
    "unknown": ({"attention.gate": 1}, "attention.gate"),
    "text": ({"context_length": "long"}, "context_length is long"),
    "layers differ": ({"attention.head_count_kv": [2, 4]}, "attention.head_count_kv is"),
    "adapter": ({"general.type": "adapter"}, "general.type is adapter"),
    "template": ({"tokenizer.chat_template": 5}, "tokenizer.chat_template is no text"),
    "no tokens": ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.tokens has no tokens"),
    "more tokens than rows": (
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"] * 41},
        "has 41 tokens, the embedding 40 rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_is_not_supported_is_refused_by_name(name: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[name]
    settings = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    path = write(tmp_path / "model.gguf", settings, llama_tensors())
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", LLAMA, llama_tensors(), "mamba")
    with pytest.raises(CheckpointError, match="mamba, but must be one of llama, qwen2, qwen3"):
        open_gguf(path)


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensors = llama_tensors()
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"lacks the tensor '{name}'"):
        open_gguf(write(tmp_path / "model.gguf", LLAMA, tensors))


@pytest.mark.parametrize("name", ["blk.1.attn_q.bias", "blk.0.ffn_gate_inp.weight", "per_layer"])
def test_a_tensor_too_many_is_named(name: str, tmp_path: Path) -> None:
    tensors = {**llama_tensors(), name: np.ones(32, np.float32)}
    with pytest.raises(CheckpointError, match=name):
        open_gguf(write(tmp_path / "model.gguf", LLAMA, tensors))


def test_a_window_shorter_than_the_context_is_a_pattern(tmp_path: Path) -> None:
    for width, pattern in ((8, "window:8"), (32, "causal"), (0, "causal")):
        settings = {**LLAMA, "attention.sliding_window": width}
        path = write(tmp_path / f"{width}.gguf", settings, llama_tensors())
        assert open_gguf(path).config.pattern == pattern


def test_one_value_for_each_layer_is_one_value(tmp_path: Path) -> None:
    settings = {**LLAMA, "feed_forward_length": [64, 64], "attention.head_count_kv": [2, 2]}
    config = open_gguf(write(tmp_path / "model.gguf", settings, llama_tensors())).config
    assert (config.d_ff, config.n_kv_head) == (64, 2)
