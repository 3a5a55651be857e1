"""A learning-rate range test: train a little at rates that grow, and see where the loss falls.

Smith, "Cyclical learning rates for training neural networks", arXiv 1506.01186, section 3.3. The
rate grows by the same factor from each step to the next. At first nothing happens; then the loss
falls, fastest where steps are large and still agree with each other; then it turns and goes off.
Suggested is the rate of the steepest fall of the smoothed loss over the logarithm of the rate. A
tenth of the rate at the lowest loss, the other usual choice, is shown beside it. Both are places to
begin: the test has neither the warm-up nor the decay of a run.
"""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback

from gpt.errors import ConfigError
from gpt.files import write_atomically
from gpt.training.lean_loop import LeanTrainer
from gpt.training.module import GPTModule
from gpt.training.progress import say
from gpt.training.run import RunFolder

FEWEST_STEPS = 20
"""Fewer say nothing once they are smoothed."""

DIVERGED = 1.5
"""Times the lowest smoothed loss so far; losses of a language model cannot grow like others."""

A_FALL = 0.02
"""Share of the first loss that has to be gained for it to count as learning."""


class RangeTrainer(LeanTrainer):
    """A Lightning trainer that also runs the range test; the command line finds its settings
    here."""

    def lr_find(
        self,
        model: GPTModule,
        datamodule: L.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        min_lr: float = 1e-6,
        max_lr: float = 1.0,
        steps: int = 150,
    ) -> RangeTest:
        """Train at growing rates from new weights, on the batches that fit would see.

        Args:
            ckpt_path: must be null: the test begins with new weights, as the run will.
            min_lr: rate of the first step.
            max_lr: rate of the last step.
            steps: optimizer steps from one to the other; fewer are run if the loss goes off.

        Raises:
            ConfigError: settings out of range.
        """
        check_range(min_lr, max_lr, steps, ckpt_path)
        sweep = RangeSweep(min_lr, max_lr, steps)
        self.callbacks.insert(0, sweep)  # type: ignore[attr-defined]
        self.fit(model, datamodule=datamodule)
        return RangeTest(np.array(sweep.rates), np.array(sweep.losses), steps, sweep.went_off)


# The command's name has a hyphen, and LightningCLI takes it for that of the method.
setattr(RangeTrainer, "lr-find", RangeTrainer.lr_find)


def range_options(steps: int) -> dict[str, Any]:
    """What a trainer for the range test has in place of a run's own settings."""
    return {
        "max_steps": steps,
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
    }


def check_range(
    min_lr: float, max_lr: float, steps: int, ckpt_path: str | None = None, *, trial: object = False
) -> None:
    """Raises ConfigError for a range that is none, too few steps, or what makes no sense here: a
    checkpoint, and a trial of a few steps (`fast_dev_run`)."""
    if trial:
        raise ConfigError(
            f"trainer.fast_dev_run is {trial}, but a range is searched in --steps; leave it out"
        )
    if ckpt_path is not None:
        raise ConfigError(
            f"ckpt_path is {ckpt_path}, but lr-find begins with new weights; leave it out"
        )
    if not 0 < min_lr < max_lr < math.inf:
        raise ConfigError(
            f"min_lr is {min_lr} and max_lr {max_lr}, but 0 < min_lr < max_lr must hold"
        )
    if steps < FEWEST_STEPS:
        raise ConfigError(f"steps is {steps}, but must be at least {FEWEST_STEPS}")


class RangeSweep(Callback):
    """Sets the rate of each step, notes the loss, and ends training when the loss goes off."""

    def __init__(self, min_lr: float, max_lr: float, steps: int) -> None:
        self.min_lr, self.max_lr, self.steps = min_lr, max_lr, steps
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.went_off = False
        self._mean = self._weight = 0.0
        self._lowest = math.inf

    def rate(self, step: int) -> float:
        """Of a step, counted from 0."""
        return float(self.min_lr * (self.max_lr / self.min_lr) ** (step / (self.steps - 1)))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        pl_module.schedule = self.rate

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == len(self.losses):
            return  # inside an accumulated step
        # The loss of a step is that of the weights before it: the rates before brought it about.
        self.rates.append(self.rate(trainer.global_step - 1))
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        self.went_off = self._is_off(self.losses[-1])
        if self.went_off:
            trainer.should_stop = True

    def _is_off(self, loss: float) -> bool:
        self._mean = 0.9 * self._mean + 0.1 * loss
        self._weight = 0.9 * self._weight + 0.1
        smoothed = self._mean / self._weight
        self._lowest = min(self._lowest, smoothed)
        return not smoothed <= DIVERGED * self._lowest


