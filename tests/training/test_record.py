from __future__ import annotations

import json

import pytest
from lightning.pytorch.callbacks import Callback

from gpt.training import record
from gpt.training.callbacks import FinalValidation
from gpt.training.checkpoints import RunCheckpoints
from gpt.training.early_stopping import StopEarly
from gpt.training.record import RunRecord
from gpt.training.run import RunFolder
from tests.training.small import fit, make_module


class Fails(Callback):
    def __init__(self, error):
        self.error = error

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            raise self.error


def read(run):
    return json.loads((run.path / "run.json").read_text())


@pytest.fixture
def undrawn(monkeypatch):
    """Drawing takes a second, and is tried elsewhere."""
    monkeypatch.setattr(record, "write_report", lambda folder: folder)


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path, "one")
    run.create()
    run.metrics.write_text("step,train/loss\n1,5\n")
    return run


def test_a_run_s_facts_are_kept_and_its_page_is_made_at_the_end(tmp_path, corpus, run, capsys):
    module = fit(tmp_path, corpus, 4, [RunRecord(run)], accumulate_grad_batches=2)
    found = read(run)
    assert found["parameters"] == module.gpt.num_params()
    assert found["batch_tokens"] == 2 * 4 * 16
    assert found["train_tokens"] == len(module.data.prepared.train)
    assert {"torch", "Python", "processor", "threads", "precision"} <= set(found["environment"])
    [sitting] = found["sittings"]
    assert (sitting["from_step"], sitting["to_step"], sitting["state"]) == (0, 4, "finished")
    assert sitting["seconds"] > 0
    assert (run.path / "report.html").is_file()
    assert (run.path / "loss.png").is_file()
    assert f"report: {run.path / 'report.html'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "state"),
    [(RuntimeError("it burns\nhere"), "failed: it burns here"), (KeyboardInterrupt(), "interrupt")],
)
def test_a_run_that_ends_badly_has_a_page_as_well(tmp_path, corpus, run, error, state):
    with pytest.raises((RuntimeError, SystemExit)):
        fit(tmp_path, corpus, 6, [RunRecord(run), Fails(error)])
    assert read(run)["sittings"][-1]["state"].startswith(state)
    assert read(run)["sittings"][-1]["to_step"] == 3
    assert (run.path / "report.html").is_file()


def test_a_resumed_run_adds_a_sitting_and_a_new_one_begins_again(tmp_path, corpus, run, undrawn):
    def parts():
        return [FinalValidation(), RunRecord(run), RunCheckpoints(run)]

    fit(tmp_path, corpus, 2, parts())
    fit(tmp_path, corpus, 4, parts(), ckpt_path=run.last)
    steps = [(each["from_step"], each["to_step"]) for each in read(run)["sittings"]]
    assert steps == [(0, 2), (2, 4)]
    fit(tmp_path, corpus, 2, parts())
    assert len(read(run)["sittings"]) == 1


def test_a_failure_to_draw_is_one_line_and_costs_nothing(
    tmp_path, corpus, run, monkeypatch, capsys
):
    def broken(folder):
        raise ValueError("no pencil\nand more")

    monkeypatch.setattr(record, "write_report", broken)
    module = fit(tmp_path, corpus, 2, [RunRecord(run)])
    assert module.trainer.global_step == 2
    assert "no report: no pencil\n" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_costs_no_run(tmp_path, corpus, run, undrawn, capsys):
    (run.path / "run.json").mkdir()
    module = fit(tmp_path, corpus, 2, [RunRecord(run)])
    assert module.trainer.global_step == 2
    assert "cannot write run.json" in capsys.readouterr().err


def test_a_trial_run_leaves_nothing(tmp_path, corpus, run):
    fit(tmp_path, corpus, 2, [RunRecord(run)], fast_dev_run=1)
    assert not (run.path / "run.json").exists()


def test_the_record_says_why_a_run_was_ended_early(tmp_path, corpus, run, undrawn):
    module = make_module(optimizer={"lr": 1e-12})
    stop = StopEarly(patience=1, min_delta=1.0)
    fit(tmp_path, corpus, 20, [stop, RunRecord(run)], module=module, val_check_interval=2)
    assert read(run)["sittings"][-1]["state"].startswith("stopped early: val/loss has not become")
