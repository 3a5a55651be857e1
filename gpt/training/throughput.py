"""Tokens a second, and what share of the machine that is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from gpt.machine import Limit, speed_limit
from gpt.training.module import GPTModule


def is_logging_step(trainer: L.Trainer) -> bool:
    """Whether the step just done is one whose metrics go to the loggers."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and trainer.global_step % every == 0


class Throughput(Callback):
    """Logs `tokens_per_s`, training tokens over elapsed seconds since the last logging step, and
    `mfu`, the share of the machine's speed that the model's matrix products make of it.

    The clock stands still during validation and everything that hangs on it. MFU is left out where
    the device's speed is not known (`gpt.machine`); on a CPU it is measured once, before the first
    step, and MFU is a share of that.

    Args:
        clock: seconds, monotonic.
        limit: speed of one device; None: find it out at the start of the run.

    Attributes:
        limit: the speed that is used, once the run has begun; None: not known.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, limit: Limit | None = None
    ) -> None:
        self.clock = clock
        self.limit = limit
        self._flops_per_token = 0.0
        self._tokens = 0
        self._seconds = 0.0
        self._mark: float | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        self._flops_per_token = pl_module.flops_per_token
        if self.limit is None:
            self.limit = speed_limit(pl_module.device, compute_dtype(trainer.precision))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._mark is None:
            self._mark = self.clock()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> None:
        assert self._mark is not None
        now = self.clock()
        self._tokens += batch[0].numel()
        self._seconds += now - self._mark
        self._mark = now
        step_done = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if step_done and self._seconds > 0 and is_logging_step(trainer):
            assert isinstance(pl_module, GPTModule)
            rate = self._tokens / self._seconds  # of one device
            found: dict[str, float | Tensor] = {"tokens_per_s": rate * trainer.world_size}
            if self.limit is not None:
                found["mfu"] = rate * self._flops_per_token / self.limit.flops
            pl_module.log_step(found)
            self._tokens, self._seconds = 0, 0.0

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._mark = None


def compute_dtype(precision: str | int | None) -> torch.dtype:
    """What the matrix products of a run are computed in, by Lightning's name of its precision."""
    kind = str(precision)
    if kind.startswith("bf16"):
        return torch.bfloat16
    if kind.startswith("16"):
        return torch.float16
    return torch.float64 if kind.startswith("64") else torch.float32
