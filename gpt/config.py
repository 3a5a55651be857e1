"""GPTConfig: the whole architecture in one validated, plain-data place.

Everything that shapes the weights or the function they compute is a field here, and nothing else
is. The training command's flags, the model folder's `config.json` and the server all read this
class.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gpt.errors import ConfigError
from gpt.patterns import check_pattern

Position = Literal["none", "learned", "sinusoidal", "relative", "rotary", "alibi"]
RopeLayout = Literal["half-split", "interleaved"]
RopeScaling = Literal["none", "linear", "ntk", "yarn", "llama3"]
Norm = Literal["rmsnorm", "layernorm"]
NormPlace = Literal["pre", "post"]
MLPKind = Literal["gelu", "gelu-exact", "swiglu", "relu2"]

MOST_CONV_WIDTH = 64

_SCALINGS = ("linear", "ntk", "yarn", "llama3")
_READ_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "relative_distance": ("position", ("relative",)),
    "rope_dims": ("position", ("rotary",)),
    "rope_layout": ("position", ("rotary",)),
    "rope_scaling": ("position", ("rotary",)),
    "rope_factor": ("rope_scaling", _SCALINGS),
    "rope_original_block_size": ("rope_scaling", ("yarn", "llama3")),
    "rope_attention_factor": ("rope_scaling", ("yarn",)),
    "rope_beta_fast": ("rope_scaling", ("yarn",)),
    "rope_beta_slow": ("rope_scaling", ("yarn",)),
    "rope_truncate": ("rope_scaling", ("yarn",)),
    "rope_low_freq_factor": ("rope_scaling", ("llama3",)),
    "rope_high_freq_factor": ("rope_scaling", ("llama3",)),
}
"""Fields that only some schemes read: which other field must say one of what. (rope_base is older
than the rule, and exempt.)"""


@dataclass(frozen=True)
class GPTConfig:
    """Architecture of a decoder-only GPT.

    Attributes:
        vocab_size: rows of the embedding; at least the tokenizer's. 0 means "not known yet": the
            trainer fills it in from the tokenizer.
        block_size: context length in tokens.
        n_layer: number of blocks.
        n_head: query heads.
        n_kv_head: key and value heads; a divisor of n_head. None: as many as n_head (multi-head);
            1 is multi-query (Shazeer, arXiv 1911.02150), in between is grouped-query
            (Ainslie et al., arXiv 2305.13245).
        d_model: width of the residual stream.
        head_dim: width of one head. None: d_model / n_head.
        d_ff: hidden width of the MLP. None: 4 * d_model, for swiglu 8/3 * d_model rounded up to a
            multiple of 32, so that the parameter count stays the same.
        position: `rotary` (Su et al., arXiv 2104.09864) turns queries and keys; `learned` adds an
            embedding per position, as GPT-2 does; `sinusoidal` adds fixed waves (arXiv 1706.03762);
            `relative` learns a key per distance (Shaw et al., arXiv 1803.02155); `alibi` lets
            scores fall with distance (Press et al., arXiv 2108.12409); `none`. See `gpt.positions`.
        relative_distance: of `relative`, the distance from which all are one.
        rope_base: longest wavelength of the rotary angles, in units of 2*pi tokens.
        rope_dims: how many numbers of a head are turned, the first ones. None: all.
        rope_layout: which of them are a pair: `half-split` i and i + rope_dims / 2, `interleaved`
            2i and 2i + 1.
        rope_scaling: stretches the angles of a model trained on shorter texts: `linear`, `ntk`,
            `yarn` or `llama3`; the formulas are in `gpt.rotary`.
        rope_factor: by how much, 1 or more.
        rope_original_block_size: of `yarn` and `llama3`, the context the model was trained on.
        rope_attention_factor: of `yarn`, multiplies queries and keys. None: 0.1 ln rope_factor + 1.
        rope_beta_fast, rope_beta_slow: of `yarn`, the turns within the original context between
            which the stretch goes from nothing to all.
        rope_truncate: of `yarn`, whether that range is widened to whole pairs.
        rope_low_freq_factor, rope_high_freq_factor: of `llama3`, the same from all to nothing.
        pattern: which earlier positions a token may look at: `causal`; `window:256` for itself and
            the 255 before it, `window:256+sinks:4` for the first four of all besides;
            `dilated:256:4`, `fixed:128:8`, `bigbird:192:64:3:0`; `package.module:Class` for your
            own (see `gpt.patterns.text`). A list repeats over the layers: three windows and
            `causal` make every fourth layer see everything.
        norm: `rmsnorm` (Zhang & Sennrich, arXiv 1910.07467) or `layernorm` (arXiv 1607.06450).
        norm_eps: added to the mean square or variance.
        norm_place: `pre` normalises what goes into a branch, `post` the sum that comes after it
            (Xiong et al., arXiv 2002.04745).
        mlp: `gelu` (Hendrycks & Gimpel, arXiv 1606.08415) by its tanh formula, as GPT-2 has it, or
            `gelu-exact` by the error function; `swiglu` (Shazeer, arXiv 2002.05202) or `relu2` (So
            et al., arXiv 2109.08668).
        bias: biases in every linear layer of the blocks and in LayerNorm.
        qkv_bias: in the layer that makes queries, keys and values. None: as `bias` says.
        mlp_bias: in the layers of the MLP. None: as `bias` says.
        tie_embeddings: the output head is the embedding matrix (Press & Wolf, arXiv 1608.05859).
        qk_norm: RMS-normalise queries and keys per head (Henry et al., arXiv 2010.04245).
        attn_scale: multiplies the scores. None: 1 / sqrt(head_dim). See `gpt.attention` for why.
        attn_softcap: scaled scores become `c * tanh(scores / c)` before a position scheme's term
            and the mask (Gemma 2, arXiv 2408.00118). None: unbounded.
        value_embeddings: in every second layer, the last one among them, each token's value gets a
            learned vector of its id besides (`gpt.attention.ValueEmbedding`).
        conv_width: tokens that a short causal convolution mixes, channel by channel, ahead of each
            attention and each MLP, the token itself among them (`gpt.conv`). 0: there is none.
        residual_scale: multiplies what each branch adds to the stream.
        residual_scalars: each block first multiplies the stream by a learned number, 1 at first.
        x0_scalars: each block adds the stream as it entered the first block, times a learned
            number, 0 at first (both: Jordan et al., modded-nanogpt, 2024).
        logit_softcap: logits become `c * tanh(logits / c)`. None: unbounded.
        dropout: probability of dropping a unit of the embedding and of each branch's output.
        attn_dropout: probability of dropping an attention weight. On CPU anything above 0 leaves
            the fused attention kernel for a much slower one, and everywhere the block rows of a
            sparse pattern for a mask of the whole square.
        init_std: standard deviation of the initial weights; projections into the stream get
            init_std / sqrt(2 * n_layer), as in GPT-2.
        zero_init: those projections begin at 0 instead, so that every block passes the stream on
            unchanged at first (Fixup, arXiv 1901.09321; ReZero, arXiv 2003.04887).
    """

    vocab_size: int = 0
    block_size: int = 256
    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int | None = None
    d_model: int = 128
    head_dim: int | None = None
    d_ff: int | None = None
    position: Position = "rotary"
    relative_distance: int = 32
    rope_base: float = 10000.0
    rope_dims: int | None = None
    rope_layout: RopeLayout = "half-split"
    rope_scaling: RopeScaling = "none"
    rope_factor: float = 1.0
    rope_original_block_size: int | None = None
    rope_attention_factor: float | None = None
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    pattern: list[str] | str = "causal"
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    norm_place: NormPlace = "pre"
    mlp: MLPKind = "relu2"
    bias: bool = False
    qkv_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_embeddings: bool = True
    qk_norm: bool = True
    attn_scale: float | None = None
    attn_softcap: float | None = None
    value_embeddings: bool = False
    conv_width: int = 0
    residual_scale: float = 1.0
    residual_scalars: bool = False
    x0_scalars: bool = False
    logit_softcap: float | None = None
    dropout: float = 0.0
    attn_dropout: float = 0.0
    init_std: float = 0.02
    zero_init: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError that names the field, its value and what is allowed."""
        self._check_types()
        for name in ("block_size", "n_layer", "n_head", "d_model"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.vocab_size < 0:
            raise ConfigError(f"vocab_size is {self.vocab_size}, but must be at least 0")
        for name in ("n_kv_head", "head_dim", "d_ff"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, but must be at least 1 (or null)")
        if self.head_dim is None and self.d_model % self.n_head:
            raise ConfigError(
                f"d_model {self.d_model} is not divisible by n_head {self.n_head}; "
                "change one of them or set head_dim"
            )
        if self.n_head % self.kv_heads:
            raise ConfigError(f"n_head {self.n_head} is not divisible by n_kv_head {self.kv_heads}")
        for name, choices in (
            ("position", Position),
            ("rope_layout", RopeLayout),
            ("rope_scaling", RopeScaling),
            ("norm", Norm),
            ("norm_place", NormPlace),
            ("mlp", MLPKind),
        ):
            if getattr(self, name) not in get_args(choices):
                allowed = ", ".join(get_args(choices))
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}, but must be one of {allowed}"
                )
        for name in ("dropout", "attn_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be in [0, 1)")
        for name in ("rope_base", "norm_eps", "init_std", "residual_scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is {value}, but must be a finite number above 0")
        for name in ("attn_scale", "attn_softcap", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(
                    f"{name} is {value}, but must be a finite number above 0 (or null)"
                )
        if self.conv_width not in (0, *range(2, MOST_CONV_WIDTH + 1)):
            raise ConfigError(
                f"conv_width is {self.conv_width}, but must be 0 (none) or 2 to {MOST_CONV_WIDTH}"
            )
        self._check_positions()
        if not self.patterns or len(self.patterns) > self.n_layer:
            raise ConfigError(
                f"pattern lists {len(self.patterns)} patterns, but must list 1 to n_layer "
                f"({self.n_layer})"
            )
        for text in self.patterns:
            check_pattern(text)

    def _check_positions(self) -> None:
        """A setting that the scheme does not have is refused: it would do nothing in silence."""
        for name, (kind, readers) in _READ_BY.items():
            value = getattr(self, name)
            if value != getattr(GPTConfig, name) and getattr(self, kind) not in readers:
                raise ConfigError(
                    f"{name} is {value!r}, but only {kind} {' or '.join(readers)} reads it, and "
                    f"{kind} is {getattr(self, kind)}; leave it out"
                )
        if self.position == "sinusoidal" and self.d_model % 2:
            raise ConfigError(
                f"d_model is {self.d_model}, but sinusoidal positions need an even one"
            )
        if self.position == "relative" and not 1 <= self.relative_distance <= 2**20:
            raise ConfigError(
                f"relative_distance is {self.relative_distance}, but must be in [1, 2**20]"
            )
        if self.position == "rotary":
            self._check_rotary()

    def _check_rotary(self) -> None:
        width, scaling = self.rope_width, self.rope_scaling
        name = "head_dim" if self.rope_dims is None else "rope_dims"
        if width % 2 or width < 2:
            raise ConfigError(f"{name} is {width}, but rotary positions need an even one")
        if width > self.head_width:
            raise ConfigError(f"rope_dims is {width}, but a head has only {self.head_width}")
        if scaling == "none":
            return
        if not (math.isfinite(self.rope_factor) and self.rope_factor >= 1):
            raise ConfigError(
                f"rope_factor is {self.rope_factor}, but must be a finite number of at least 1"
            )
        if scaling == "ntk" and width < 4:
            raise ConfigError(f"{name} is {width}, but rope_scaling ntk needs at least 4")
        if scaling in _READ_BY["rope_original_block_size"][1]:
            original = self.rope_original_block_size
            if original is None or original < 1:
                raise ConfigError(
                    f"rope_original_block_size is {original}, but rope_scaling {scaling} needs the "
                    "context, at least 1, that the model was trained on"
                )
        if scaling == "yarn" and not self.rope_base > 1:
            raise ConfigError(f"rope_base is {self.rope_base}, but yarn needs one above 1")
        pairs = {
            "yarn": ("rope_beta_slow", "rope_beta_fast"),
            "llama3": ("rope_low_freq_factor", "rope_high_freq_factor"),
        }
        if scaling in pairs:
            low, high = (getattr(self, each) for each in pairs[scaling])
            if not (0 < low < high and math.isfinite(high)):
                raise ConfigError(
                    f"{' and '.join(pairs[scaling])} are {low} and {high}, but must be above 0, "
                    "the first below the second"
                )
        factor = self.rope_attention_factor
        if factor is not None and not (math.isfinite(factor) and factor > 0):
            raise ConfigError(
                f"rope_attention_factor is {factor}, but must be a finite number above 0 (or null)"
            )

    def _check_types(self) -> None:
        """A file can say anything: 128.5 layers, a width of 10**30, a list for a number."""
        allowed = {
            "int": "a whole number up to 2**31",
            "float": "a number",
            "bool": "true or false",
            "list[str]": "text or a list of texts",
        }
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kind, _, other = str(field.type).partition(" | ")
            if value is None and other == "None":
                continue
            good = {
                "int": type(value) is int and abs(value) <= 2**31,
                "float": type(value) in (int, float) and not abs(value) > 1e30,
                "bool": type(value) is bool,
                # The list comes first for the trainer's flags: whatever is given is also text.
                "list[str]": isinstance(value, str)
                or (isinstance(value, list) and all(isinstance(part, str) for part in value)),
            }.get(kind, isinstance(value, str))
            if not good:
                shown = repr(value)[:40]
                raise ConfigError(
                    f"{field.name} is {shown}, but must be {allowed.get(kind, 'text')}"
                )

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_width(self) -> int:
        return self.d_model // self.n_head if self.head_dim is None else self.head_dim

    @property
    def mlp_width(self) -> int:
        if self.d_ff is not None:
            return self.d_ff
        return -(-8 * self.d_model // 3 // 32) * 32 if self.mlp == "swiglu" else 4 * self.d_model

    def has_value_embedding(self, layer: int) -> bool:
        """Whether tokens have values of their own in layer `layer`, counted from 0."""
        return self.value_embeddings and (self.n_layer - 1 - layer) % 2 == 0

    @property
    def has_qkv_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def rope_width(self) -> int:
        """How many numbers of a head rotary positions turn."""
        return self.head_width if self.rope_dims is None else self.rope_dims

    @property
    def rope_magnitude(self) -> float:
        """What rotary positions multiply the numbers that they turn with."""
        if self.rope_scaling != "yarn":
            return 1.0
        if self.rope_attention_factor is not None:
            return self.rope_attention_factor
        return 0.1 * math.log(self.rope_factor) + 1

    @property
    def extrapolates(self) -> bool:
        """Whether positions from block_size on are defined at all."""
        return self.position != "learned"

    @property
    def patterns(self) -> tuple[str, ...]:
        """The list of patterns that repeats over the layers."""
        return (self.pattern,) if isinstance(self.pattern, str) else tuple(self.pattern)

    @property
    def score_scale(self) -> float:
        return self.head_width**-0.5 if self.attn_scale is None else self.attn_scale

    def replace(self, **changes: Any) -> GPTConfig:
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GPTConfig:
        """The inverse of `to_dict`. Raises ConfigError for a field that this version does not know:
        ignoring one would build another model than the one that was saved."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"unknown architecture field {name!r}{hint}")
        return cls(**values)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> GPTConfig:
        """A named size. Raises ConfigError that lists the names."""
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown preset {name!r}{hint} (there are: {', '.join(PRESETS)})")
        return cls(**{**PRESETS[name], **changes})


def _gpt2(n_layer: int, n_head: int, d_model: int) -> dict[str, Any]:
    """GPT-2's architecture (Radford et al. 2019) at one of its published sizes."""
    return {
        "vocab_size": 50257, "block_size": 1024,
        "n_layer": n_layer, "n_head": n_head, "d_model": d_model,
        "position": "learned", "norm": "layernorm", "mlp": "gelu",
        "bias": True, "tie_embeddings": True, "qk_norm": False,
    }  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    # Our own sizes: rotary, RMSNorm, QK-norm, ReLU^2; the vocabulary comes from the tokenizer.
    "nano": {"n_layer": 2, "n_head": 2, "d_model": 64, "block_size": 128},
    "tiny": {"n_layer": 4, "n_head": 4, "d_model": 128, "block_size": 256},
    "mini": {"n_layer": 6, "n_head": 6, "d_model": 192, "block_size": 256},
    "small": {"n_layer": 6, "n_head": 6, "d_model": 384, "block_size": 256},
    "medium": {"n_layer": 8, "n_head": 8, "d_model": 512, "block_size": 512},
    "base": {"n_layer": 12, "n_head": 12, "d_model": 768, "block_size": 1024},
    "gpt2-124m": _gpt2(12, 12, 768),
    "gpt2-355m": _gpt2(24, 16, 1024),
    "gpt2-774m": _gpt2(36, 20, 1280),
    "gpt2-1558m": _gpt2(48, 25, 1600),
}
