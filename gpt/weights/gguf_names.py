"""What tensors of a GGUF file are called, and in which order the rows of its heads stand.

The families are those of llama.cpp whose function a `GPTConfig` can state.

**Which numbers of a head are a pair.** llama.cpp turns heads of the `llama` family by pairs of
neighbours, and its converter reorders the rows of queries and keys for that; heads of `qwen2` and
`qwen3` it turns by halves, with the rows as they were. Models come in with halves, whatever the
family: then a model is the same numbers whether it was read from GGUF or from where that was made,
it can be written as a Hugging Face folder, and turning halves needs no copy of every other number.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpt.config import GPTConfig, RopeLayout
from gpt.weights.layout import Layout, Part
from gpt.weights.source import Tensors

EMBEDDING, HEAD, FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"


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


def gguf_layout(config: GPTConfig) -> Layout:
    """The tensors of every weight of ours. Sizes are torch's: the file has them the other way."""
    C, V, F = config.d_model, config.vocab_size, config.mlp_width
    H, K = config.n_head * config.head_width, config.kv_heads * config.head_width
    layout: Layout = {"embed.weight": (Part(EMBEDDING, (V, C)),)}
    if config.position == "learned":
        layout["embed_pos.weight"] = (Part("position_embd.weight", (config.block_size, C)),)
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}.", f"blk.{i}."
        if config.position == "learned":
            qkv = {f"{theirs}attn_qkv": H + 2 * K}
        else:
            qkv = {f"{theirs}attn_q": H, f"{theirs}attn_k": K, f"{theirs}attn_v": K}
        gate = {f"{theirs}ffn_gate": F} if config.mlp == "swiglu" else {}
        layout |= {
            **_norm(config, f"{ours}norm_attn", f"{theirs}attn_norm"),
            **_linear(f"{ours}attn.qkv", C, config.has_qkv_bias, qkv),
            **_linear(f"{ours}attn.out", H, config.bias, {f"{theirs}attn_output": C}),
            **_norm(config, f"{ours}norm_mlp", f"{theirs}ffn_norm"),
            **_linear(f"{ours}mlp.up", C, config.has_mlp_bias, {**gate, f"{theirs}ffn_up": F}),
            **_linear(f"{ours}mlp.down", F, config.has_mlp_bias, {f"{theirs}ffn_down": C}),
        }
        if config.qk_norm:
            for each in ("q", "k"):
                name, shape = f"{theirs}attn_{each}_norm.weight", (config.head_width,)
                layout[f"{ours}attn.{each}_norm.weight"] = (Part(name, shape),)
    layout |= _norm(config, "norm", "output_norm")
    if not config.tie_embeddings:
        layout["head.weight"] = (Part(HEAD, (V, C)),)
    return layout


def _linear(ours: str, width: int, bias: bool, theirs: dict[str, int]) -> Layout:
    """A linear layer, stacked of theirs, which are named with their outputs."""
    layout: Layout = {
        f"{ours}.weight": tuple(Part(f"{name}.weight", (n, width)) for name, n in theirs.items())
    }
    if bias:
        layout[f"{ours}.bias"] = tuple(Part(f"{name}.bias", (n,)) for name, n in theirs.items())
    return layout


def _norm(config: GPTConfig, ours: str, theirs: str) -> Layout:
    kinds = ("weight", "bias") if config.norm == "layernorm" and config.bias else ("weight",)
    return {f"{ours}.{kind}": (Part(f"{theirs}.{kind}", (config.d_model,)),) for kind in kinds}


def turn_rows(
    x: Tensor, name: str, config: GPTConfig, have: RopeLayout | None, want: RopeLayout | None
) -> Tensor:
    """The tensor of that name with the numbers of its heads in another order.

    Args:
        x: (heads * D, …) with rows that rotary positions turn, or any other, which stays as it is.
        have, want: how a pair of numbers stands.
    """
    heads = {
        "attn_q": config.n_head,
        "attn_k": config.kv_heads,
        "attn_q_norm": 1,
        "attn_k_norm": 1,
    }.get(name.split(".")[-2])
    if heads is None or have == want:
        return x
    pairs = (heads, -1, 2) if have == "interleaved" else (heads, 2, -1)
    return x.reshape(*pairs, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


class Halves:
    """The tensors of a file with every head by halves."""

    def __init__(self, tensors: Tensors, config: GPTConfig, have: RopeLayout | None) -> None:
        self._tensors, self._config, self._have = tensors, config, have

    def names(self) -> list[str]:
        return self._tensors.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def read(self, name: str) -> Tensor:
        x = self._tensors.read(name)
        return turn_rows(x, name, self._config, self._have, "half-split" if self._have else None)
