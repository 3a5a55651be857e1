"""Where each weight of ours stands in another format: one table a family, read both ways.

A weight is one or more tensors of the source, stacked: our `qkv` is their query, key and value
projections one below the other, our SwiGLU's `up` their gate and up. To import is to stack, to
export is to cut again at the same places, so a round trip is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.weights.source import Tensors

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Part:
    """One tensor of the other format.

    Attributes:
        name: what it is called there.
        shape: as it is stored there.
        transposed: whether a linear layer's matrix is (in, out) there, as in GPT-2's `Conv1D`.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def rows(self) -> int:
        """Of our weight that are this tensor's."""
        return self.shape[-1] if self.transposed else self.shape[0]


OURS_ALONE: dict[str, Any] = {
    "attn_softcap": None, "value_embeddings": False, "conv_width": 0, "residual_scalars": False,
    "x0_scalars": False,
}  # fmt: skip
"""Fields, and the values without which no family that is exported to computes the same."""

Layout = dict[str, tuple[Part, ...]]
"""By the name of our weight."""


def llama_layout(config: GPTConfig, prefix: str = "model.") -> Layout:
    """Of the Llama family in Hugging Face's names: Llama, Mistral, Qwen2, Qwen3."""
    C, D, F, V = config.d_model, config.head_width, config.mlp_width, config.vocab_size
    H, K = config.n_head * D, config.kv_heads * D
    layout: Layout = {"embed.weight": (Part(f"{prefix}embed_tokens.weight", (V, C)),)}
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}", f"{prefix}layers.{i}"
        attn, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        layout |= {
            f"{ours}.norm_attn.weight": (Part(f"{theirs}.input_layernorm.weight", (C,)),),
            **_linear(f"{ours}.attn.qkv", C, config.has_qkv_bias, {
                f"{attn}.q_proj": H, f"{attn}.k_proj": K, f"{attn}.v_proj": K,
            }),
            **_linear(f"{ours}.attn.out", H, config.bias, {f"{attn}.o_proj": C}),
            f"{ours}.norm_mlp.weight": (Part(f"{theirs}.post_attention_layernorm.weight", (C,)),),
            **_linear(f"{ours}.mlp.up", C, config.has_mlp_bias, {
                f"{mlp}.gate_proj": F, f"{mlp}.up_proj": F,
            }),
            **_linear(f"{ours}.mlp.down", F, config.has_mlp_bias, {f"{mlp}.down_proj": C}),
        }  # fmt: skip
        if config.qk_norm:
            layout[f"{ours}.attn.q_norm.weight"] = (Part(f"{attn}.q_norm.weight", (D,)),)
            layout[f"{ours}.attn.k_norm.weight"] = (Part(f"{attn}.k_norm.weight", (D,)),)
    layout["norm.weight"] = (Part(f"{prefix}norm.weight", (C,)),)
    if not config.tie_embeddings:
        layout["head.weight"] = (Part("lm_head.weight", (V, C)),)
    return layout


def gpt2_layout(
    config: GPTConfig, prefix: str = "transformer.", *, transposed: bool = True
) -> Layout:
    """Of GPT-2 in Hugging Face's names, which are nanoGPT's, too.

    Args:
        transposed: whether matrices are stored (in, out).
    """
    C, F, V = config.d_model, config.mlp_width, config.vocab_size

    def linear(ours: str, theirs: str, width: int, out: int, bias: bool) -> Layout:
        return _linear(ours, width, bias, {theirs: out}, transposed)

    def norm(ours: str, theirs: str) -> Layout:
        kinds = ("weight", "bias") if config.bias else ("weight",)
        return {f"{ours}.{kind}": (Part(f"{theirs}.{kind}", (C,)),) for kind in kinds}

    layout: Layout = {
        "embed.weight": (Part(f"{prefix}wte.weight", (V, C)),),
        "embed_pos.weight": (Part(f"{prefix}wpe.weight", (config.block_size, C)),),
    }
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}", f"{prefix}h.{i}"
        qkv_bias, mlp_bias = config.has_qkv_bias, config.has_mlp_bias
        layout |= {
            **norm(f"{ours}.norm_attn", f"{theirs}.ln_1"),
            **linear(f"{ours}.attn.qkv", f"{theirs}.attn.c_attn", C, 3 * C, qkv_bias),
            **linear(f"{ours}.attn.out", f"{theirs}.attn.c_proj", C, C, config.bias),
            **norm(f"{ours}.norm_mlp", f"{theirs}.ln_2"),
            **linear(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", C, F, mlp_bias),
            **linear(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", F, C, mlp_bias),
        }
    layout |= norm("norm", f"{prefix}ln_f")
    if not config.tie_embeddings:
        layout["head.weight"] = (Part("lm_head.weight", (V, C)),)
    return layout


def _linear(
    ours: str, width: int, bias: bool, theirs: Mapping[str, int], transposed: bool = False
) -> Layout:
    """A linear layer of that input width, stacked of theirs, which are named with their outputs."""
    layout: Layout = {
        f"{ours}.weight": tuple(
            Part(f"{name}.weight", (width, out) if transposed else (out, width), transposed)
            for name, out in theirs.items()
        )
    }
    if bias:
        layout[f"{ours}.bias"] = tuple(Part(f"{name}.bias", (out,)) for name, out in theirs.items())
    return layout


def count_layers(tensors: Tensors, stem: str) -> int:
    """How many layers the tensors have, whatever a configuration claims: numbers after `stem`."""
    number = re.compile(rf"(?:^|\.){re.escape(stem)}\.([0-9]{{1,9}})\.")
    return len({match[1] for name in tensors.names() if (match := number.search(name))})


def stacked(
    tensors: Tensors, layout: Layout, where: str, derived: str = r"(?!)"
) -> dict[str, Callable[[], Tensor]]:
    """How to read each of our weights.

    Args:
        where: what is read, for messages.
        derived: regular expression of the names of tensors that follow from the configuration
            (masks, tables of angles) and may be there.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the configuration says, or is
            not known.
    """
    wanted = {part.name: part for parts in layout.values() for part in parts}
    present = set(tensors.names())
    for name in sorted(present - wanted.keys()):
        if not re.fullmatch(derived, name):
            raise CheckpointError(
                f"{where} has a tensor {name[:200]!r} that the architecture in its configuration "
                "does not have"
            )
    for name, part in wanted.items():
        if name not in present:
            raise CheckpointError(f"{where} lacks the tensor {name!r}")
        found = tuple(tensors.shape(name))
        if found != part.shape:
            raise CheckpointError(
                f"{where}: {name} has the shape {list(found)}, but its configuration makes it "
                f"{list(part.shape)}"
            )
    return {name: _stack(tensors, parts) for name, parts in layout.items()}


def _stack(tensors: Tensors, parts: tuple[Part, ...]) -> Callable[[], Tensor]:
    def read() -> Tensor:
        found = [tensors.read(part.name) for part in parts]
        turned = [
            each.t() if part.transposed else each for each, part in zip(found, parts, strict=True)
        ]
        return turned[0].contiguous() if len(turned) == 1 else torch.cat(turned)

    return read


def cut(state: Mapping[str, Tensor], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The inverse of `stacked`: their tensors, by their names, in order of the layout."""
    for name, parts in layout.items():
        pieces = torch.split(state[name], [part.rows for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            yield part.name, (piece.t() if part.transposed else piece).contiguous()


def same(tensors: Tensors, first: str, second: str) -> bool:
    """Whether two tensors are equal, number by number."""
    if tensors.shape(first) != tensors.shape(second):
        return False
    return torch.equal(tensors.read(first), tensors.read(second))
