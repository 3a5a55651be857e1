"""Which tensors of a GGUF file are which weights of ours, read in either direction.

The families are those of llama.cpp whose function a `GPTConfig` can state. One weight of ours may
be several tensors there, one below the other: queries, keys and values; SwiGLU's gate and what it
lets through.

**Which numbers of a head are a pair.** llama.cpp turns heads of the `llama` family by pairs of
neighbours, and its converter reorders the rows of queries and keys for that; heads of `qwen2` and
`qwen3` it turns by halves, with the rows as they were. Models come in with halves, whatever the
family: then a model is the same numbers whether it was read from GGUF or from where that was made,
it can be written as a Hugging Face folder, and turning halves needs no copy of every other number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.config import GPTConfig, RopeLayout


@dataclass(frozen=True)
class Family:
    """An architecture of llama.cpp.

    Attributes:
        name: its `general.architecture`.
        rope_layout: how it turns heads; None: it does not.
        qk_norm: whether queries and keys are normalised.
    """

    name: str
    rope_layout: RopeLayout | None
    qk_norm: bool = False


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "interleaved"),
        Family("qwen2", "half-split"),
        Family("qwen3", "half-split", qk_norm=True),
        Family("gpt2", None),
    )
}


@dataclass(frozen=True)
class Part:
    """A tensor of the file that is some rows of a weight of ours, or all.

    Attributes:
        name: in the file.
        shape: in the file and with us.
        heads: of rows that a head turns as pairs: how many heads they are; 0 elsewhere.
    """

    name: str
    shape: tuple[int, ...]
    heads: int = 0


EMBEDDING, HEAD, FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"


def parts(config: GPTConfig) -> dict[str, list[Part]]:
    """The parts of every weight, by its name in `GPT.state_dict()`, without a tied head."""
    C, V, F = config.d_model, config.vocab_size, config.mlp_width
    found = {"embed.weight": [Part(EMBEDDING, (V, C))]}
    if config.position == "learned":
        found["embed_pos.weight"] = [Part("position_embd.weight", (config.block_size, C))]
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}.", f"blk.{i}."
        found |= _norm(config, f"{ours}norm_attn", f"{theirs}attn_norm")
        found |= _attention(config, f"{ours}attn.", theirs)
        found |= _norm(config, f"{ours}norm_mlp", f"{theirs}ffn_norm")
        up = ["ffn_gate", "ffn_up"] if config.mlp == "swiglu" else ["ffn_up"]
        inner = [(f"{theirs}{name}", F, 0) for name in up]
        found |= _linear(f"{ours}mlp.up", inner, C, config.has_mlp_bias)
        outer = [(f"{theirs}ffn_down", C, 0)]
        found |= _linear(f"{ours}mlp.down", outer, F, config.has_mlp_bias)
    found |= _norm(config, "norm", "output_norm")
    if not config.tie_embeddings:
        found["head.weight"] = [Part(HEAD, (V, C))]
    return found


def _attention(config: GPTConfig, ours: str, theirs: str) -> dict[str, list[Part]]:
    H, K, D = config.n_head, config.kv_heads, config.head_width
    if config.position == "learned":  # GPT-2 keeps the three together
        rows = [(f"{theirs}attn_qkv", (H + 2 * K) * D, 0)]
    else:
        rows = [
            (f"{theirs}attn_q", H * D, H),
            (f"{theirs}attn_k", K * D, K),
            (f"{theirs}attn_v", K * D, 0),
        ]
    found = _linear(f"{ours}qkv", rows, config.d_model, config.has_qkv_bias)
    found |= _linear(
        f"{ours}out", [(f"{theirs}attn_output", config.d_model, 0)], H * D, config.bias
    )
    if config.qk_norm:
        found[f"{ours}q_norm.weight"] = [Part(f"{theirs}attn_q_norm.weight", (D,), 1)]
        found[f"{ours}k_norm.weight"] = [Part(f"{theirs}attn_k_norm.weight", (D,), 1)]
    return found


def _linear(
    ours: str, rows: list[tuple[str, int, int]], width: int, bias: bool
) -> dict[str, list[Part]]:
    found = {f"{ours}.weight": [Part(f"{name}.weight", (n, width), h) for name, n, h in rows]}
    if bias:
        found[f"{ours}.bias"] = [Part(f"{name}.bias", (n,), h) for name, n, h in rows]
    return found


def _norm(config: GPTConfig, ours: str, theirs: str) -> dict[str, list[Part]]:
    found = {f"{ours}.weight": [Part(f"{theirs}.weight", (config.d_model,))]}
    if config.norm == "layernorm" and config.bias:
        found[f"{ours}.bias"] = [Part(f"{theirs}.bias", (config.d_model,))]
    return found


def turn_rows(x: Tensor, heads: int, have: RopeLayout | None, want: RopeLayout | None) -> Tensor:
    """The rows of `heads` heads in another order: x is (heads * D, …), by halves or by pairs."""
    if not heads or have == want:
        return x
    pairs = x.unflatten(0, (heads, -1, 2) if have == "interleaved" else (heads, 2, -1))
    return pairs.transpose(1, 2).flatten(0, 2)


def join(pieces: list[Tensor]) -> Tensor:
    """One below the other, in a type that holds all of them."""
    dtype = pieces[0].dtype
    for piece in pieces[1:]:
        dtype = torch.promote_types(dtype, piece.dtype)
    return torch.cat([piece.to(dtype) for piece in pieces]) if len(pieces) > 1 else pieces[0]


def reader(
    pieces: list[Part], read: Callable[[str], Tensor], have: RopeLayout | None
) -> Callable[[], Tensor]:
    """How to read one weight of ours, with heads by halves."""

    def weight() -> Tensor:
        rows = [turn_rows(read(part.name), part.heads, have, "half-split") for part in pieces]
        return join(rows).contiguous()

    return weight


def split(
    config: GPTConfig, state: Mapping[str, Tensor], want: RopeLayout | None
) -> list[tuple[Part, Callable[[], Tensor]]]:
    """The inverse: every tensor of the file, in order, and how to make it."""

    def maker(name: str, part: Part, first: int) -> Callable[[], Tensor]:
        def make() -> Tensor:
            rows = state[name][first : first + part.shape[0]]
            return turn_rows(rows, part.heads, config.rope_layout, want)

        return make

    found = []
    for name, pieces in parts(config).items():
        first = 0
        for part in pieces:
            found.append((part, maker(name, part, first)))
            first += part.shape[0]
    return found
