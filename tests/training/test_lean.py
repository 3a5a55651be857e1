from __future__ import annotations

import inspect

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import SimpleProfiler

from gpt.training.cli import main
from gpt.training.lean import STEP_HOOKS, NoProfiler, skip_empty_hooks
from gpt.training.lean_loop import LeanTrainer
from gpt.training.module import GPTModule
from gpt.training.throughput import Throughput
from tests.training.small import fit, make_data, make_module


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


class AsLightningHasIt(Callback):
    """Compares what the lean trainer says at every hook with what Lightning's own would."""

    def __init__(self):
        self.seen = set()

    def _compare(self, trainer):
        for name in ("training", "global_step"):
            ours, theirs = (getattr(kind, name).fget(trainer) for kind in (LeanTrainer, L.Trainer))
            assert ours == theirs
            self.seen.add((name, ours))

    def on_train_batch_start(self, trainer, *_):
        self._compare(trainer)

    def on_before_optimizer_step(self, trainer, *_):
        self._compare(trainer)

    def on_train_batch_end(self, trainer, *_):
        self._compare(trainer)

    def on_validation_batch_start(self, trainer, *_):
        self._compare(trainer)

    def on_test_batch_start(self, trainer, *_):
        self._compare(trainer)


def test_the_lean_trainer_says_what_lightning_says(tmp_path, corpus):
    watch = AsLightningHasIt()
    trainer = LeanTrainer(
        accelerator="cpu", logger=False, max_steps=3, enable_progress_bar=False,
        default_root_dir=str(tmp_path), enable_checkpointing=False, callbacks=[watch],
        profiler=NoProfiler(), accumulate_grad_batches=2, val_check_interval=2,
        check_val_every_n_epoch=None, max_epochs=-1, enable_model_summary=False,
    )  # fmt: skip
    module, data = make_module(), make_data(corpus)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    assert {("training", True), ("training", False), ("global_step", 3)} <= watch.seen
    trainer.training = True
    assert trainer.training
    trainer.training = False
    assert not trainer.training


def test_a_profiler_that_is_asked_for_is_used(tmp_path, corpus):
    for profiler, kind in ((None, NoProfiler), ("simple", SimpleProfiler)):
        found = Kept()
        given = [] if profiler is None else [f"--trainer.profiler={profiler}"]
        status = main(
            ["fit", f"--data.source={corpus}", "--data.tokenizer=bytes",
             f"--data.root={tmp_path / 'data'}", f"--runs_dir={tmp_path}", "--wandb=off",
             "--model.config.n_layer=1", "--model.config.n_head=1", "--model.config.d_model=8",
             "--model.config.block_size=8", "--trainer.accelerator=cpu", "--trainer.max_steps=1",
             "--trainer.fast_dev_run=true", *given],
            callbacks=[found],
        )  # fmt: skip
        assert status == 0
        assert type(found.profiler) is kind


class Kept(Callback):
    profiler = None

    def on_train_start(self, trainer, pl_module):
        self.profiler = trainer.profiler


def test_the_signature_of_the_training_step_is_at_hand_and_right():
    step = make_module().training_step
    assert "__signature__" in vars(GPTModule.training_step)
    assert inspect.getfullargspec(step).args == ["self", "batch", "batch_idx"]


def test_a_module_sets_plain_attributes_at_once_and_knows_its_parameters_still():
    module = make_module()
    module.step_loss = torch.zeros(())
    assert "step_loss" in vars(module)
    module.extra = torch.nn.Linear(2, 2)
    assert {"extra.weight", "extra.bias"} <= {name for name, _ in module.named_parameters()}
