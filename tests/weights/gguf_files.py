"""GGUF files for tests: honest ones by the gguf package's writer, others byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10

LLAMA: dict[str, Any] = {
    "vocab_size": 40,
    "context_length": 32,
    "embedding_length": 32,
    "block_count": 2,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 8,
    "rope.freq_base": 10000.0,
}


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of LLAMA, by llama.cpp's names."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (40, 32)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (32,),
            f"blk.{i}.attn_q.weight": (32, 32),
            f"blk.{i}.attn_k.weight": (16, 32),
            f"blk.{i}.attn_v.weight": (16, 32),
            f"blk.{i}.attn_output.weight": (32, 32),
            f"blk.{i}.ffn_norm.weight": (32,),
            f"blk.{i}.ffn_gate.weight": (64, 32),
            f"blk.{i}.ffn_up.weight": (64, 32),
            f"blk.{i}.ffn_down.weight": (32, 64),
        }
    shapes["output_norm.weight"] = (32,)
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    settings: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    family: str = "llama",
    kinds: Mapping[str, str] | str = "F32",
) -> Path:
    """An honest file. Settings with a dot before `general.` or `tokenizer.` names are the family's;
    matrices become blocks of the given kind, one for all or by name."""
    writer = GGUFWriter(path, family)
    for name, value in settings.items():
        key = name if name.startswith(("general.", "tokenizer.", "split.")) else f"{family}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, numbers in tensors.items():
        kind = kinds if isinstance(kinds, str) else kinds.get(name, "F32")
        chosen = GGMLQuantizationType["F32" if numbers.ndim == 1 else kind]
        plain = chosen.name in ("F32", "F16")
        writer.add_tensor(name, quantize(numbers, chosen), raw_dtype=None if plain else chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def setting(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """An entry of the table of tensors; sizes as in the file, the fastest first."""
    sizes = b"".join(struct.pack("<Q", n) for n in shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def raw(
    settings: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_settings: int | None = None,
) -> bytes:
    """A file of these entries, which may claim to have other numbers of them."""
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(settings) if n_settings is None else n_settings,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join([*settings, *tensors])
    return head + bytes(-len(head) % 32) + data
