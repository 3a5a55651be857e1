"""A GGUF file's settings as a `GPTConfig`. A setting that is not understood is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.rotary import frequencies
from gpt.weights.gguf_file import GGUFFile
from gpt.weights.gguf_names import EMBEDDING, FAMILIES, FREQUENCIES, HEAD

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
"""Settings of which only these values leave the architecture as it is here."""
_REMARKS = ("tensor_data_layout", "rope.scaling.finetuned")
"""Settings that say how a file came about, not what it computes."""
_LLAMA3_CONTEXT = 8192
"""What the models with such frequencies were trained on, where the file does not say."""


class Settings:
    """The family's settings, of which each is asked for once and none may be left over."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises CheckpointError for a family that is not known here."""
        self.path, self.all = file.path, file.settings
        name = self.all.get("general.architecture")
        if not isinstance(name, str) or name not in FAMILIES:
            raise CheckpointError(
                f"{file.path}: general.architecture is {repr(name)[:60]}, but must be one of "
                f"{', '.join(FAMILIES)}"
            )
        kind = self.all.get("general.type", "model")
        if kind != "model":
            raise CheckpointError(
                f"{file.path}: general.type is {repr(kind)[:60]}, but must be 'model'"
            )
        self.family = FAMILIES[name]
        self.asked: set[str] = set()

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number; a list of the same one for every layer counts as one."""
        value = self._get(name, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if type(value) is not int or not 0 <= value <= 2**31:
            raise self.wrong(name, value, "a whole number up to 2**31, the same for every layer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.wrong(name, value, "a finite number")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, value, "text")
        return value

    def has(self, name: str) -> bool:
        return f"{self.family.name}.{name}" in self.all

    def check_all_known(self) -> None:
        """Raises CheckpointError for a setting that nobody asked for and that is not neutral."""
        prefix = f"{self.family.name}."
        for key, value in self.all.items():
            name = key.removeprefix(prefix)
            if name == key or name in self.asked or name in _REMARKS:
                continue
            if name not in _NEUTRAL:
                raise CheckpointError(
                    f"{self.path}: the setting {key} ({repr(value)[:60]}) is not supported"
                )
            if value not in _NEUTRAL[name]:
                raise self.wrong(name, value, " or ".join(map(repr, _NEUTRAL[name])))

    def wrong(self, name: str, value: Any, allowed: str) -> CheckpointError:
        shown = "missing" if value is None else repr(value)[:60]
        return CheckpointError(
            f"{self.path}: {self.family.name}.{name} is {shown}, but must be {allowed}"
        )

    def _get(self, name: str, default: Any) -> Any:
        self.asked.add(name)
        return self.all.get(f"{self.family.name}.{name}", default)


def read_config(file: GGUFFile) -> GPTConfig:
    """The architecture that settings and tensors' names describe.

    Raises:
        CheckpointError: another family, a setting missing, out of range or not supported.
    """
    settings, names = Settings(file), set(file.names())
    if EMBEDDING not in names or len(file.shape(EMBEDDING)) != 2:
        raise CheckpointError(f"{file.path}: there is no matrix {EMBEDDING}")
    n_layer = settings.whole("block_count")
    layers = {name.split(".")[1] for name in names if name.startswith("blk.")}
    if len(layers) != n_layer:  # before anything is made for each of them
        raise CheckpointError(
            f"{file.path}: {settings.family.name}.block_count is {n_layer}, but there are tensors "
            f"of {len(layers)} blocks"
        )
    rows = file.shape(EMBEDDING)[0]
    if settings.whole("vocab_size", rows) != rows:
        raise settings.wrong("vocab_size", settings.whole("vocab_size"), f"{rows}, as the tensors")
    fields: dict[str, Any] = {
        "vocab_size": rows,
        "block_size": settings.whole("context_length"),
        "n_layer": n_layer,
        "d_model": settings.whole("embedding_length"),
        "d_ff": settings.whole("feed_forward_length"),
        "tie_embeddings": HEAD not in names,
        "qk_norm": settings.family.qk_norm,
        **_heads(settings),
    }
    try:
        if settings.family.rope_layout is None:
            fields |= {
                "position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True,
                "norm_eps": settings.number("attention.layer_norm_epsilon"),
            }  # fmt: skip
        else:
            fields |= {
                "position": "rotary", "norm": "rmsnorm", "mlp": "swiglu",
                "norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
                "pattern": _pattern(settings, fields["block_size"]),
                "rope_base": settings.number("rope.freq_base", 10000.0),
                **_biases(names),
                **_scaling(settings, fields["block_size"]),
            }  # fmt: skip
        config = GPTConfig(**fields)
        if settings.family.rope_layout is not None:
            width = settings.whole("rope.dimension_count", config.head_width)
            if width != config.head_width:
                raise settings.wrong("rope.dimension_count", width, f"{config.head_width}, all")
        if FREQUENCIES in names:
            config = _llama3(file, settings, config)
    except ConfigError as error:
        raise CheckpointError(f"{file.path} does not describe a usable model: {error}") from None
    settings.check_all_known()
    return config


def _heads(settings: Settings) -> dict[str, int]:
    n_head = settings.whole("attention.head_count")
    if n_head < 1:
        raise settings.wrong("attention.head_count", n_head, "at least 1")
    width = settings.whole("attention.key_length", settings.whole("embedding_length") // n_head)
    if settings.whole("attention.value_length", width) != width:
        raise settings.wrong(
            "attention.value_length",
            settings.whole("attention.value_length"),
            f"{width}, as attention.key_length",
        )
    return {
        "n_head": n_head,
        "n_kv_head": settings.whole("attention.head_count_kv", n_head),
        "head_dim": width,
    }


def _biases(names: set[str]) -> dict[str, bool | None]:
    """Which biases the first block has; that the others have the same, the tensors' check sees."""
    bias, qkv, mlp = (
        f"blk.0.{name}.bias" in names for name in ("attn_output", "attn_q", "ffn_down")
    )
    return {
        "bias": bias,
        "qkv_bias": None if qkv == bias else qkv,
        "mlp_bias": None if mlp == bias else mlp,
    }


