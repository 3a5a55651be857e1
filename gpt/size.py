"""How large a model is, counted from its configuration alone: no torch, no weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpt.cachespec import CacheSpec
from gpt.config import GPTConfig

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Part:
    """Parameters of one kind.

    Attributes:
        name: what they are for.
        shape: of one of them, as in the weights file.
        times: how many there are, over all layers.
        shared: whether they are another part's, and are neither stored nor counted.
    """

    name: str
    shape: tuple[int, ...]
    times: int = 1
    shared: bool = False

    @property
    def count(self) -> int:
        return 0 if self.shared else self.times * math.prod(self.shape)


def parts(config: GPTConfig) -> list[Part]:
    """Every parameter of the model, in the order in which a token meets them."""
    C, D, F, V, L = (
        config.d_model, config.head_width, config.mlp_width, config.vocab_size, config.n_layer,
    )  # fmt: skip
    queries, keys = config.n_head * D, config.kv_heads * D
    found = [Part("embedding", (V, C))]
    if config.position == "learned":
        found.append(Part("positions", (config.block_size, C)))
    found += [
        Part("attention query", (queries, C), L),
        Part("attention key", (keys, C), L),
        Part("attention value", (keys, C), L),
        Part("attention out", (C, queries), L),
    ]
    if config.position == "relative":
        found.append(Part("relative keys", (config.relative_distance + 1, D), L))
    if config.value_embeddings:
        own = sum(config.has_value_embedding(layer) for layer in range(L))
        found += [Part("value embeddings", (V, keys), own), Part("value scalars", (1,), own)]
    if config.qk_norm:
        found.append(Part("query and key norms", (D,), 2 * L))
    if config.mlp == "swiglu":
        found.append(Part("mlp gate", (F, C), L))
    found += [Part("mlp up", (F, C), L), Part("mlp down", (C, F), L)]
    inner = 2 * F if config.mlp == "swiglu" else F
    biases = (queries + 2 * keys) * config.has_qkv_bias + C * config.bias
    biases += (inner + C) * config.has_mlp_bias
    if biases:
        found.append(Part("biases", (biases,), L))
    if config.conv_width:
        found.append(Part("convolutions", (C, 1, config.conv_width), 2 * L))
    scalars = config.residual_scalars + config.x0_scalars
    if scalars:
        found.append(Part("stream scalars", (1,), scalars * L))
    final = 1 if config.norm_place == "pre" else 0
    found.append(Part("norms", (C,), 2 * L + final))
    if config.norm == "layernorm" and config.bias:
        found.append(Part("norm biases", (C,), 2 * L + final))
    found.append(Part("head", (V, C), shared=config.tie_embeddings))
    return found


def parameter_count(config: GPTConfig) -> int:
    """Trained numbers; a tied head counts once."""
    return sum(part.count for part in parts(config))


def matrix_count(config: GPTConfig) -> int:
    """Numbers in the matrices that tokens are multiplied with, the head always among them."""
    blocks = sum(part.count for part in _matrices(config))
    return blocks + config.vocab_size * config.d_model


def neuron_count(config: GPTConfig) -> int:
    """Rows of the blocks' matrices, or columns of those with more of these, over all of them."""
    return sum(part.times * max(part.shape) for part in _matrices(config))


def _matrices(config: GPTConfig) -> list[Part]:
    """Those of the blocks."""
    return [part for part in parts(config) if part.name.startswith(("attention ", "mlp "))]


def kv_bytes_per_token(config: GPTConfig, dtype: str) -> int:
    """Bytes that a token's keys and values take in the cache, over all layers."""
    return 2 * config.n_layer * config.kv_heads * config.head_width * BYTES[dtype]


def state_bytes(config: GPTConfig, dtype: str) -> int:
    """Bytes that convolutions hold of a text, however long it is."""
    return 2 * config.n_layer * config.d_model * max(0, config.conv_width - 1) * BYTES[dtype]


def kv_bytes(config: GPTConfig, dtype: str, length: int) -> int:
    """Bytes that the keys and values of a text of `length` tokens take: a layer holds what it
    remembers of it, and of convolutions the last few inputs."""
    return CacheSpec.of(config).text_bytes(length, BYTES[dtype])