@dataclass(frozen=True)
class RangeTest:
    """What the test found.

    Attributes:
        rates: (N,) of each step that was run.
        losses: (N,) nats per token.
        steps: asked for.
        went_off: whether the test ended because the loss did.
    """

    rates: np.ndarray
    losses: np.ndarray
    steps: int
    went_off: bool

    @property
    def smoothed(self) -> np.ndarray:
        """(N,) losses under a bell some steps wide, which unlike a running mean does not lag.

        From the first loss that is no number on it is NaN.
        """
        good = int(np.argmin(np.isfinite([*self.losses, math.nan])))
        index = np.arange(good)
        width = max(1.0, self.steps / 50)
        bell = np.exp(-0.5 * ((index[:, None] - index) / width) ** 2)
        found = np.full(len(self.losses), math.nan)
        found[:good] = bell @ self.losses[:good] / bell.sum(1)
        return found

    @property
    def lowest(self) -> int | None:
        """The step of the lowest smoothed loss; None if the loss never fell."""
        smoothed = self.smoothed
        if not np.isfinite(smoothed[:1]).all():
            return None
        at = int(np.nanargmin(smoothed))
        return at if smoothed[at] < (1 - A_FALL) * smoothed[0] else None

    @property
    def steepest(self) -> int | None:
        """The step at which the smoothed loss falls fastest per factor in the rate."""
        if self.lowest is None:
            return None
        return int(np.argmin(self._slope[: self.lowest + 1]))

    @property
    def _slope(self) -> np.ndarray:
        """(N,) of the smoothed loss, per factor e in the rate."""
        return np.asarray(np.gradient(self.smoothed, np.log(self.rates)))

    @property
    def suggestion(self) -> float:
        """Two digits of the rate at the steepest fall.

        Raises:
            ConfigError: the range does not show one; says how to change it.
        """
        first, last = self.rates[0], self.rates[-1]
        if self.steepest is None:
            raise ConfigError(
                f"the loss did not fall between the rates {first:.1e} and {last:.1e}"
                + (
                    ", it only went off; give a smaller --min_lr"
                    if self.went_off
                    else "; give a larger --max_lr or more --steps"
                )
            )
        if not self.went_off and self._slope[-1] < 0.25 * self._slope[self.steepest]:
            raise ConfigError(
                f"the loss is still falling at the rate {last:.1e}, so that a better one may lie "
                "beyond; give a larger --max_lr"
            )
        return float(f"{self.rates[self.steepest]:.1e}")

    def report(self, run: RunFolder, fit: Sequence[str]) -> None:
        """Write `lr-find.csv` and `lr-find.png` into the run's folder, and say what was found.

        Args:
            run: nothing else in its folder is touched.
            fit: command and arguments that the suggested rate is to be added to.

        Raises:
            ConfigError: the range does not show a rate to suggest. The files are written anyway.
        """
        plot = run.path / "lr-find.png"
        self.write_csv(run.path / "lr-find.csv")
        self.write_png(plot, f"Learning-rate range test: {run.name}")
        say(f"plot: {plot} (its numbers: {run.path / 'lr-find.csv'})")
        rate = self.suggestion
        assert self.lowest is not None
        lowest = self.rates[self.lowest]
        say(
            f"model.optimizer.lr {rate:.1e}: there the loss falls fastest "
            f"(Smith, arXiv 1506.01186)\n"
            f"lowest loss at {lowest:.1e}; a tenth of that, the other usual choice, is "
            f"{lowest / 10:.1e}; the best is often between the two\n"
            f"use it: {fit[0]} {shlex.join([*fit[1:], '--model.optimizer.lr', f'{rate:.1e}'])}"
        )

    def write_csv(self, path: Path) -> None:
        """Columns step, lr, loss, smoothed."""
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(["step", "lr", "loss", "smoothed"])
        columns = zip(
            self.rates.tolist(), self.losses.tolist(), self.smoothed.tolist(), strict=True
        )
        for step, row in enumerate(columns, 1):
            writer.writerow([step, *(f"{x:.6g}" for x in row)])
        write_atomically(path, text.getvalue().encode())

    def write_png(self, path: Path, title: str) -> None:
        """The losses over the rates, and what is suggested."""
        # Slow to import, and of use here alone. Without pyplot there is no window system to ask.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        smoothed = self.smoothed
        axes.plot(self.rates, self.losses, ".", color="0.7", markersize=4, label="loss of a step")
        axes.plot(self.rates, smoothed, color="tab:blue", label="smoothed")
        for at, label, colour in (
            (self.steepest, "steepest fall (suggested)", "tab:red"),
            (self.lowest, "lowest", "tab:green"),
        ):
            if at is not None:
                text = f"{label}: {self.rates[at]:.1e}"
                axes.axvline(self.rates[at], color=colour, linestyle=":", linewidth=1)
                axes.plot(self.rates[at], smoothed[at], "o", color=colour, label=text)
        axes.set_xscale("log")
        axes.set_xlabel("learning rate (model.optimizer.lr)")
        axes.set_ylabel("training loss, nats per token")
        seen = smoothed[np.isfinite(smoothed)]
        if len(seen):
            room = 0.1 * (seen.max() - seen.min()) + 0.05
            axes.set_ylim(seen.min() - room, min(seen.max(), seen[0] + seen[0] - seen.min()) + room)
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend()
        data = io.BytesIO()
        figure.savefig(data, format="png")
        write_atomically(path, data.getvalue())


def fit_arguments(argv: Sequence[str]) -> list[str]:
    """The arguments of `fit` that train as those of `lr-find` tested, but for the rate."""
    own = ("--min_lr", "--max_lr", "--steps", "--model.optimizer.lr")
    kept = []
    skip = False
    for argument in argv:
        flag, equals, _ = argument.partition("=")
        if skip:
            skip = False
        elif flag in own:
            skip = not equals
        elif argument != "lr-find":
            kept.append(argument)
    return ["fit", *kept]
