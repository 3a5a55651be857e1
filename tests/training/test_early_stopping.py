from __future__ import annotations

import pytest

from gpt.errors import ConfigError
from gpt.training.checkpoints import ExportModel, RunCheckpoints
from gpt.training.early_stopping import StopEarly
from gpt.training.run import RunFolder
from tests.training.small import fit, make_module

LOSSES = [5.0, 4.0, 4.1, 3.9, 4.0, 3.95, 3.91, 1.0]


def fit_with(losses, folder, corpus, steps, stop, **options):
    """Train a model whose validations come to the losses given."""
    module = make_module()
    script = iter(losses)
    module.on_validation_epoch_end = lambda: module.log("val/loss", next(script))
    fit(folder, corpus, steps, [stop], module=module, val_check_interval=2, **options)
    return module.trainer


def test_it_is_off_unless_asked_for(tmp_path, corpus):
    assert fit_with(LOSSES, tmp_path, corpus, 16, StopEarly()).global_step == 16


def test_a_run_ends_after_so_many_validations_without_a_lower_loss(tmp_path, corpus, capsys):
    stop = StopEarly(patience=3)
    assert fit_with(LOSSES, tmp_path, corpus, 16, stop).global_step == 14
    assert "lowest: 3.9000 at step 8" in stop.reason
    assert f"stopped early at step 14: {stop.reason}" in capsys.readouterr().out


def test_a_loss_that_is_hardly_lower_does_not_count(tmp_path, corpus):
    stop = StopEarly(patience=2, min_delta=0.5)
    assert fit_with(LOSSES, tmp_path, corpus, 16, stop).global_step == 8
    assert "by more than 0.5 in 2 validations" in stop.reason


def test_the_count_goes_on_after_a_resume_with_the_patience_given_then(tmp_path, corpus):
    first, later = StopEarly(patience=3), StopEarly(patience=2)
    fit_with(LOSSES, tmp_path, corpus, 10, first).save_checkpoint(tmp_path / "at10.ckpt")
    assert first.reason is None
    trainer = fit_with(LOSSES[5:], tmp_path, corpus, 16, later, ckpt_path=tmp_path / "at10.ckpt")
    assert trainer.global_step == 12
    assert "in 2 validations (lowest: 3.9000 at step 8)" in later.reason


def test_the_best_model_is_exported(tmp_path, corpus, capsys):
    run = RunFolder(tmp_path / "runs", "one")
    checkpoints = RunCheckpoints(run)
    module = make_module(optimizer={"lr": 3.0, "warmup_steps": 0})  # which does harm soon
    parts = [StopEarly(patience=2), ExportModel(run, checkpoints), checkpoints]
    fit(tmp_path, corpus, 200, parts, module=module, val_check_interval=2)
    assert module.trainer.global_step < 200
    assert f"model (step {checkpoints.best_step}, " in capsys.readouterr().out
    assert checkpoints.best_step < module.trainer.global_step


def test_settings_that_cannot_work_are_refused(tmp_path, corpus):
    with pytest.raises(ConfigError, match=r"early_stopping.patience is 0"):
        StopEarly(patience=0)
    with pytest.raises(ConfigError, match=r"early_stopping.min_delta is nan"):
        StopEarly(patience=1, min_delta=float("nan"))
    with pytest.raises(ConfigError, match="nothing to judge by"):
        fit(tmp_path, corpus, 2, [StopEarly(patience=1)], limit_val_batches=0)
