"""A GGUF file's settings as a `GPTConfig`. A setting that is not understood is refused by name."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.params import brief
from gpt.rotary import frequencies
from gpt.weights.fields import Fields
from gpt.weights.gguf_file import GGUFFile
from gpt.weights.gguf_names import EMBEDDING, FAMILIES, FREQUENCIES, HEAD, Family
from gpt.weights.layout import count_layers

LLAMA3_CONTEXT = 8192
"""What models with Llama 3's frequencies were trained on, where the file does not say."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
"""Settings of which only these values leave the architecture as it is here."""
_IDLE = (
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
"""Settings that say how a file came about, or that only a scaling reads that was not asked for."""


def read_config(file: GGUFFile) -> GPTConfig:
    """The architecture that settings and tensors' names describe.

    Raises:
        CheckpointError: another family; a setting missing, out of range or not supported.
    """
    reader = _Reader(file)
    try:
        config = reader.config()
    except ConfigError as error:
        raise CheckpointError(f"{file.path} describes no usable model: {error}") from None
    reader.finish()
    return config


class _Reader:
    """The settings of one family, named without it, and each asked for once."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.names = file, set(file.names())
        name = file.settings.get("general.architecture")
        if not isinstance(name, str) or name not in FAMILIES:
            raise CheckpointError(
                f"{file.path}: general.architecture is {brief(name)}, but must be one of "
                f"{', '.join(FAMILIES)}"
            )
        kind = file.settings.get("general.type", "model")
        if kind != "model":
            raise CheckpointError(f"{file.path}: general.type is {brief(kind)}, not 'model'")
        self.family: Family = FAMILIES[name]
        prefix = f"{name}."
        self.fields = Fields(
            {
                key.removeprefix(prefix): _one(value)
                for key, value in file.settings.items()
                if key.startswith(prefix)
            },
            f"{file.path} ({name})",
        )

    def config(self) -> GPTConfig:
        """The architecture. Raises ConfigError or CheckpointError."""
        fields, file = self.fields, self.file
        if EMBEDDING not in self.names or len(file.shape(EMBEDDING)) != 2:
            raise CheckpointError(f"{file.path}: there is no matrix {EMBEDDING}")
        n_layer, layers = fields.integer("block_count"), count_layers(file, "blk")
        if layers != n_layer:  # before anything is made for each of them
            fields.refuse("block_count", f"is {n_layer}, but there are tensors of {layers} blocks")
        rows = file.shape(EMBEDDING)[0]
        fields.only("vocab_size", rows)
        context = fields.integer("context_length")
        config = GPTConfig(
            vocab_size=rows,
            block_size=context,
            n_layer=n_layer,
            d_ff=fields.integer("feed_forward_length"),
            tie_embeddings=HEAD not in self.names,
            qk_norm=self.family.qk_norm,
            **self.heads(),
            **(self.rotary(context) if self.family.rope_layout else self.gpt2()),
        )
        if self.family.rope_layout:
            fields.only("rope.dimension_count", config.head_width)
        return self.llama3(config) if FREQUENCIES in self.names else config

    def finish(self) -> None:
        """Raises CheckpointError for a setting that nobody asked for and that is not neutral."""
        for name, allowed in _NEUTRAL.items():
            self.fields.only(name, *allowed)
        self.fields.ignore(*_IDLE)
        self.fields.finish()

    def heads(self) -> dict[str, Any]:
        fields = self.fields
        d_model, n_head = fields.integer("embedding_length"), fields.integer("attention.head_count")
        n_kv_head = fields.integer("attention.head_count_kv", n_head)
        head_dim = fields.integer("attention.key_length", d_model // n_head)
        fields.only("attention.value_length", head_dim)
        return {
            "d_model": d_model,
            "n_head": n_head,
            "n_kv_head": None if n_kv_head == n_head else n_kv_head,
            "head_dim": None if head_dim * n_head == d_model else head_dim,
        }

    def gpt2(self) -> dict[str, Any]:
        return {
            "position": "learned",
            "norm": "layernorm",
            "norm_eps": self.fields.number("attention.layer_norm_epsilon"),
            "mlp": "gelu",
            "bias": True,
        }

    def rotary(self, context: int) -> dict[str, Any]:
        window = self.fields.integer("attention.sliding_window", 0, least=0)
        return {
            "position": "rotary",
            "norm": "rmsnorm",
            "norm_eps": self.fields.number("attention.layer_norm_rms_epsilon"),
            "mlp": "swiglu",
            "pattern": f"window:{window}" if 0 < window < context else "causal",
            "rope_base": self.fields.number("rope.freq_base", 10000.0),
            **self.biases(),
            **self.scaling(context),
        }

    def biases(self) -> dict[str, Any]:
        """Those of the first block; that the others have the same, the check of tensors sees to."""
        bias, qkv, mlp = (
            f"blk.0.{name}.bias" in self.names for name in ("attn_output", "attn_q", "ffn_down")
        )
        return {
            "bias": bias,
            "qkv_bias": None if qkv == bias else qkv,
            "mlp_bias": None if mlp == bias else mlp,
        }

    def scaling(self, context: int) -> dict[str, Any]:
        """Rotary scaling. As in llama.cpp, a factor without a type is linear."""
        fields = self.fields
        old = fields.number("rope.scale_linear", 1.0)
        factor = fields.number("rope.scaling.factor", old)
        kind = fields.text("rope.scaling.type", "linear")
        if kind != "yarn":
            fields.only("rope.scaling.attn_factor", 1.0)
            if kind not in ("none", "linear"):
                fields.refuse("rope.scaling.type", f"is {brief(kind)}, not none, linear or yarn")
            scaled = kind == "linear" and factor != 1
            return {"rope_scaling": "linear", "rope_factor": factor} if scaled else {}
        magnitude = fields.number("rope.scaling.attn_factor", 1.0)
        natural = 0.1 * math.log(factor) + 1
        return {
            "rope_scaling": "yarn",
            "rope_factor": factor,
            "rope_original_block_size": fields.integer(
                "rope.scaling.original_context_length", context
            ),
            "rope_attention_factor": None if magnitude == 1 else magnitude * natural,
            "rope_beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
            "rope_beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
        }

    def llama3(self, config: GPTConfig) -> GPTConfig:
        """The `llama3` scaling whose frequencies the file holds as a tensor of divisors.

        A converter writes only what came out of the formula. The pairs that are neither left alone
        nor stretched by all of the factor lie on a straight line over their turns within the
        original context, which gives back the two limits. Unless the formula then yields the
        tensor again, that stems from another one.
        """
        context = self.fields.integer("rope.scaling.original_context_length", LLAMA3_CONTEXT)
        if config.rope_scaling == "none" and self.file.shape(FREQUENCIES) == (
            config.rope_width // 2,
        ):
            divisors = self.file.read(FREQUENCIES).double()
            factor, plain = float(str(divisors.max().float().numpy())), frequencies(config)
            if bool((divisors == 1).all()):
                return config
            for low, high in ((1.0, 4.0), *_limits(divisors, plain, factor, context)):
                if not (factor > 1 and 0 < low < high):
                    continue
                found = config.replace(
                    rope_scaling="llama3",
                    rope_factor=factor,
                    rope_original_block_size=context,
                    rope_low_freq_factor=low,
                    rope_high_freq_factor=high,
                )
                if torch.allclose(plain / frequencies(found), divisors, rtol=1e-6, atol=0):
                    return found
        raise CheckpointError(
            f"{self.file.path}: the tensor {FREQUENCIES} does not hold the frequencies of Llama "
            "3's scaling; others are not supported"
        )


def _one(value: Any) -> Any:
    """A list of one value for each layer, all the same, is that value."""
    return (
        value[0]
        if isinstance(value, list) and value and value.count(value[0]) == len(value)
        else value
    )


def _limits(
    divisors: Tensor, plain: Tensor, factor: float, context: int
) -> list[tuple[float, float]]:
    """low_freq_factor and high_freq_factor from the pairs between them, if there are two."""
    between = (divisors > 1) & (divisors < factor)
    turns = context * plain[between] / (2 * math.pi)
    kept = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    slope = float((kept[0] - kept[-1]) / (turns[0] - turns[-1])) if len(turns) > 1 else 0.0
    if not slope > 0:
        return []
    low = float(turns[0]) - float(kept[0]) / slope
    return [(round(low, digits), round(low + 1 / slope, digits)) for digits in (0, 1, 2, 4)]
