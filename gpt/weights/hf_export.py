"""Export to a folder that `transformers` loads, where one of its classes computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gpt.checkpoint import LoadedModel, replace_folder
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.weights.hf_config import ARCHITECTURES
from gpt.weights.hf_rope import write_rope
from gpt.weights.layout import OURS_ALONE, cut, gpt2_layout, llama_layout


def export_folder(loaded: LoadedModel, folder: Path) -> str:
    """Write a Hugging Face folder; it appears whole or not at all.

    Args:
        folder: must be empty, or not there.

    Returns:
        The name of the class that loads it.

    Raises:
        CheckpointError: no class computes what this model does, or the place is taken.
    """
    from gpt.vocab import to_huggingface

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty; choose another place")
    config = loaded.model.config
    family, settings = describe(config)
    kind = str(loaded.model.dtype).removeprefix("torch.")
    described = {
        "architectures": [ARCHITECTURES[family][0]],
        "model_type": family,
        **settings,
        **_token_ids(loaded),
        "torch_dtype": kind,
    }
    files = to_huggingface(loaded.tokenizer)
    layout = gpt2_layout(config) if family == "gpt2" else llama_layout(config)

    def fill(new: Path) -> None:
        tensors = dict(cut(_half_split(loaded.model.state_dict(), config), layout))
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
        for name, text in files.items():
            (new / name).write_bytes(text.encode())
        if loaded.chat_template is not None:
            (new / "chat_template.jinja").write_bytes(loaded.chat_template.encode())
        (new / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")

    replace_folder(folder, fill)
    return ARCHITECTURES[family][0]


def describe(config: GPTConfig) -> tuple[str, dict[str, Any]]:
    """The family that computes what this architecture does, and its `config.json`.

    Raises:
        CheckpointError: none does; says which fields are in the way.
    """
    gpt2 = config.position == "learned"
    wrong = _common(config) + (_not_gpt2(config) if gpt2 else _not_llama(config))
    if not wrong:
        try:
            return ("gpt2", _gpt2(config)) if gpt2 else _llama(config)
        except _NoClassError as error:
            wrong = [str(error)]
    raise CheckpointError(
        "no model class of Hugging Face's GPT-2 and Llama families computes what this model does: "
        + "; ".join(wrong)
    )


class _NoClassError(Exception):
    """Each field is possible, but no class has them together."""


def _unlike(config: GPTConfig, **wanted: Any) -> list[str]:
    return [
        f"{name} is {getattr(config, name)!r}, not {value!r}"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]


def _common(config: GPTConfig) -> list[str]:
    return _unlike(config, norm_place="pre", residual_scale=1.0, logit_softcap=None, **OURS_ALONE)


def _not_gpt2(config: GPTConfig) -> list[str]:
    wrong = _unlike(config, norm="layernorm", bias=True, has_qkv_bias=True, has_mlp_bias=True)
    wrong += _unlike(config, qk_norm=False, kv_heads=config.n_head, pattern="causal")
    if config.mlp not in ("gelu", "gelu-exact"):
        wrong.append(f"mlp is {config.mlp!r}, not 'gelu' or 'gelu-exact'")
    if config.head_width * config.n_head != config.d_model:
        wrong.append("head_dim is not d_model / n_head")
    if config.attn_scale not in (None, 1.0):
        wrong.append(f"attn_scale is {config.attn_scale}, not null or 1")
    return wrong


def _not_llama(config: GPTConfig) -> list[str]:
    wrong = _unlike(config, position="rotary", norm="rmsnorm", mlp="swiglu")
    if config.position == "rotary" and config.rope_width != config.head_width:
        wrong.append(f"rope_dims is {config.rope_dims}, not null")
    if config.attn_scale not in (None, config.head_width**-0.5):
        wrong.append(f"attn_scale is {config.attn_scale}, not null")
    windows = {pattern for pattern in config.patterns if pattern != "causal"}
    other = [each for each in windows if not _width(each)]
    if other or len(windows) > 1:
        wrong.append(f"pattern is {config.pattern!r}, not causal and one window in some layers")
    return wrong


def _width(pattern: str) -> int | None:
    kind, _, width = pattern.partition(":")
    return int(width) if kind == "window" and width.isdecimal() else None


def _gpt2(config: GPTConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_embd": config.d_model,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.mlp_width,
        "activation_function": "gelu_new" if config.mlp == "gelu" else "gelu",
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": config.attn_scale is None,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attn_dropout,
    }


def _llama(config: GPTConfig) -> tuple[str, dict[str, Any]]:
    layers = [config.patterns[i % len(config.patterns)] for i in range(config.n_layer)]
    windowed = ["sliding_attention" if _width(each) else "full_attention" for each in layers]
    window = next((_width(each) for each in config.patterns if _width(each)), None)
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.block_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        **write_rope(config),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": config.attn_dropout,
        "initializer_range": config.init_std,
    }
    biases = (config.has_qkv_bias, config.bias, config.has_mlp_bias)
    by_layer = {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0 if window else config.n_layer,
        "layer_types": windowed,
    }
    if config.qk_norm:
        if biases[0] != biases[1] or biases[2]:
            raise _NoClassError(
                "with qk_norm there is Qwen3, whose biases are in all of attention or nowhere, and "
                "never in the MLP"
            )
        return "qwen3", {**settings, "attention_bias": config.bias, **by_layer}
    if biases == (True, False, False):
        return "qwen2", {**settings, **by_layer}
    if biases[0] != biases[1]:
        raise _NoClassError("qkv_bias is set against bias, which only Qwen2 has, without mlp_bias")
    whole = config.d_model % config.n_head == 0  # Llama's class refuses others
    if not any(biases) and (window or not whole) and len(set(windowed)) == 1:
        return "mistral", {**settings, "sliding_window": window}
    if window is not None:
        raise _NoClassError(
            f"pattern is {config.pattern!r}: a window in every layer needs a model without biases "
            "(Mistral), one in some layers needs qk_norm (Qwen3) or qkv_bias alone (Qwen2)"
        )
    if not whole:
        raise _NoClassError("d_model is no multiple of n_head, which Llama needs with biases")
    return "llama", {**settings, "attention_bias": config.bias, "mlp_bias": config.has_mlp_bias}


def _token_ids(loaded: LoadedModel) -> dict[str, Any]:
    """What begins and what ends a text. Written even where there is none: the classes have ids of
    their own by default."""
    tokenizer = loaded.tokenizer
    ends = sorted(tokenizer.end_ids - {tokenizer.eot})
    return {
        "bos_token_id": None if tokenizer.begin is None else tokenizer.start,
        "eos_token_id": [tokenizer.eot, *ends] if ends else tokenizer.eot,
    }


def _half_split(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """The weights of the same function with pairs i and i + D / 2, as these classes turn them: rows
    of the queries' and keys' projections, in another order."""
    if config.position != "rotary" or config.rope_layout == "half-split":
        return state
    D, turned = config.head_width, (config.n_head + config.kv_heads) * config.head_width
    order = torch.cat([torch.arange(0, D, 2), torch.arange(1, D, 2)])
    state = dict(state)
    for name, value in state.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            state[name] = value[order]
        elif ".attn.qkv." in name:
            heads = value[:turned].view(-1, D, *value.shape[1:])[:, order].flatten(0, 1)
            state[name] = torch.cat([heads, value[turned:]])
    return state
