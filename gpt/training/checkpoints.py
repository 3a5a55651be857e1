"""A run's two checkpoints, and the model folder made of the better one."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint

from gpt.checkpoint import load_model, save_model
from gpt.errors import CheckpointError, UserError
from gpt.training.module import GPTModule
from gpt.training.progress import say
from gpt.training.run import RunFolder


class DivergedError(UserError):
    """Training went off: the loss is no longer a number."""


class RunCheckpoints(Checkpoint):
    """Keeps `last.ckpt`, the newest, and `best.ckpt`, the one with the lowest validation loss.

    Both are replaced atomically. A run that begins anew in an old run's folder takes the place of
    its checkpoints at the first validation, not before.

    Args:
        run: the run's folder.

    Raises:
        DivergedError: the validation loss is not finite; the checkpoints stay as they were.
    """

    def __init__(self, run: RunFolder) -> None:
        super().__init__()
        self.run = run
        self.best_loss = math.inf
        self.best_step: int | None = None

    @property
    def export_from(self) -> Path | None:
        """What to export: this run's best, or its last if nothing was validated."""
        if self.best_step is not None:
            return self.run.best
        return self.run.last if self.run.last.is_file() else None

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises nothing, but forgets a best that is not in this folder: it cannot be exported."""
        if self.run.best.is_file():
            self.best_loss, self.best_step = state_dict["best_loss"], state_dict["best_step"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            self.run.best.parent.mkdir(parents=True, exist_ok=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or is_trial(trainer):
            return
        assert isinstance(pl_module, GPTModule)
        assert pl_module.evaluation is not None
        loss = pl_module.evaluation.loss
        if not math.isfinite(loss):
            good = f"the last good one is {self.run.last}" if self.best_step is not None else (
                "there is no earlier one"
            )  # fmt: skip
            raise DivergedError(
                f"the validation loss is {loss} at step {trainer.global_step}: training diverged; "
                f"lower model.optimizer.lr or warm up longer. No checkpoint was written; {good}"
            )
        better = loss < self.best_loss
        if better:
            self.best_loss, self.best_step = loss, trainer.global_step
        self.save(trainer)
        if better and trainer.is_global_zero:
            _replace_with_copy(self.run.last, self.run.best)
        trainer.strategy.barrier("checkpoints")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The end of the run was validated and saved, unless validation is switched off."""
        if self.best_step is None and not is_trial(trainer):
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Write `last.ckpt`."""
        if self.best_step is None and trainer.is_global_zero:
            self.run.best.unlink(missing_ok=True)  # of an earlier run in this folder
        scratch = self.run.last.with_name(f".{self.run.last.name}.new")
        try:
            trainer.save_checkpoint(scratch)
            if trainer.is_global_zero:
                os.replace(scratch, self.run.last)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise CheckpointError(
                f"cannot write {self.run.last}: {error.strerror or error}; "
                "the one before is unharmed"
            ) from None


def is_trial(trainer: L.Trainer) -> bool:
    """Whether this is `fast_dev_run`, which must leave nothing behind."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def _replace_with_copy(source: Path, target: Path) -> None:
    """A hard link where the file system has them: the next `last.ckpt` is a new file anyway."""
    scratch = target.with_name(f".{target.name}.new")
    scratch.unlink(missing_ok=True)
    try:
        os.link(source, scratch)
    except OSError:
        shutil.copyfile(source, scratch)
    os.replace(scratch, target)


class ExportModel(Callback):
    """Writes the model folder at the end of training and says what to do with it.

    Args:
        run: the run's folder.
        checkpoints: knows which checkpoint is the best of this run.
    """

    def __init__(self, run: RunFolder, checkpoints: RunCheckpoints) -> None:
        self.run = run
        self.checkpoints = checkpoints

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        source = self.checkpoints.export_from
        if not trainer.is_global_zero or source is None or is_trial(trainer):
            return
        assert isinstance(pl_module, GPTModule)
        loaded = load_model(source)
        training: dict[str, Any] = {
            "steps": self.checkpoints.best_step or trainer.global_step,
            "source": pl_module.data.source_name,
            "batch_tokens": trainer.accumulate_grad_batches
            * trainer.world_size
            * pl_module.data.batch_size
            * pl_module.config.block_size,
        }
        best = self.checkpoints.best_loss
        if math.isfinite(best):
            training["val_loss"] = best
        save_model(
            self.run.model, loaded.model, loaded.tokenizer, name=self.run.name, training=training
        )
        found = f" (step {training['steps']}, val/loss {best:.4f})" if math.isfinite(best) else ""
        say(f"model{found}: {self.run.model}")
        say(f"next: antiphon sample {self.run.model} --prompt {shlex.quote(_prompt(pl_module))}")
        say(f"      antiphon serve {self.run.model}")


def _prompt(module: GPTModule) -> str:
    """Something the vocabulary can surely say."""
    ids = module.data.prepared.train[0:16].tolist()
    words = module.tokenizer.decode(ids).strip().split("\n")[0].split()
    return " ".join(words[:2])


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The checkpoint as plain data, its tensors still on disk. No code in it is ever run.

    Raises:
        CheckpointError: not a checkpoint.
    """
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is not a checkpoint: give a .ckpt file that fit wrote")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # torch.load fails in as many ways as there are files that are no checkpoint; all mean the same.
    except Exception as error:  # noqa: BLE001
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is no readable checkpoint: {reason}") from None
    if not isinstance(found, dict) or "state_dict" not in found:
        raise CheckpointError(f"{path} is no checkpoint of this trainer: it has no state_dict")
    return found
