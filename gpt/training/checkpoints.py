"""A run's checkpoints, and the model folder made of the best one.

A checkpoint is the state between two steps, always: the step before is done, logged and, where that
was due, validated; nothing of the next has begun. That is why it is saved when the next step's
first batch has come, and put down as if that batch were still to come.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from gpt.checkpoint import load_model, save_model
from gpt.errors import CheckpointError, ConfigError
from gpt.training.exactness import SETTINGS_KEY, broken_exactness, run_settings
from gpt.training.guard import DivergedError, LossGuard
from gpt.training.module import GPTModule
from gpt.training.progress import say
from gpt.training.run import RunFolder
from gpt.training.storage import (
    DurableCheckpointIO,
    put_in_place,
    read_checkpoint,
    remove_products,
    replace_with_copy,
)
from gpt.training.throughput import is_logging_step


@dataclass(frozen=True)
class CheckpointSchedule:
    """When `last.ckpt` is written, beside every validation and the end of the run.

    It changes nothing in the run, only how much of it a crash can cost.

    Args:
        every_minutes: at the first step after so many minutes without a checkpoint; null: never.
        every_n_steps: after steps whose number this divides; null: never.
    """

    every_minutes: float | None = 5.0
    every_n_steps: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for what is not above 0."""
        for name in ("every_minutes", "every_n_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"checkpoint.{name} is {value}, but must be above 0, or null")


class RunCheckpoints(Checkpoint):
    """Keeps `last.ckpt`, the newest, `previous.ckpt`, the one before, and `best.ckpt`, the one with
    the lowest validation loss.

    Each is replaced atomically and flushed to the disk first. A run that begins anew in an old
    run's folder takes the place of its checkpoints, and takes away the model made of them, with its
    own first, not before.

    Args:
        run: the run's folder.
        schedule: when to save.
        guard: looks at the losses before each save.
        clock: seconds, monotonic.

    Raises:
        DivergedError: a loss or a weight is not finite; the checkpoints stay as they were.
    """

    def __init__(
        self,
        run: RunFolder,
        schedule: CheckpointSchedule | None = None,
        guard: LossGuard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.run = run
        self.schedule = CheckpointSchedule() if schedule is None else schedule
        self.guard = LossGuard() if guard is None else guard
        self.clock = clock
        self.best_loss = math.inf
        self.best_step: int | None = None
        self._saved_step: int | None = None  # of this run, whatever process wrote it
        self._saved_at = 0.0
        self._validated = False
        self._new_best = False
        self._moved = False  # gone on with from a checkpoint in another folder
        self._position: dict[str, Any] | None = None  # of the training loader, between two steps

    @property
    def export_from(self) -> Path | None:
        """What to export: this run's best, or its last if nothing was validated."""
        if self.best_step is not None:
            return self.run.best
        return self.run.last if self.run.last.is_file() else None

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_loss, self.best_step = state_dict["best_loss"], state_dict["best_step"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, ModelParallelStrategy):
            trainer.strategy.checkpoint_io = DurableCheckpointIO()
        if trainer.is_global_zero:
            self.run.best.parent.mkdir(parents=True, exist_ok=True)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let validation fall between two steps: inside one there are gradients that no checkpoint
        holds."""
        parts, every = trainer.accumulate_grad_batches, trainer.val_check_batch
        if isinstance(every, int) and every % parts:
            trainer.val_check_batch = -(-every // parts) * parts
            if trainer.enable_validation:
                say(
                    f"validating every {trainer.val_check_batch} batches, not {every}: a step is "
                    f"{parts} batches"
                )
        self._saved_at = self.clock()
        anew = self._saved_step is None and self.run.last.is_file()
        if anew and trainer.is_global_zero and not is_trial(trainer):
            self.run.begun.touch()  # so that --resume does not take the other run's for this one's

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._saved_step is None:
            return
        if trainer.is_global_zero:
            self._find_best_again(trainer)
        self.best_loss, self.best_step = trainer.strategy.broadcast(
            (self.best_loss, self.best_step)
        )

    def _find_best_again(self, trainer: L.Trainer) -> None:
        """A run may have been killed between its two files, or go on in another folder."""
        there = None if self._moved else _step_of(self.run.best)
        if self.best_step in (None, there):
            return
        if self.best_step == self._saved_step:
            replace_with_copy(Path(str(trainer.ckpt_path)), self.run.best)
        else:  # it cannot be had again, so it cannot be exported
            self.best_loss, self.best_step = math.inf, None

    # --- When -----------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches:
            return
        # Lightning may be one off after a resume, depending on where it believes to be.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        if not is_trial(trainer) and self._is_due(trainer):
            self.save(trainer)

    def _is_due(self, trainer: L.Trainer) -> bool:
        step = trainer.global_step
        if self._validated:
            return True
        if step in (0, self._saved_step):
            return False
        if self.schedule.every_n_steps is not None and step % self.schedule.every_n_steps == 0:
            return True
        if self.schedule.every_minutes is None:
            return False
        if trainer.world_size > 1 and not is_logging_step(trainer):
            return False
        late = self.clock() - self._saved_at >= 60 * self.schedule.every_minutes
        # Clocks differ between processes, and all must save together.
        return bool(trainer.strategy.broadcast(late)) if trainer.world_size > 1 else late

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._position = position(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or is_trial(trainer):
            return
        if trainer.global_step == 0:  # what the run begins with is no result of it
            return
        assert isinstance(pl_module, GPTModule)
        assert pl_module.evaluation is not None
        loss = pl_module.evaluation.loss
        if not math.isfinite(loss):
            raise DivergedError(
                f"the validation loss is {loss} at step {trainer.global_step}: training diverged; "
                "lower model.optimizer.lr or warm up longer. Nothing of it was saved; "
                f"{self.guard.last_good}"
            )
        if loss < self.best_loss:
            self.best_loss, self.best_step = loss, trainer.global_step
            self._new_best = True
        self._validated = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not is_trial(trainer) and (self._validated or trainer.global_step != self._saved_step):
            self.save(trainer)

    # --- How ------------------------------------------------------------------------------------

    def save(self, trainer: L.Trainer) -> None:
        """Write `last.ckpt`, between two steps; and `best.ckpt` if that is the same state.

        Raises:
            CheckpointError: it cannot be written; the one before is unharmed.
            DivergedError: the state is not worth it.
        """
        self.guard.check(trainer)
        self.guard.check_state(trainer.lightning_module, trainer.global_step)
        first = self._saved_step is None or self._moved
        scratch = self.run.last.with_name(f".{self.run.last.name}.new")
        try:
            trainer.save_checkpoint(scratch)
            if trainer.is_global_zero:
                if first:  # what lies here is of an earlier run
                    remove_products(self.run)
                    self.run.previous.unlink(missing_ok=True)
                    if self.best_step is None:
                        self.run.best.unlink(missing_ok=True)
                put_in_place(scratch, self.run.last, None if first else self.run.previous)
                if self._new_best:
                    replace_with_copy(self.run.last, self.run.best)
                self.run.begun.unlink(missing_ok=True)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise CheckpointError(
                f"cannot write {self.run.last}: {error.strerror or error}; "
                "the one before is unharmed: make room and go on with --resume"
            ) from None
        trainer.strategy.barrier("checkpoints")
        self._saved_step = trainer.global_step
        self._saved_at = self.clock()
        self._validated = self._new_best = self._moved = False
        self.guard.last_good = (
            f"the last good checkpoint is {self.run.last} (step {self._saved_step})"
        )

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        assert isinstance(pl_module, GPTModule)
        checkpoint[SETTINGS_KEY] = run_settings(trainer, pl_module)
        if self._position is not None:
            between_steps(checkpoint, trainer.accumulate_grad_batches, self._position)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        assert isinstance(pl_module, GPTModule)
        self._saved_step = checkpoint["global_step"]
        resumed = Path(str(trainer.ckpt_path))
        self._moved = resumed.resolve().parent != self.run.last.resolve().parent
        self.guard.last_good = f"the last good checkpoint is {resumed} (step {self._saved_step})"
        settings = checkpoint.get(SETTINGS_KEY, {})
        for line in broken_exactness(settings, run_settings(trainer, pl_module)):
            say(line)
        self._position = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
        # A step may be of another number of batches now.
        between_steps(checkpoint, trainer.accumulate_grad_batches, self._position)


def position(trainer: L.Trainer) -> dict[str, Any]:
    """How far the training loader has come."""
    loader: Any = trainer.train_dataloader
    state: dict[str, Any] = loader.state_dict()
    return state


def between_steps(checkpoint: dict[str, Any], parts: int, loader: dict[str, Any]) -> None:
    """Rewrite where Lightning's loops stand to: so many whole steps done, none begun.

    As Lightning notes it, that depends on the hook in which a checkpoint is saved, and from some it
    resumes by a validation too many or too few, or by a step miscounted in the logs.

    Args:
        checkpoint: as Lightning made it.
        parts: batches in a step.
        loader: state of the training loader after those steps.
    """
    steps = checkpoint["global_step"]
    loop = checkpoint["loops"]["fit_loop"]
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = steps
    loop["state_dict"]["combined_loader"] = [loader]
    batches = loop["epoch_loop.batch_progress"]
    batches["is_last_batch"] = False
    for span in ("current", "total"):
        batches[span].update(dict.fromkeys(batches[span], steps * parts))
        loop["epoch_progress"][span].update(ready=1, started=1, processed=0, completed=0)


def _step_of(path: Path) -> int | None:
    try:
        return int(read_checkpoint(path)["global_step"])
    except (CheckpointError, OSError, KeyError):
        return None


def is_trial(trainer: L.Trainer) -> bool:
    """Whether this is `fast_dev_run`, which must leave nothing behind."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


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
            **loaded.training,
            "steps": self.checkpoints.best_step or trainer.global_step,
            "source": pl_module.data.source_name,
            "batch_tokens": trainer.accumulate_grad_batches
            * trainer.world_size
            * pl_module.data.batch_size
            * pl_module.data.block_size,
        }
        best = self.checkpoints.best_loss
        if math.isfinite(best):
            training["val_loss"] = best
        if pl_module.init_from is not None:
            training["base"] = {"init_from": pl_module.init_from, "val_loss": pl_module.base_loss}
        save_model(
            self.run.model,
            loaded.model,
            loaded.tokenizer,
            name=self.run.name,
            training=training,
            chat_template=loaded.chat_template,
        )
        found = f" (step {training['steps']}, val/loss {best:.4f})" if math.isfinite(best) else ""
        say(f"model{found}: {self.run.model}")
        if pl_module.base_loss is not None and math.isfinite(best):
            worse = "" if best < pl_module.base_loss else ", which this run has not reached"
            say(f"base model: val/loss {pl_module.base_loss:.4f}{worse}")
        say(f"next: antiphon sample {self.run.model} --prompt {shlex.quote(_prompt(pl_module))}")
        say(f"      antiphon serve {self.run.model}")


def _prompt(module: GPTModule) -> str:
    """Something the vocabulary can surely say."""
    ids = module.data.prepared.train[0:16].tolist()
    words = module.tokenizer.decode(ids).strip().split("\n")[0].split()
    return " ".join(words[:2])
