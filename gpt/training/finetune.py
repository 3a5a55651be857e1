"""Fine-tuning: a run that begins with a model, and measures it first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from gpt.checkpoint import PAYLOAD_KEY, LoadedModel
from gpt.errors import CheckpointError, ConfigError
from gpt.tokenizer import Tokenizer
from gpt.training.base import check_architecture, check_given_tokenizer, open_base
from gpt.training.checkpoints import is_trial
from gpt.training.data import TextDataModule
from gpt.training.module import GPTModule
from gpt.training.progress import say
from gpt.training.storage import read_checkpoint


def begin_with(
    model: GPTModule, data: TextDataModule, base: LoadedModel | None, checkpoint: Path | None
) -> None:
    """Give a run the model that `model.init_from` names, or what a checkpoint kept of it.

    Args:
        base: that model, if it is open already.
        checkpoint: what the run goes on with, or is measured; it holds all weights.

    Raises:
        ConfigError: settings that contradict the model; LoRA without one.
        CheckpointError: no model there.
    """
    if model.init_from is None:
        if model.lora.on:
            raise ConfigError(
                f"model.lora.rank is {model.lora.rank}, but there is no model to adapt; give "
                "model.init_from, or rank 0"
            )
        return
    if model.preset is not None:
        raise ConfigError(
            f"model.preset is {model.preset} and model.init_from {model.init_from}, but only one "
            "can say what the model is; leave the preset out"
        )
    if checkpoint is not None:
        data.model_tokenizer = tokenizer_of(checkpoint)
    else:
        model.base = open_base(model.init_from) if base is None else base
        data.model_tokenizer = model.base.tokenizer
        check_architecture(model.base, model.init_from, model.config)
        model.config = model.config.replace(vocab_size=model.base.model.config.vocab_size)
    check_given_tokenizer(data, model.init_from, data.model_tokenizer)


def tokenizer_of(checkpoint: Path) -> Tokenizer:
    """That of a run's checkpoint. Raises CheckpointError if it holds none."""
    payload = read_checkpoint(checkpoint).get(PAYLOAD_KEY)
    if not isinstance(payload, dict) or "tokenizer" not in payload:
        raise CheckpointError(f"{checkpoint} holds no tokenizer; it was not written by `fit`")
    return Tokenizer.from_dict(payload["tokenizer"])


class BaseValidation(Callback):
    """Measures the model that a run begins with before the first step.

    The loss stands in the log at step 0. It is not a result of the run: the best checkpoint is
    looked for among those that were trained.

    Attributes:
        loss: nats per token of the base model; None before it was measured. The module has it, too.
    """

    def __init__(self) -> None:
        self.loss: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        pl_module.base_loss = self.loss  # that of the checkpoint, if there is one

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Run the trainer's own validation, with all that hangs on it, ahead of the first step."""
        if trainer.global_step or trainer.ckpt_path or not trainer.enable_validation:
            return
        assert isinstance(pl_module, GPTModule)
        steps = trainer.fit_loop.epoch_loop
        first = trainer._logger_connector._first_loop_iter
        trainer.validating = True  # as the training loop does around its validations
        steps._batches_that_stepped = -1  # loggers are told the step before the one it follows
        try:
            steps.val_loop.run()
        finally:
            steps._batches_that_stepped = 0
            trainer.training = True
            trainer._logger_connector._first_loop_iter = first
        assert pl_module.evaluation is not None
        loss = pl_module.evaluation.loss
        if not math.isfinite(loss):
            raise ConfigError(
                f"the model in {pl_module.init_from} has a validation loss of {loss} before it is "
                "trained: its weights are damaged, or trainer.precision "
                f"{trainer.precision} is too narrow for it"
            )
        self.loss = pl_module.base_loss = loss
        if not is_trial(trainer):
            say(f"the base model's val/loss is {loss:.4f} ({pl_module.init_from})")

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loss = state_dict["loss"]
