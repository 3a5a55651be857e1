"""Looks inside the model now and then while it trains, and says when something is unwell.

What is measured is in `gpt.diagnosis`, what it means in `gpt.training.symptoms`.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from gpt.data.batches import Tokens
from gpt.diagnosis import gradient_norms, measure
from gpt.errors import ConfigError
from gpt.files import write_atomically
from gpt.training.checkpoints import is_trial
from gpt.training.module import GPTModule
from gpt.training.progress import say
from gpt.training.symptoms import Setting, Snapshot, Symptoms
from gpt.training.throughput import is_logging_step


class Diagnosis(Callback):
    """Measures attention, activations and gradients, and warns with the setting that helps.

    A probe is one more forward over a few sequences of the batch that was just trained on, and the
    norms of that step's gradients before clipping. Training is the same with and without it.
    Summaries by layer go to the loggers as `diag/L00/…`, numbers by head to `diagnosis.jsonl`.

    Args:
        every_n_steps: how often, counted up to the next logging step; null: never.
        sequences: how many of the batch are looked at.
    """

    def __init__(self, every_n_steps: int | None = 100, sequences: int = 2) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("sequences", sequences)):
            if value is not None and value < 1:
                or_null = " or null" if name == "every_n_steps" else ""
                raise ConfigError(f"diagnosis.{name} is {value}, but must be at least 1{or_null}")
        self.every_n_steps = every_n_steps
        self.sequences = sequences
        self.path: Path | None = None
        """Where the record goes; the trainer's command line gives it."""
        self.symptoms: Symptoms | None = None
        self._losses: list[float] = []
        self._gradients: dict[str, float] | None = None
        self._resumed = self._file_begun = False

    def is_due(self, step: int, log_every: int) -> bool:
        """Whether the step that brings their number to `step` is the first logging step since a
        multiple of `every_n_steps`."""
        log_every = max(1, log_every)
        every = self.every_n_steps
        return every is not None and step % log_every == 0 and step % every < log_every

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        if is_trial(trainer):
            return
        self._losses.clear()
        self._resumed = trainer.global_step > 0
        if self.path is not None and trainer.is_global_zero and not self._resumed:
            with contextlib.suppress(OSError):  # what is wrong is said when a line is to be written
                self.path.unlink()  # of an earlier run in this folder
        if self.every_n_steps is None:
            return
        self.symptoms = Symptoms(
            Setting(
                pl_module.config,
                pl_module.optimizer_config,
                frequency_entropy(pl_module.data.prepared.train),
            )
        )

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        assert isinstance(pl_module, GPTModule)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.symptoms is not None and self.is_due(trainer.global_step + 1, every):
            self._gradients = gradient_norms(pl_module.gpt)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> None:
        if self.symptoms is None:
            return
        assert isinstance(pl_module, GPTModule)
        # Reading the loss waits for the device, which logging steps do anyway.
        step_done = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if step_done and is_logging_step(trainer) and "train/loss" in trainer.callback_metrics:
            self._losses.append(float(trainer.callback_metrics["train/loss"]))
        if self._gradients is not None:
            self._diagnose(trainer, pl_module, batch[0][: self.sequences])

    def _diagnose(self, trainer: L.Trainer, module: GPTModule, ids: Tensor) -> None:
        assert self.symptoms is not None
        assert self._gradients is not None
        began = time.perf_counter()

        def forward() -> None:
            with trainer.precision_plugin.forward_context():
                module(ids)

        # Every process takes part: where parameters are shared out, none can run them alone.
        layers = measure(module.gpt, forward)
        loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
        seen = Snapshot(trainer.global_step, loss, self._gradients, layers)
        self._gradients = None
        self._losses.clear()
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            # Not through `log`, which would repeat the values at every later logging step.
            logger.log_metrics(summary(seen), step=seen.step - 1)
        warnings = self.symptoms.look(seen)
        for _, text in warnings:
            say(f"diagnosis at step {seen.step}: {text}")
        if self.path is not None:
            self._record(seen, warnings, time.perf_counter() - began)

    # --- The record ------------------------------------------------------------------------------

    def _record(self, seen: Snapshot, warnings: list[tuple[str, str]], seconds: float) -> None:
        """Add a line to the file. A full disk loses the record, not the run."""
        assert self.path is not None
        line = {
            "step": seen.step,
            "loss": seen.loss,
            "gradients": seen.gradients,
            "layers": [asdict(layer) for layer in seen.layers],
            "warnings": [{"kind": kind, "text": text} for kind, text in warnings],
            "seconds": round(seconds, 4),
        }
        try:
            if not self._file_begun:
                write_atomically(self.path, self._earlier_lines(seen.step))
                self._file_begun = True
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(_plain(line)) + "\n")
        except OSError as error:
            say(f"cannot write {self.path}: {error.strerror or error}; no more diagnosis is kept")
            self.path = None

    def _earlier_lines(self, before: int) -> bytes:
        """What the run that this one continues has left, up to where this one is now."""
        assert self.path is not None
        if not self._resumed or not self.path.is_file():
            return b""
        kept = []
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                if json.loads(line)["step"] < before and line.endswith(b"\n"):
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # cut short by a crash
        return b"".join(kept)


def frequency_entropy(tokens: Tokens, most: int = 1_000_000, pieces: int = 50) -> float:
    """Nats per token of a model that knows how frequent the tokens are and nothing else.

    Args:
        tokens: the training text; of a long one, `pieces` that lie evenly over it are counted.
        most: tokens to count.
    """
    n = len(tokens)
    size = n if n <= most else most // pieces
    starts = range(0, n, n // pieces) if n > most else [0]
    ids = np.concatenate([np.asarray(tokens[at : at + size]) for at in starts])
    counts = np.bincount(ids.astype(np.int64))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def summary(seen: Snapshot) -> dict[str, float]:
    """What goes to the loggers: by layer, and over heads the extremes that say something."""
    found = {"diag/grad_norm": seen.gradients.get("total", math.nan)}
    for i, layer in enumerate(seen.layers):
        shares = layer.entropy_share
        values: dict[str, float | None] = {
            "entropy_min": min(shares),
            "entropy_mean": sum(shares) / len(shares),
            "entropy_max": max(shares),
            "logit_max": max(layer.logit_max),
            "head_rms_min": min(layer.head_rms),
            "attn_rms": layer.attn_rms,
            "mlp_rms": layer.mlp_rms,
            "stream_rms": layer.stream_rms,
            "dead_units": layer.dead_units,
            "grad_norm": seen.gradients.get(str(i)),
        }
        found |= {f"diag/L{i:02}/{name}": x for name, x in values.items() if x is not None}
    return found


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity, and six digits are plenty."""
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_plain(x) for x in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
