"""The optimizer's settings, who moves and who shrinks which parameter, and the rate of each step.

The schedules are functions of the step alone: nothing to save, nothing to restore, and a resumed
run follows the flags it was given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.lora import MATRICES
from gpt.training.muon import ADAMW, MUON, MuonAdamW

Kind = Literal["adamw", "muon"]
Schedule = Literal["wsd", "trapezoid", "cosine", "constant"]
Fall = Literal["linear", "sqrt"]
Decay = Literal["constant", "linear", "cosine"]
Part = Literal["matrices", "embeddings", "head", "vectors"]

PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, or Muon with AdamW, and its schedule.

    Attributes:
        kind: `adamw` (Loshchilov & Hutter, arXiv 1711.05101) moves everything; `muon` moves the
            matrices of the blocks by Muon (Jordan et al. 2024) and the embeddings, the head and
            the vectors by AdamW. A run goes on with the kind that it began with.
        lr: peak learning rate of AdamW.
        betas: decay of AdamW's running mean of gradients and of their squares.
        weight_decay: pull of AdamW's parameters towards zero, times the learning rate.
        decays: what is pulled: `matrices` of the blocks, `embeddings` (a tied head among them),
            `head`, `vectors` (norms, biases, scales).
        weight_decay_schedule: `constant`, or from full to nothing over the run, in a straight line
            (`linear`) or along half a wave (`cosine`).
        muon_lr: peak learning rate of Muon; it follows the same schedule as lr.
        muon_momentum: decay of Muon's running mean of gradients.
        muon_beta2: decay of the running mean of squares by which Muon evens out how far each neuron
            moves (NorMuon, Li et al., arXiv 2510.05491); 0 keeps none and does not.
        muon_weight_decay: as weight_decay, times muon_lr, for Muon's matrices; null: weight_decay.
        warmup_steps: steps over which the rate climbs to its peak.
        schedule: `wsd` stays at the peak and falls at the end (warm-up, stable, decay: Hu et al.,
            arXiv 2404.06395), `trapezoid` is that with a straight fall; `cosine` falls along half a
            wave from the end of the warm-up (Loshchilov & Hutter, arXiv 1608.03983); `constant`
            stays.
        cooldown: share of all steps that the fall of `wsd` or `trapezoid` takes.
        cooldown_shape: the fall of `wsd`: `linear`, or `sqrt`, which falls fast at first: 1 minus
            the root of its share done (Hägele et al., arXiv 2405.18392).
        min_lr_ratio: where the fall ends, as a share of the peak.
        ema_decay: average the weights over about `1 / (1 - ema_decay)` steps (0.999: 1,000) and
            validate, sample and export the average; 0 does not.
    """

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup_steps: int = 100
    schedule: Schedule = "wsd"
    cooldown: float = 0.4
    min_lr_ratio: float = 0.0
    ema_decay: float = 0.0
    kind: Kind = "adamw"
    decays: tuple[Part, ...] = ("matrices", "embeddings", "head")
    weight_decay_schedule: Decay = "constant"
    muon_lr: float = 0.01
    muon_momentum: float = 0.95
    muon_beta2: float = 0.95
    muon_weight_decay: float | None = None
    cooldown_shape: Fall = "linear"

    def __post_init__(self) -> None:
        """Raises ConfigError that names the setting, its value and what is allowed."""
        object.__setattr__(self, "decays", tuple(self.decays))  # a file has only lists
        for name in ("lr", "muon_lr"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(
                    f"optimizer.{name} is {getattr(self, name)}, but must be a finite number above "
                    "0"
                )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas are {self.betas}, but must be in [0, 1)")
        for name in ("weight_decay", "muon_weight_decay"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"optimizer.{name} is {value}, but must be a finite number >= 0")
        if self.warmup_steps < 0:
            raise ConfigError(f"optimizer.warmup_steps is {self.warmup_steps}, but must be >= 0")
        for name, choices in (
            ("kind", Kind),
            ("schedule", Schedule),
            ("weight_decay_schedule", Decay),
            ("cooldown_shape", Fall),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(
                    f"optimizer.{name} is {getattr(self, name)!r}, but must be one of "
                    f"{', '.join(get_args(choices))}"
                )
        if set(self.decays) - set(PARTS) or len(set(self.decays)) < len(self.decays):
            raise ConfigError(
                f"optimizer.decays is {', '.join(map(str, self.decays))}, but must name some of "
                f"{', '.join(PARTS)}, each once (or none)"
            )
        for name in ("cooldown", "min_lr_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"optimizer.{name} is {getattr(self, name)}, but must be 0 to 1")
        for name in ("ema_decay", "muon_momentum", "muon_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"optimizer.{name} is {getattr(self, name)}, but must be at least 0 and below 1"
                )
        if self.schedule == "trapezoid" and self.cooldown_shape != "linear":
            raise ConfigError(
                f"optimizer.cooldown_shape is {self.cooldown_shape}, but a trapezoid falls in a "
                "straight line; give optimizer.schedule wsd"
            )


def learning_rate(step: int, total: int, config: OptimizerConfig) -> float:
    """AdamW's rate of one step; Muon's has the same shape.

    Args:
        step: optimizer steps taken before this one, from 0.
        total: steps of the whole run.

    Returns:
        Above 0 at every step of the run, the first and the last included.
    """
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    low = config.min_lr_ratio
    left = max(0, total - step)
    if config.schedule in ("wsd", "trapezoid"):
        fall = math.ceil(config.cooldown * total)
        share = min(1.0, left / fall) if fall else 1.0
        if config.cooldown_shape == "sqrt":
            share = 1 - math.sqrt(1 - share)
        shape = low + (1 - low) * share
    elif config.schedule == "cosine":
        span = max(1, total - config.warmup_steps)
        done = 1 - min(span, left) / span
        shape = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
    else:
        shape = 1.0
    return config.lr * min(warm, shape)


def decay_share(step: int, total: int, config: OptimizerConfig) -> float:
    """What of the weight decay is left at a step: 1 at first."""
    done = min(1.0, step / max(1, total))
    if config.weight_decay_schedule == "linear":
        return 1 - done
    if config.weight_decay_schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1.0


# --- Groups -------------------------------------------------------------------------------------


def part_of(name: str, parameter: Tensor) -> Part:
    """What a parameter is, by its name in the model."""
    if parameter.ndim < 2:
        return "vectors"
    words = name.split(".")
    if any("embed" in word for word in words):
        return "embeddings"
    return "head" if "head" in words else "matrices"


def takes_muon(name: str, parameter: Tensor) -> bool:
    """Whether a parameter takes one stream to another: the linear layers of the blocks. Tables that
    are looked up and adapters are not such."""
    ends = tuple(f".{matrix}.weight" for matrix in MATRICES)
    return parameter.ndim == 2 and ".blocks." in f".{name}" and name.endswith(ends)


def rows_of(name: str, config: GPTConfig) -> tuple[int, ...]:
    """Of how many rows each of the matrices is that a layer holds in one; empty: it is one."""
    if name.endswith("attn.qkv.weight"):
        D = config.head_width
        return (config.n_head * D, config.kv_heads * D, config.kv_heads * D)
    if name.endswith("mlp.up.weight") and config.mlp == "swiglu":
        return (config.mlp_width, config.mlp_width)
    return ()


def parameter_groups(
    named: Iterable[tuple[str, Tensor]], config: OptimizerConfig, model: GPTConfig
) -> list[dict[str, Any]]:
    """Groups by kind, by whether they decay, and for Muon by the matrices in a parameter. A tied
    matrix is one parameter, named once.

    Raises:
        AssertionError: a parameter is in no group or in two. It would train wrongly in silence.
    """
    named = [(name, p) for name, p in named if p.requires_grad]
    found: dict[Any, list[Tensor]] = {}
    for name, p in named:
        decays = part_of(name, p) in config.decays
        if config.kind == "muon" and takes_muon(name, p):
            found.setdefault((MUON, decays, rows_of(name, model)), []).append(p)
        else:
            found.setdefault((ADAMW, decays, ()), []).append(p)
    # What decays first, as in checkpoints from before there were kinds.
    order = sorted(found, key=lambda key: (key[0] != MUON, not key[1], key[2]))
    groups: list[dict[str, Any]] = []
    for kind, decays, rows in order:
        group = {"params": found[kind, decays, rows], "kind": kind, "decays": decays}
        groups.append(group | ({"rows": rows} if kind == MUON else {}))
    placed = [id(p) for group in groups for p in group["params"]]
    if sorted(placed) != sorted({id(p) for _, p in named}):
        raise AssertionError("every parameter must be in exactly one optimizer group")
    return groups


def make_optimizer(
    named: Iterable[tuple[str, Tensor]],
    config: OptimizerConfig,
    model: GPTConfig,
    *,
    fused: bool,
) -> Optimizer:
    """The optimizer over the groups. `fused` updates all of AdamW's parameters in one kernel.

    Raises:
        ConfigError: Muon, and nothing for it to move.
    """
    groups = parameter_groups(named, config, model)
    if config.kind == "muon":
        if not any(group["kind"] == MUON for group in groups):
            raise ConfigError(
                "optimizer.kind is muon, but nothing that it moves is trained: LoRA's adapters are "
                "AdamW's; give optimizer.kind adamw"
            )
        made: Optimizer = MuonAdamW(groups, config.lr, fused=fused)
    else:
        made = torch.optim.AdamW(groups, lr=config.lr, fused=fused)
    set_step(made, config, config.lr, 1.0)
    return made


def set_step(optimizer: Optimizer, config: OptimizerConfig, rate: float, decay: float) -> None:
    """Give each group what one step takes. What is given now wins over what a state remembers.

    Args:
        rate: AdamW's; Muon's peak is that of `config` at the same share.
        decay: share of the weight decay that is left.
    """
    for group in optimizer.param_groups:
        pull = config.weight_decay
        if group["kind"] == MUON:
            group["lr"] = rate * config.muon_lr / config.lr
            group["momentum"], group["beta2"] = config.muon_momentum, config.muon_beta2
            if config.muon_weight_decay is not None:
                pull = config.muon_weight_decay
        else:
            group["lr"], group["betas"] = rate, config.betas
        group["weight_decay"] = pull * decay if group["decays"] else 0.0
