"""Ending a run that has stopped getting better."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping

from gpt.errors import ConfigError
from gpt.training.progress import say


class StopEarly(EarlyStopping):
    """Ends the run when the validation loss has not become lower for several validations.

    The model of the lowest one is exported, as always. The count goes on when the run is resumed. A
    learning rate that falls at the end of `max_steps` never gets to fall in a run that ends before.

    Args:
        patience: validations in a row without a lower loss; null: never end early.
        min_delta: nats per token by which a loss must be lower to count.

    Attributes:
        reason: why the run was ended, if it was.
    """

    def __init__(self, patience: int | None = None, min_delta: float = 0.0) -> None:
        if patience is not None and patience < 1:
            raise ConfigError(
                f"early_stopping.patience is {patience}, but must be at least 1 (or null)"
            )
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise ConfigError(
                f"early_stopping.min_delta is {min_delta}, but must be a finite number >= 0"
            )
        # A loss that is not finite ends the run as diverged, and says so.
        super().__init__(
            "val/loss",
            min_delta=min_delta,
            patience=patience or 1,
            check_finite=False,
            check_on_train_epoch_end=False,
        )
        self.enabled = patience is not None
        self.best_step = 0
        self.reason: str | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.enabled and stage == "fit" and not trainer.limit_val_batches:
            raise ConfigError(
                f"early_stopping.patience is {self.patience}, but trainer.limit_val_batches is 0: "
                "without validation there is nothing to judge by"
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.enabled or self._should_skip_check(trainer):
            return
        self._run_early_stopping_check(trainer)
        if self.wait_count == 0:
            self.best_step = trainer.global_step
        elif self.wait_count >= self.patience:
            less = f" by more than {abs(self.min_delta):g}" if self.min_delta else ""
            self.reason = (
                f"val/loss has not become lower{less} in {self.wait_count} validations "
                f"(lowest: {float(self.best_score):.4f} at step {self.best_step})"
            )
            say(f"stopped early at step {trainer.global_step}: {self.reason}")

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "best_score": float(self.best_score),
            "best_step": self.best_step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Patience and min_delta are those given now."""
        self.wait_count = int(state_dict["wait_count"])
        self.best_score = self.best_score.new_tensor(state_dict["best_score"])
        self.best_step = int(state_dict["best_step"])
