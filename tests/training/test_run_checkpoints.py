from __future__ import annotations

import json
import math
import signal
import zipfile

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from gpt.checkpoint import load_model
from gpt.errors import CheckpointError
from gpt.evaluation import Evaluation
from gpt.training.callbacks import FinalValidation, StopCleanly
from gpt.training.checkpoints import ExportModel, RunCheckpoints
from gpt.training.guard import DivergedError
from gpt.training.run import RunFolder
from gpt.training.storage import read_checkpoint
from tests.training.small import fit, make_module


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "runs", "a")


class ValidationLosses(Callback):
    """Puts a given loss in the place of each validation's, and notes when it was asked."""

    def __init__(self, losses):
        self.losses = list(losses)
        self.steps = []

    def on_validation_epoch_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)

    def on_validation_end(self, trainer, pl_module):
        pl_module.evaluation = Evaluation(self.losses.pop(0), targets=1, text_bytes=None)


def files(run):
    return sorted(path.name for path in run.best.parent.iterdir())


def step_of(path):
    return torch.load(path, weights_only=True)["global_step"]


def test_last_is_the_newest_and_best_has_the_lowest_loss(tmp_path, corpus, run):
    kept = RunCheckpoints(run)
    fit(tmp_path, corpus, 6, [ValidationLosses([3.0, 1.0, 2.0]), kept], val_check_interval=2)
    assert step_of(run.last) == 6
    assert step_of(run.best) == kept.best_step == 4
    assert kept.best_loss == 1.0
    assert files(run) == ["best.ckpt", "last.ckpt", "previous.ckpt"]


def test_a_second_run_in_the_folder_replaces_both_even_if_it_is_worse(tmp_path, corpus, run):
    for losses, best in (([1.0, 2.0], 2), ([5.0, 4.0], 4)):
        fit(tmp_path, corpus, 4, [ValidationLosses(losses), RunCheckpoints(run)],
            val_check_interval=2)  # fmt: skip
        assert step_of(run.best) == best
    assert files(run) == ["best.ckpt", "last.ckpt", "previous.ckpt"]


def test_a_resumed_run_remembers_its_best(tmp_path, corpus, run):
    fit(tmp_path, corpus, 2, [ValidationLosses([1.0]), RunCheckpoints(run)], val_check_interval=2)
    kept = RunCheckpoints(run)
    fit(tmp_path, corpus, 4, [ValidationLosses([2.0]), kept], ckpt_path=run.last,
        val_check_interval=2)  # fmt: skip
    assert (kept.best_step, kept.best_loss) == (2, 1.0)
    assert step_of(run.best) == 2
    assert step_of(run.last) == 4


def test_the_end_of_a_run_is_validated_and_saved_wherever_the_interval_falls(tmp_path, corpus, run):
    seen = ValidationLosses([3.0, 2.0])
    fit(tmp_path, corpus, 5, [FinalValidation(), seen, RunCheckpoints(run)], val_check_interval=3)
    assert seen.steps == [3, 5]
    assert step_of(run.last) == step_of(run.best) == 5


def test_the_end_is_validated_once_when_steps_have_parts(tmp_path, corpus):
    seen = ValidationLosses([3.0])
    fit(tmp_path, corpus, 3, [FinalValidation(), seen], accumulate_grad_batches=2)
    assert seen.steps == [3]


def test_without_validation_the_last_state_is_kept_and_exported(tmp_path, corpus, run):
    run.best.parent.mkdir(parents=True)
    run.best.write_bytes(b"of an earlier run")
    kept = RunCheckpoints(run)
    fit(tmp_path, corpus, 3, [kept, ExportModel(run, kept)], limit_val_batches=0)
    assert step_of(run.last) == 3
    assert not run.best.exists()
    assert load_model(run.model).training["steps"] == 3


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_run_that_diverged_stops_and_keeps_the_good_checkpoint(tmp_path, corpus, run, loss):
    callbacks = [ValidationLosses([1.0, loss]), RunCheckpoints(run)]
    with pytest.raises(DivergedError, match=rf"is {loss} at step 4.*{run.last}"):
        fit(tmp_path, corpus, 6, callbacks, val_check_interval=2)
    assert step_of(run.last) == step_of(run.best) == 2


def test_a_save_that_fails_harms_nothing(tmp_path, corpus, run, monkeypatch):
    kept = RunCheckpoints(run)
    module = fit(tmp_path, corpus, 2, [kept])
    kept.save(module.trainer)
    before = run.last.read_bytes()

    def full(path, *_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.trainer, "save_checkpoint", full)
    with pytest.raises(CheckpointError, match="No space left on device; the one before is unharm"):
        kept.save(module.trainer)
    assert run.last.read_bytes() == before
    assert files(run) == ["last.ckpt", "previous.ckpt"]


def test_the_exported_model_is_the_best_and_says_how_it_was_trained(tmp_path, corpus, run, capsys):
    kept = RunCheckpoints(run)
    fit(tmp_path, corpus, 4, [ValidationLosses([1.0, 2.0]), kept, ExportModel(run, kept)],
        val_check_interval=2)  # fmt: skip
    model = load_model(run.model)
    best = torch.load(run.best, weights_only=True)["state_dict"]
    for name, value in model.model.state_dict().items():
        assert torch.equal(value, best[f"gpt.{name}"]), name
    assert model.name == "a"
    assert model.tokenizer.kind == "bytes"
    training = json.loads((run.model / "config.json").read_text())["training"]
    told = {"steps": 2, "source": str(corpus), "batch_tokens": 64, "val_loss": 1.0}
    assert training.items() >= told.items()
    assert f"antiphon sample {run.model} --prompt" in capsys.readouterr().out


def test_a_trial_run_leaves_nothing_behind(tmp_path, corpus, run):
    kept = RunCheckpoints(run)
    fit(tmp_path, corpus, 2, [kept, ExportModel(run, kept)], fast_dev_run=True)
    assert not run.last.exists()
    assert not run.model.exists()


def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path):
    path = tmp_path / "x.ckpt"
    path.write_bytes(b"not a zip file")
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: give a \.ckpt file"):
        read_checkpoint(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/b", "of something else")
    with pytest.raises(CheckpointError, match="no readable checkpoint") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)
    torch.save({"weights": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="no state_dict"):
        read_checkpoint(path)


class CtrlC(Callback):
    """Presses Ctrl-C in the middle of some batches."""

    def __init__(self, *batches):
        self.batches = batches

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx in self.batches:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_saves_after_the_whole_step_and_the_run_goes_on_from_there(
    tmp_path, corpus, run
):
    kept = RunCheckpoints(run)
    stop = StopCleanly(kept)
    options = {"accumulate_grad_batches": 3}
    with pytest.raises(SystemExit):
        fit(tmp_path, corpus, 5, [CtrlC(4), stop, kept], **options)
    assert stop.saved
    assert step_of(run.last) == 2
    straight = fit(tmp_path, corpus, 5, **options)
    resumed = fit(tmp_path, corpus, 5, module=make_module(), ckpt_path=run.last, **options)
    assert all(map(torch.equal, straight.gpt.parameters(), resumed.gpt.parameters()))


def test_a_second_interrupt_ends_at_once(tmp_path, corpus, run):
    kept = RunCheckpoints(run)
    stop = StopCleanly(kept)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        fit(tmp_path, corpus, 9, [CtrlC(4, 5), stop, kept], accumulate_grad_batches=3)
    assert not stop.saved
    assert not run.last.exists()
    assert signal.getsignal(signal.SIGINT) is before
