"""Low-rank adaptation: a few numbers that are learned beside matrices that stay as they are.

Hu et al., "LoRA: Low-rank adaptation of large language models", arXiv 2106.09685. A linear layer
with the frozen matrix W becomes

    y = W x + (alpha / rank) · B A x        A: (rank, in), B: (out, rank)

B begins as zeros, so the adapted model begins as the model it was. Only A and B have gradients and
optimizer state: at rank 8 about a hundredth of the model. Afterwards W + (alpha / rank) · B A is
one matrix again (`merged`), and nothing of this is left in the model.

The adapted layer keeps the names of the layer it stands for (`weight`, `bias`), so model, attention
and files know nothing of it. It adds two products instead of making W + BA anew in each step, whose
gradient would be as large as W.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.model import GPT

Matrix = Literal["attn.qkv", "attn.out", "mlp.up", "mlp.down"]
MATRICES: tuple[Matrix, ...] = get_args(Matrix)


@dataclass(frozen=True)
class LoRAConfig:
    """What is learned beside the frozen model; rank 0 freezes nothing and trains all of it.

    Attributes:
        rank: rows of A and columns of B; 0: no adaptation. 4 to 64 are usual.
        alpha: the change is multiplied by alpha / rank, so that another rank wants no other
            learning rate.
        dropout: probability of dropping a number of what goes into A, in training.
        matrices: which linear layers of each block are adapted. `attn.qkv` holds the projections to
            queries, keys and values in one, `mlp.up` with SwiGLU also its gate.
    """

    rank: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    matrices: tuple[Matrix, ...] = MATRICES

    def __post_init__(self) -> None:
        """Raises ConfigError that names the setting, its value and what is allowed."""
        object.__setattr__(self, "matrices", tuple(self.matrices))  # a file has only lists
        if type(self.rank) is not int or not 0 <= self.rank <= 2**16:
            raise ConfigError(f"lora.rank is {self.rank}, but must be 1 or more (0: no LoRA)")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"lora.alpha is {self.alpha}, but must be a finite number above 0")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout is {self.dropout}, but must be in [0, 1)")
        unknown = [name for name in self.matrices if name not in MATRICES]
        if unknown or not self.matrices or len(set(self.matrices)) < len(self.matrices):
            raise ConfigError(
                f"lora.matrices is {', '.join(map(str, self.matrices)) or 'empty'}, but must name "
                f"some of {', '.join(MATRICES)}, each once"
            )

    @property
    def on(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as a checkpoint holds it."""
        return {**dataclasses.asdict(self), "matrices": list(self.matrices)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LoRAConfig:
        """The inverse of `to_dict`. Raises ConfigError, or TypeError for what is no such data."""
        return cls(**values)


NO_LORA = LoRAConfig()


class Adapter(nn.Module):
    """The change that is learned: x → (alpha / rank) · B A x.

    A and B are float32 at least, also beside a matrix in half precision and whatever the model is
    converted to: in bf16 most steps would be too small to change a number.

    Args:
        linear: what it stands beside.
    """

    def __init__(self, linear: nn.Linear, config: LoRAConfig) -> None:
        super().__init__()
        device = linear.weight.device
        dtype = torch.promote_types(linear.weight.dtype, torch.float32)
        n_in, n_out, rank = linear.in_features, linear.out_features, config.rank
        self.a = nn.Parameter(torch.empty(rank, n_in, dtype=dtype, device=device))
        self.b = nn.Parameter(torch.zeros(n_out, rank, dtype=dtype, device=device))
        nn.init.normal_(self.a, std=n_in**-0.5)  # A x is as large as x
        self.scale = config.scale
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) → (..., out), in the type of x or of autocast."""
        h = F.linear(self.drop(x), self.a.to(x.dtype))  # (..., rank)
        return F.linear(h * self.scale, self.b.to(h.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Adapter:
        def moved(tensor: Tensor) -> Tensor:
            there = fn(tensor)
            narrower = there.dtype.itemsize < tensor.dtype.itemsize
            return tensor.to(there.device) if narrower else there

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]  # torch gives it no types
        return self


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with an adapter beside it. It takes over the layer's parameters."""

    def __init__(self, linear: nn.Linear, config: LoRAConfig) -> None:
        bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, bias=bias, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.lora = Adapter(linear, config)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) → (..., out)."""
        # Every module's call returns Any.
        return super().forward(x) + self.lora(x)  # type: ignore[no-any-return]


def adapt(gpt: GPT, config: LoRAConfig) -> None:
    """Freeze a model and put adapters beside its matrices, in place. Its outputs stay the same."""
    gpt.requires_grad_(False)
    for block in gpt.blocks:
        for name in config.matrices:
            part, _, attribute = name.partition(".")
            parent = getattr(block, part)
            setattr(parent, attribute, AdaptedLinear(getattr(parent, attribute), config))


def adapter_count(config: GPTConfig, lora: LoRAConfig) -> int:
    """Numbers that are trained, from the architecture alone."""
    C, D, inner = config.d_model, config.head_width, config.mlp_width
    queries, keys = config.n_head * D, config.kv_heads * D
    ends = {
        "attn.qkv": C + queries + 2 * keys,
        "attn.out": queries + C,
        "mlp.up": C + (2 * inner if config.mlp == "swiglu" else inner),
        "mlp.down": inner + C,
    }
    return config.n_layer * lora.rank * sum(ends[name] for name in lora.matrices)


def merged(
    state: dict[str, Tensor], config: LoRAConfig, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """An adapted model's state with the changes added to the matrices: that of a plain model.

    Args:
        state: names and tensors of a GPT that `adapt` was called on; left as it is.
        dtype: of the changed matrices; None: what they have. The sum itself is made in the
            adapters' precision.

    Raises:
        CheckpointError: adapters of other shapes than their matrices, or half of one.
    """
    found = {name: value for name, value in state.items() if ".lora." not in name}
    for name in [name for name in state if name.endswith(".lora.a")]:
        layer = name.removesuffix(".lora.a")
        a, b, weight = state[name], state.get(f"{layer}.lora.b"), found.get(f"{layer}.weight")
        shapes = [tuple(t.shape) for t in (weight, b, a) if t is not None]
        rank = config.rank
        fits = rank > 0 and weight is not None and weight.ndim == 2
        if not fits or shapes != [shapes[0], (shapes[0][0], rank), (rank, shapes[0][1])]:
            raise CheckpointError(
                f"the weights are damaged: the adapter of {layer[:80]} does not fit its matrix"
            )
        assert weight is not None
        assert b is not None, "there are three shapes"
        sums = torch.promote_types(weight.dtype, a.dtype)
        total = torch.addmm(weight.to(sums), b.to(sums), a.to(sums), alpha=config.scale)
        found[f"{layer}.weight"] = total.to(weight.dtype if dtype is None else dtype)
    return found
