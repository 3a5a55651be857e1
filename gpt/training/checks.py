"""What is refused, or said, before a run begins."""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only

from gpt.errors import CheckpointError, ConfigError
from gpt.training.optim import OptimizerConfig
from gpt.training.run import RunFolder
from gpt.training.storage import read_checkpoint


def check_precision(precision: Any, accelerator: Any) -> None:
    """Raises ConfigError for fp16 on a CPU, which Lightning would silently replace by bf16."""
    on_cpu = accelerator == "cpu" or (
        accelerator == "auto"
        and not torch.cuda.is_available()
        and not torch.backends.mps.is_available()
    )
    if on_cpu and str(precision) in ("16", "16-mixed", "16-true"):
        raise ConfigError(
            f"trainer.precision is {precision}, but a CPU has no fast fp16; "
            "use bf16-mixed or 32-true there"
        )


def check_endless(trainer: Any) -> None:
    """Raises ConfigError for settings in epochs: the training loader has no end of its own."""
    if trainer.max_epochs not in (None, -1):
        raise ConfigError(
            f"trainer.max_epochs is {trainer.max_epochs}, but a run is measured in steps; set "
            "trainer.max_steps (the start of a run says how many times through the text that is)"
        )
    if trainer.overfit_batches:
        raise ConfigError(
            f"trainer.overfit_batches is {trainer.overfit_batches}, but batches come from one "
            "endless stream; to overfit, train on a short file (data.source)"
        )
    if not isinstance(trainer.val_check_interval, int):
        raise ConfigError(
            f"trainer.val_check_interval is {trainer.val_check_interval}, but must be a whole "
            "number of batches"
        )


def check_steps_left(checkpoint: dict[str, Any], max_steps: int) -> None:
    """Raises ConfigError for a run that has nothing left to do when it is gone on with."""
    step = int(checkpoint.get("global_step", 0))
    if 0 < max_steps <= step:
        raise ConfigError(
            f"the checkpoint is at step {step}, but trainer.max_steps is {max_steps}; give more"
        )


def check_same_groups(settings: dict[str, Any], config: OptimizerConfig) -> None:
    """Raises ConfigError where a checkpoint's optimizer has its parameters in other groups: its
    state belongs to places in them.

    Args:
        settings: `gpt.training.exactness.run_settings` of the checkpoint's run.
    """
    for name in ("kind", "decays"):
        now = getattr(config, name)
        before = settings.get(f"model.optimizer.{name}", getattr(OptimizerConfig, name))
        if isinstance(now, str):
            same, texts = before == now, (str(before), now)
        else:
            same, texts = set(before) == set(now), (", ".join(before), ", ".join(now))
        if not same:
            raise ConfigError(
                f"model.optimizer.{name} was {texts[0] or 'empty'} in the checkpoint's run and is "
                f"{texts[1] or 'empty'}, but the optimizer's state is made for that; give the "
                "config.yaml of that run, or begin a new run with model.init_from and the "
                "checkpoint's path"
            )


@rank_zero_only
def tell_of_earlier_run(run: RunFolder) -> None:
    """Say on stderr that a run is about to take the place of another."""
    if not run.last.is_file():
        return
    try:
        length = f"{read_checkpoint(run.last)['global_step']} steps"
    except (CheckpointError, KeyError):
        length = "unknown length"
    print(
        f"{run.path} holds a run of {length}; starting over (to go on with it: --resume). Its "
        "checkpoints and model are replaced at the first save, its metrics and samples now; "
        "another --name keeps them",
        file=sys.stderr,
    )
