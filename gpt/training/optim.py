"""The optimizer's settings, which parameters decay, and the learning rate of each step.

The schedule is a function of the step alone: nothing to save, nothing to restore, and a resumed run
follows the flags it was given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gpt.errors import ConfigError

Schedule = Literal["wsd", "cosine", "constant"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) and its schedule.

    Attributes:
        lr: peak learning rate.
        betas: decay of the running mean of gradients and of their squares.
        weight_decay: pull of the matrices towards zero, times the learning rate; norms, biases and
            other vectors do not decay.
        warmup_steps: steps over which the rate climbs to its peak.
        schedule: `wsd` stays at the peak and falls in a straight line at the end (warm-up, stable,
            decay: Hu et al., arXiv 2404.06395); `cosine` falls along half a wave from the end of
            the warm-up (Loshchilov & Hutter, arXiv 1608.03983); `constant` stays.
        cooldown: share of all steps that the fall of `wsd` takes.
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

    def __post_init__(self) -> None:
        """Raises ConfigError that names the setting, its value and what is allowed."""
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"optimizer.lr is {self.lr}, but must be a finite number above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas are {self.betas}, but must be in [0, 1)")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError(
                f"optimizer.weight_decay is {self.weight_decay}, but must be a finite number >= 0"
            )
        if self.warmup_steps < 0:
            raise ConfigError(f"optimizer.warmup_steps is {self.warmup_steps}, but must be >= 0")
        if self.schedule not in get_args(Schedule):
            raise ConfigError(
                f"optimizer.schedule is {self.schedule!r}, but must be one of "
                f"{', '.join(get_args(Schedule))}"
            )
        for name in ("cooldown", "min_lr_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"optimizer.{name} is {getattr(self, name)}, but must be 0 to 1")
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(
                f"optimizer.ema_decay is {self.ema_decay}, but must be at least 0 and below 1"
            )


def learning_rate(step: int, total: int, config: OptimizerConfig) -> float:
    """The rate of one step.

    Args:
        step: optimizer steps taken before this one, from 0.
        total: steps of the whole run.

    Returns:
        Above 0 at every step of the run, the first and the last included.
    """
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    low = config.min_lr_ratio
    left = max(0, total - step)
    if config.schedule == "wsd":
        fall = math.ceil(config.cooldown * total)
        shape = low + (1 - low) * min(1.0, left / fall) if fall else 1.0
    elif config.schedule == "cosine":
        span = max(1, total - config.warmup_steps)
        done = 1 - min(span, left) / span
        shape = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))
    else:
        shape = 1.0
    return config.lr * min(warm, shape)


def parameter_groups(
    named: Iterable[tuple[str, Tensor]], weight_decay: float
) -> list[dict[str, Any]]:
    """Matrices, which decay, and vectors, which do not. A tied matrix is one parameter, named once.

    Raises:
        AssertionError: a parameter is in no group or in two. It would train wrongly in silence.
    """
    named = [(name, p) for name, p in named if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    placed = [id(p) for group in groups for p in group["params"]]
    if sorted(placed) != sorted({id(p) for _, p in named}):
        raise AssertionError("every parameter must be in exactly one optimizer group")
    return [group for group in groups if group["params"]]


def make_adamw(
    named: Iterable[tuple[str, Tensor]], config: OptimizerConfig, *, fused: bool
) -> torch.optim.AdamW:
    """AdamW over the two groups. `fused` updates all parameters in one kernel."""
    groups = parameter_groups(named, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)