def _pattern(settings: Settings, block_size: int) -> str:
    window = settings.whole("attention.sliding_window", 0)
    return f"window:{window}" if 0 < window < block_size else "causal"


def _scaling(settings: Settings, block_size: int) -> dict[str, Any]:
    """Rotary scaling. As llama.cpp has it, a factor without a type is linear, and 0 means 1."""
    old = settings.number("rope.scale_linear", 1.0)
    factor = settings.number("rope.scaling.factor", old) or 1.0
    kind = settings.text("rope.scaling.type", "linear")
    original = settings.whole("rope.scaling.original_context_length", block_size)
    magnitude = settings.number("rope.scaling.attn_factor", 1.0)
    betas = {
        "rope_beta_fast": settings.number("rope.scaling.yarn_beta_fast", 32.0),
        "rope_beta_slow": settings.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if kind == "yarn" and factor != 1.0:
        found = {
            "rope_scaling": "yarn",
            "rope_factor": factor,
            "rope_original_block_size": original,
            **betas,
        }
        if magnitude != 1.0 and factor >= 1.0:
            found["rope_attention_factor"] = magnitude * (0.1 * math.log(factor) + 1)
        return found
    if magnitude != 1.0:
        raise settings.wrong("rope.scaling.attn_factor", magnitude, "1 without yarn")
    if kind not in ("none", "linear", "yarn"):
        raise settings.wrong("rope.scaling.type", kind, "none, linear or yarn")
    return (
        {"rope_scaling": "linear", "rope_factor": factor}
        if kind == "linear" and factor != 1.0
        else {}
    )


def _llama3(file: GGUFFile, settings: Settings, config: GPTConfig) -> GPTConfig:
    """The `llama3` scaling whose frequencies are those of the file's tensor of divisors.

    The converter writes only what came out of the formula. The pairs that are neither left alone
    nor stretched by all of the factor lie on a straight line over their turns within the original
    context, which gives back the two limits. Unless the formula then yields the tensor, it stems
    from another one.
    """
    refusal = CheckpointError(
        f"{file.path}: the tensor {FREQUENCIES} does not hold the frequencies of Llama 3's "
        "scaling; others are not supported"
    )
    if file.shape(FREQUENCIES) != (config.head_width // 2,) or config.rope_scaling != "none":
        raise refusal
    divisors = file.read(FREQUENCIES).double()
    factor = float(str(divisors.max().item()))
    if not (bool(torch.isfinite(divisors).all()) and divisors.min() >= 1):
        raise refusal
    if factor == 1.0:
        return config
    plain = frequencies(config)
    name = "rope.scaling.original_context_length"
    contexts = [settings.whole(name)] if settings.has(name) else [_LLAMA3_CONTEXT]
    for context in contexts:
        for low, high in ((1.0, 4.0), *_limits(divisors, plain, factor, context)):
            if not 0 < low < high:
                continue
            found = config.replace(
                rope_scaling="llama3",
                rope_factor=factor,
                rope_original_block_size=context,
                rope_low_freq_factor=low,
                rope_high_freq_factor=high,
            )
            if torch.allclose(plain / frequencies(found), divisors, rtol=2e-6, atol=0):
                return found
    raise refusal


def _limits(
    divisors: torch.Tensor, plain: torch.Tensor, factor: float, context: int
) -> list[tuple[float, float]]:
    """low_freq_factor and high_freq_factor from the pairs between them, if there are two."""
    between = (divisors > 1) & (divisors < factor)
    turns = context * plain[between] / (2 * math.pi)
    kept = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    if len(turns) < 2:
        return []
    slope = float((kept[0] - kept[-1]) / (turns[0] - turns[-1]))
    if slope <= 0:
        return []
    low = float(turns[0]) - float(kept[0]) / slope
    return [(round(low, digits), round(low + 1 / slope, digits)) for digits in (0, 1, 2, 4)]


def tokenizer_settings(settings: Mapping[str, Any], rows: int) -> dict[str, Any] | None:
    """What of the settings describes the tokenizer, without the tokens that only pad the matrix.

    Converters name as many tokens as the embedding has rows: those that stand for nothing are
    called `[PAD<id>]` and are marked unused.
    """
    model = settings.get("tokenizer.ggml.model")
    if model is None or model in ("none", "no_vocab"):
        return None
    found = {key: value for key, value in settings.items() if key.startswith("tokenizer.")}
    tokens, kinds = found.get("tokenizer.ggml.tokens"), found.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or len(tokens) > rows:
        n = len(tokens) if isinstance(tokens, list) else "no"
        raise CheckpointError(f"tokenizer.ggml.tokens has {n} tokens, the embedding {rows} rows")
    if isinstance(kinds, list) and len(kinds) == len(tokens):
        n = len(tokens)
        while n and tokens[n - 1] == padding_token(n - 1) and kinds[n - 1] == UNUSED:
            n -= 1
        for key in ("tokens", "token_type", "scores"):
            if isinstance(found.get(f"tokenizer.ggml.{key}"), list):
                found[f"tokenizer.ggml.{key}"] = found[f"tokenizer.ggml.{key}"][:n]
    return found


UNUSED = 5
"""GGUF's mark of a token that stands for nothing."""


def padding_token(index: int) -> str:
    return f"[PAD{index}]"
