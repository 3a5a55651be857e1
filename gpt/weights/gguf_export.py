"""Export to a GGUF file that llama.cpp runs, where one of its families computes the same."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from gpt.checkpoint import LoadedModel
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.files import sync_folder
from gpt.rotary import frequencies
from gpt.weights.gguf_names import FAMILIES, FREQUENCIES, Family, gguf_layout, turn_rows
from gpt.weights.gguf_vocabulary import padded
from gpt.weights.layout import OURS_ALONE, cut

if TYPE_CHECKING:
    from gpt.weights.gguf_writer import Writer

Kind = Literal["F32", "F16", "BF16", "Q8_0"]
_OF_TORCH: dict[torch.dtype, Kind] = {torch.float16: "F16", torch.bfloat16: "BF16"}
_ROWS = 1 << 20
"""Numbers that are converted at once."""


def export_gguf(loaded: LoadedModel, path: Path, *, kind: Kind | None = None) -> str:
    """Write a GGUF file; it appears whole or not at all.

    Args:
        path: where nothing is yet.
        kind: GGML's type for the matrices; None: as they are. Vectors are always F32, as llama.cpp
            wants them.

    Returns:
        The family that llama.cpp takes it for.

    Raises:
        CheckpointError: no family computes what this model does, or the place is taken.
        TokenizerError: llama.cpp has no such tokenizer.
    """
    from gpt.vocab import to_gguf

    config = loaded.model.config
    family = find_family(config)
    settings = {"general.name": loaded.name, **padded(to_gguf(loaded.tokenizer), config.vocab_size)}
    if loaded.chat_template is not None:
        settings["tokenizer.chat_template"] = loaded.chat_template
    write_gguf(path, config, loaded.model.state_dict(), settings, kind=kind)
    return family.name


def find_family(config: GPTConfig) -> Family:
    """The family of llama.cpp that computes what this architecture does.

    Raises:
        CheckpointError: none does; says which fields are in the way.
    """
    gpt2 = config.position == "learned"
    wrong = _common(config) + (_not_gpt2(config) if gpt2 else _not_rotary(config))
    if wrong:
        raise CheckpointError(
            "no family of llama.cpp that is known here (llama, qwen2, qwen3, gpt2) computes what "
            "this model does: " + "; ".join(wrong)
        )
    if gpt2:
        return FAMILIES["gpt2"]
    if config.qk_norm:
        return FAMILIES["qwen3"]
    only_qkv = config.has_qkv_bias and not config.bias and not config.has_mlp_bias
    # llama.cpp takes biases in the family llama, too, and there alone llama3's frequencies, or
    # biases with heads of another width.
    plain = config.rope_scaling != "llama3" and config.head_width * config.n_head == config.d_model
    return FAMILIES["qwen2" if only_qkv and plain else "llama"]


def _unlike(config: GPTConfig, **wanted: Any) -> list[str]:
    return [
        f"{name} is {getattr(config, name)!r}, not {value!r}"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]


def _common(config: GPTConfig) -> list[str]:
    wrong = _unlike(config, norm_place="pre", residual_scale=1.0, logit_softcap=None, **OURS_ALONE)
    if config.attn_scale not in (None, config.head_width**-0.5):
        wrong.append(f"attn_scale is {config.attn_scale}, not null")
    # A window as long as the context hides nothing.
    widths = [_window(pattern) for pattern in config.patterns]
    if any(width is None or width < config.block_size for width in widths):
        wrong.append(f"pattern is {config.pattern!r}, not causal")
    return wrong


def _window(pattern: str) -> float | None:
    kind, _, width = pattern.partition(":")
    if kind == "causal":
        return float("inf")
    return int(width) if kind == "window" and width.isdecimal() else None


def _not_gpt2(config: GPTConfig) -> list[str]:
    wrong = _unlike(config, norm="layernorm", mlp="gelu", qk_norm=False, bias=True)
    wrong += _unlike(config, has_qkv_bias=True, has_mlp_bias=True, kv_heads=config.n_head)
    if config.head_width * config.n_head != config.d_model:
        wrong.append(f"head_dim is {config.head_dim}, not d_model / n_head")
    return wrong


def _not_rotary(config: GPTConfig) -> list[str]:
    wrong = _unlike(config, position="rotary", norm="rmsnorm", mlp="swiglu")
    if config.position == "rotary" and config.rope_width != config.head_width:
        wrong.append(f"rope_dims is {config.rope_dims}, not null")
    if config.rope_scaling == "yarn":
        wrong += _unlike(config, rope_truncate=True)
    if config.qk_norm:  # qwen3
        wrong += _unlike(config, bias=False, has_qkv_bias=False, has_mlp_bias=False)
        if config.rope_scaling == "llama3":
            wrong.append("rope_scaling is 'llama3', which there is not with qk_norm")
    return wrong


def write_gguf(
    path: Path,
    config: GPTConfig,
    state: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    *,
    kind: Kind | None = None,
) -> None:
    """Write the weights under llama.cpp's names, the architecture, and further settings.

    Args:
        state: as `GPT.state_dict()` names them.
        settings: by their GGUF keys: text, numbers, lists of one type.

    Raises:
        CheckpointError: no family computes this, the place is taken, or it cannot be written.
    """
    from gpt.weights.gguf_writer import Writer

    family = find_family(config)
    if path.exists():
        raise CheckpointError(f"{path} exists; choose another place")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    writer = Writer(temporary, family.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for key, value in {**describe(config, family), **settings}.items():
            writer.add(key, value)
        _write_tensors(writer, config, state, family, kind)
        writer.close()
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)


def describe(config: GPTConfig, family: Family) -> dict[str, Any]:
    """The architecture as GGUF's settings."""
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.block_size,
        "embedding_length": config.d_model,
        "block_count": config.n_layer,
        "feed_forward_length": config.mlp_width,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.kv_heads,
    }
    if family.rope_layout is None:
        values["attention.layer_norm_epsilon"] = config.norm_eps
    else:
        values |= {
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "attention.key_length": config.head_width,
            "attention.value_length": config.head_width,
            "rope.dimension_count": config.head_width,
            **_rope(config),
        }
    described = {"general.type": "model"}
    return described | {f"{family.name}.{name}": value for name, value in values.items()}


