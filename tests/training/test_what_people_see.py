"""One run of the command, and what it shows and leaves behind."""

from __future__ import annotations

import json

from gpt.training.cli import main


def train(folder, corpus, *more):
    return main(
        ["fit", f"--runs_dir={folder}", "--name=one", f"--data.source={corpus}",
         f"--data.root={folder / 'data'}", "--data.tokenizer=bytes", "--data.batch_size=2",
         "--model.preset=nano", "--model.config.block_size=16", "--model.config.n_layer=1",
         "--trainer.max_steps=20", "--trainer.val_check_interval=2", "--trainer.accelerator=cpu",
         "--trainer.log_every_n_steps=1", "--samples.max_tokens=3", "--wandb=off", *more]
    )  # fmt: skip


def test_a_run_says_what_it_needs_and_leaves_curves_and_a_page(tmp_path, corpus, capsys):
    assert (
        train(tmp_path, corpus, "--early_stopping.patience=1", "--early_stopping.min_delta=9") == 0
    )
    out = capsys.readouterr().out
    run = tmp_path / "one"
    assert "memory: about " in out
    assert "speed: mfu is the share of " in out
    assert "  tokens/s " in out
    assert "  mfu " in out
    assert "stopped early at step 4: val/loss has not become lower by more than 9" in out
    assert f"report: {run / 'report.html'}" in out
    assert "model (step " in out
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "stopped early" in page
    assert "patience: 1" in page  # the configuration
    assert "git commit" in page or "Python" in page
    columns = (run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"step", "train/loss", "lr", "tokens_per_s", "mfu", "val/loss", "val/bpb"} <= set(
        columns
    )
    [events] = (run / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"val/loss" in content
    assert b"sample/text_summary" in content
    sitting = json.loads((run / "run.json").read_text())["sittings"][0]
    assert sitting["to_step"] == 4
    assert (run / "loss.png").is_file()


def test_tensorboard_can_be_left_out(tmp_path, corpus):
    assert train(tmp_path, corpus, "--tensorboard=false", "--trainer.max_steps=2") == 0
    assert not (tmp_path / "one" / "tensorboard").exists()
    assert (tmp_path / "one" / "report.html").is_file()


def test_a_run_that_cannot_fit_is_warned_of(tmp_path, corpus, capsys, monkeypatch):
    from gpt.machine import Memory
    from gpt.training import memory

    monkeypatch.setattr(memory, "device_memory", lambda *_: Memory("a toy", 2**20, 2**21))
    assert train(tmp_path, corpus, "--trainer.max_steps=1") == 0
    err = capsys.readouterr().err
    assert "the run does not fit: a toy has 1 MiB of 2 MiB free; " in err
