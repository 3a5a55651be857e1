from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import Callback

from gpt.training.hooks import STEP_HOOKS, skip_empty_hooks
from gpt.training.throughput import Throughput
from tests.training.small import fit, make_module


class Counts(Callback):
    """Counts the hooks that it has, and stands for a callback whose class inherits one."""

    def __init__(self):
        self.calls = []

    def on_train_batch_end(self, *_):
        self.calls.append("end")


class Inherits(Counts):
    def on_before_zero_grad(self, *_):
        self.calls.append("zero")


class Skips(Callback):
    """Takes the empty hooks away before the first step, as the command line does."""

    def setup(self, trainer, pl_module, stage):
        skip_empty_hooks(trainer.callbacks, pl_module)


def test_hooks_that_do_something_are_called_and_empty_ones_are_gone(tmp_path, corpus):
    counts, throughput = Inherits(), Throughput()
    module = fit(tmp_path, corpus, 2, [Skips(), counts, throughput])
    assert counts.calls == ["zero", "end"] * 2
    assert counts.on_before_backward is None
    assert counts.on_train_batch_start is None
    assert throughput.on_train_batch_start is not None
    assert float(module.trainer.callback_metrics["tokens_per_s"]) > 0
    assert module.on_before_optimizer_step is not None
    assert module.on_after_backward is None


def test_training_is_the_same_without_empty_hooks(tmp_path, corpus):
    losses = [
        float(fit(tmp_path, corpus, 3, callbacks, module=make_module(dropout=0.2))
              .trainer.callback_metrics["train/loss"])
        for callbacks in ([], [Skips()])
    ]  # fmt: skip
    assert losses[0] == losses[1]


def test_lightning_has_the_hooks_by_these_names():
    for name in STEP_HOOKS:
        assert callable(getattr(Callback, name))
        assert callable(getattr(L.LightningModule, name))
