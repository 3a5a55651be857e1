"""Small models as other programs store them, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


def llama_tensors(seed: int = 0) -> dict[str, Tensor]:
    """By their names in a Hugging Face folder, for `LLAMA`."""
    shapes = {"model.embed_tokens": (300, 16), "model.norm": (16,), "lm_head": (300, 16)}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm": (16,),
            f"{layer}.self_attn.q_proj": (16, 16),
            f"{layer}.self_attn.k_proj": (8, 16),
            f"{layer}.self_attn.v_proj": (8, 16),
            f"{layer}.self_attn.o_proj": (16, 16),
            f"{layer}.post_attention_layernorm": (16,),
            f"{layer}.mlp.gate_proj": (24, 16),
            f"{layer}.mlp.up_proj": (24, 16),
            f"{layer}.mlp.down_proj": (16, 24),
        }
    source = torch.Generator().manual_seed(seed)
    return {f"{name}.weight": torch.randn(s, generator=source) for name, s in shapes.items()}


def write_llama(folder: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """A Hugging Face folder without a vocabulary; `changes` to its `config.json`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    save_file(tensors or llama_tensors(), folder / "model.safetensors", {"format": "pt"})
    return folder