def _rope(config: GPTConfig) -> dict[str, Any]:
    base, factor, R = config.rope_base, config.rope_factor, config.rope_width
    if config.rope_scaling == "ntk":  # nothing but another base
        base *= factor ** (R / (R - 2))
    found: dict[str, Any] = {"rope.freq_base": float(base)}
    if config.rope_scaling in ("linear", "yarn"):
        found["rope.scaling.type"] = config.rope_scaling
        found["rope.scaling.factor"] = float(factor)
    if config.rope_scaling in ("llama3", "yarn"):
        found["rope.scaling.original_context_length"] = config.rope_original_block_size
    if config.rope_scaling == "yarn":
        plain = config.replace(rope_attention_factor=None).rope_magnitude
        found["rope.scaling.attn_factor"] = config.rope_magnitude / plain
        found["rope.scaling.yarn_beta_fast"] = float(config.rope_beta_fast)
        found["rope.scaling.yarn_beta_slow"] = float(config.rope_beta_slow)
    return found


def _write_tensors(
    writer: Writer,
    config: GPTConfig,
    state: Mapping[str, Tensor],
    family: Family,
    kind: Kind | None,
) -> None:
    """The table of all tensors first, then one after another their numbers."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

    kinds = {}
    for name, x in _tensors(config, state, family):
        chosen = GGMLQuantizationType[_kind(name, x, kind)]
        block, size = GGML_QUANT_SIZES[chosen]
        kinds[name] = chosen
        writer.add_tensor_info(
            name, x.shape, np.dtype(np.float32), x.numel() // block * size, raw_dtype=chosen
        )
    most = kinds["token_embd.weight"].name
    writer.add_file_type(LlamaFileType["ALL_F32" if most == "F32" else f"MOSTLY_{most}"])
    if kind == "Q8_0":
        writer.add_quantization_version(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, x in _tensors(config, state, family):
        stored = _stored(x, kinds[name])
        if kinds[name].name == "F16" and bool(x.isfinite().all()) > bool(np.isfinite(stored).all()):
            raise CheckpointError(f"{name} has numbers too large for F16; choose another type")
        writer.write_tensor_data(stored)


def _tensors(
    config: GPTConfig, state: Mapping[str, Tensor], family: Family
) -> Iterator[tuple[str, Tensor]]:
    for name, x in cut(state, gguf_layout(config)):
        yield name, turn_rows(x, name, config, config.rope_layout, family.rope_layout)
    if config.rope_scaling == "llama3":
        plain = frequencies(config.replace(
            rope_scaling="none", rope_factor=1.0, rope_original_block_size=None,
            rope_low_freq_factor=1.0, rope_high_freq_factor=4.0,
        ))  # fmt: skip
        yield FREQUENCIES, (plain / frequencies(config)).float()


def _kind(name: str, x: Tensor, wanted: Kind | None) -> Kind:
    """Vectors and GPT-2's positions stay F32; so do, of Q8_0, matrices that are no whole blocks."""
    if x.dim() == 1 or name == "position_embd.weight":
        return "F32"
    if wanted == "Q8_0" and x.shape[-1] % 32:
        return "F32"
    return wanted or _OF_TORCH.get(x.dtype, "F32")


def _stored(x: Tensor, kind: Any) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in that type, made slice by slice."""
    from gguf.quants import quantize

    if kind.name == "BF16" and x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy()
    if kind.name in ("F32", "F16"):
        return x.to(torch.float32 if kind.name == "F32" else torch.float16).contiguous().numpy()
    rows = x.reshape(1, -1) if x.dim() == 1 else x
    step = max(1, _ROWS // rows.shape[-1])
    parts = (rows[first : first + step] for first in range(0, len(rows), step))
    return np.concatenate([quantize(part.float().contiguous().numpy(), kind) for part in parts])
