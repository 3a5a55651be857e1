from __future__ import annotations

import csv

import pytest

from gpt.training.loggers import MetricsCSV, WandbRunId, wandb_mode
from gpt.training.throughput import Throughput
from tests.training.small import fit


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_there_as_soon_as_they_are_logged_and_count_steps_done(tmp_path):
    log = MetricsCSV(tmp_path / "run" / "metrics.csv")
    log.log_metrics({"train/loss": 2.5, "epoch": 0}, step=9)
    assert rows(log.path) == [{"step": "10", "train/loss": "2.5"}]
    log.log_metrics({"train/loss": 2.0}, step=19)
    assert [row["step"] for row in rows(log.path)] == ["10", "20"]


def test_a_new_metric_adds_a_column_and_keeps_the_rows(tmp_path):
    log = MetricsCSV(tmp_path / "metrics.csv")
    log.log_metrics({"train/loss": 2.5}, step=0)
    log.log_metrics({"val/loss": 2.25}, step=0)
    log.log_metrics({"train/loss": 2.0}, step=1)
    assert rows(log.path) == [
        {"step": "1", "train/loss": "2.5", "val/loss": ""},
        {"step": "1", "train/loss": "", "val/loss": "2.25"},
        {"step": "2", "train/loss": "2.0", "val/loss": ""},
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_new_run_replaces_the_file_and_a_resumed_one_goes_on_in_it(tmp_path):
    path = tmp_path / "metrics.csv"
    for step in range(4):
        MetricsCSV(path, keep=step).log_metrics({"a": step}, step=step)
    with open(path, "a") as file:
        file.write("9")  # what a crash may leave
    again = MetricsCSV(path, keep=2)
    again.log_metrics({"a": 20}, step=2)
    again.log_metrics({"b": 30}, step=3)
    assert [(row["step"], row["a"], row["b"]) for row in rows(path)] == [
        ("1", "0.0", ""), ("2", "1.0", ""), ("3", "20.0", ""), ("4", "", "30.0"),
    ]  # fmt: skip
    MetricsCSV(path).log_metrics({"a": 1}, step=0)
    assert rows(path) == [{"step": "1", "a": "1.0"}]


@pytest.mark.parametrize(
    ("wanted", "environment", "login", "mode"),
    [
        ("auto", {}, False, None),
        ("auto", {}, True, "online"),
        ("auto", {"WANDB_API_KEY": "k"}, False, "online"),
        ("auto", {"WANDB_MODE": "offline"}, False, "offline"),
        ("auto", {"WANDB_MODE": "offline", "WANDB_API_KEY": "k"}, True, "offline"),
        ("auto", {"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, True, None),
        ("auto", {"WANDB_BASE_URL": "https://wandb.example.org"}, True, None),
        ("on", {}, False, "offline"),
        ("on", {}, True, "online"),
        ("on", {"WANDB_API_KEY": "k"}, False, "online"),
        ("off", {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, True, None),
    ],
)
def test_wandb_is_used_where_it_is_set_up(tmp_path, monkeypatch, wanted, environment, login, mode):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if login:
        (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password k\n")
    assert wandb_mode(wanted) == mode


def test_the_run_id_is_taken_from_the_checkpoint():
    callback = WandbRunId("abcd1234")
    checkpoint = {"callbacks": {callback.state_key: callback.state_dict()}}
    assert WandbRunId.of(checkpoint) == "abcd1234"
    assert len({WandbRunId.of(None), WandbRunId.of({}), WandbRunId.of({"callbacks": {}})}) == 3


def test_a_step_of_several_parts_has_one_row(tmp_path, corpus):
    """With all that is known of it; what only part of a step is done for is logged when it ends."""
    metrics = MetricsCSV(tmp_path / "metrics.csv")
    fit(tmp_path, corpus, 3, [Throughput()], logger=[metrics], accumulate_grad_batches=2,
        limit_val_batches=0)  # fmt: skip
    found = rows(metrics.path)
    assert [row["step"] for row in found] == ["1", "2", "3"]
    assert all(row["train/loss"] and row["lr"] and row["tokens_per_s"] for row in found)
