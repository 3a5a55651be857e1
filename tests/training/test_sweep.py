"""A sweep: which runs it is made of, what it makes of them, and that it can be stopped."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpt.errors import ConfigError
from gpt.training.cli import main as fit_main
from gpt.training.grid import (
    Member,
    Result,
    as_csv,
    as_table,
    members,
    parse_setting,
    result_of,
)
from gpt.training.module import GPTModule
from gpt.training.sweep import main
from tests import warm
from tests.training.small import write_corpus

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model.optimizer.lr=1e-3,3e-3", ("model.optimizer.lr", ["1e-3", "3e-3"])),
        ("--model.optimizer.betas=[0.9, 0.95],[0.8, 0.9]",
         ("model.optimizer.betas", ["[0.9, 0.95]", "[0.8, 0.9]"])),
        ("data.source=a=b.txt", ("data.source", ["a=b.txt"])),
    ],
)  # fmt: skip
def test_a_setting_is_a_name_and_values(text, expected):
    assert parse_setting(text) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model.optimizer.lr", "is no setting with values"), ("=1", "is no setting"),
        ("a.b=1,,2", "is no setting"), ("a.b=1,1", "gives a value twice"),
        ("seed_everything=1,2", "--seeds says how many"), ("name=x", "by the sweep itself"),
    ],
)  # fmt: skip
def test_what_is_no_setting_is_refused(text, told):
    with pytest.raises(ConfigError, match=told):
        parse_setting(text)


@given(
    values=st.lists(st.lists(st.text(min_size=1), min_size=1, max_size=3, unique=True), max_size=3),
    seeds=st.integers(1, 3),
)
def test_every_combination_is_there_once_under_a_name_that_is_a_folders(values, seeds):
    settings = [(f"a.s{i}", each) for i, each in enumerate(values)]
    runs = members(settings, range(seeds))
    assert len(runs) == len({run.name for run in runs}) == len(set(runs))
    count = seeds
    for each in values:
        count *= len(each)
    assert len(runs) == count
    assert all(not set(run.name) & set("/\\\0\n ") and len(run.name) < 100 for run in runs)


def test_a_setting_given_twice_is_refused():
    with pytest.raises(ConfigError, match=r"--set a\.b is given twice"):
        members([("a.b", ["1"]), ("a.b", ["2"])], [0])


def test_the_table_has_means_over_seeds_the_best_first_and_the_csv_every_run():
    def result(value: str, seed: int, loss: float, state: str = "finished") -> Result:
        return Result(Member((("a.lr", value),), seed), state, 5, loss, loss * 2, 10.0)

    results = [result("1", 0, 2.0), result("1", 1, 2.2), result("2", 0, 1.5),
               result("2", 1, 1.0, "interrupted")]  # fmt: skip
    header, best, second = as_table(results).split("\n")
    assert header.split() == ["a.lr", "seeds", "nats/token", "spread", "bits/byte", "seconds"]
    assert best.split() == ["2", "1/2", "1.5000", "-", "3.0000", "10"]
    assert second.split() == ["1", "2/2", "2.1000", "0.1414", "4.2000", "10"]
    rows = list(csv.DictReader(as_csv(results).decode().splitlines()))
    assert [(row["a.lr"], row["seed"], row["val_loss"]) for row in rows][:2] == [
        ("1", "0", "2"), ("1", "1", "2.2"),
    ]  # fmt: skip
    assert rows[3]["state"] == "interrupted"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    corpus = write_corpus(tmp_path / "text.txt")
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({
        "data": {"source": str(corpus), "tokenizer": "bytes", "batch_size": 2,
                 "root": str(tmp_path / "data")},
        "model": {"config": {"n_layer": 1, "n_head": 2, "d_model": 16, "block_size": 16}},
        "trainer": {"max_steps": 3, "accelerator": "cpu"}, "checkpoint": {"every_n_steps": 5},
        "samples": {"every_n_steps": None}, "tensorboard": False, "wandb": "off",
    }))  # fmt: skip
    return path


@pytest.mark.integration
def test_a_sweep_is_stopped_and_goes_on_and_repeats_nothing(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "runs" / "s"
    argv = [str(config), "--name", "s", "--runs_dir", str(tmp_path / "runs")]
    both = [*argv, "--set", "trainer.max_steps=3,1000000"]
    process = warm.Popen(
        [sys.executable, "-m", "gpt", "sweep", *both], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    long = members([("trainer.max_steps", ["1000000"])], [1337])[0].name
    began = time.monotonic()
    while not (folder / long / "checkpoints" / "last.ckpt").is_file():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() - began < 120
        time.sleep(0.1)
    with pytest.raises(ConfigError, match="is at work already"):
        main(both, "antiphon sweep")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "[1/2] max_steps=3" in out
    rows = list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == ["finished", "interrupted"]
    steps = int(rows[1]["steps"])
    assert steps > 0
    assert not any(str(folder) in line for line in _commands()), "nothing is left running"

    before = (folder / "sweep.csv").read_text()
    assert main([*argv, "--set", "trainer.max_steps=3"], "antiphon sweep") == 0
    assert "1/1" in capsys.readouterr().out
    assert (folder / "sweep.csv").read_text().splitlines()[:2] == before.splitlines()[:2]
    assert main([*both, "--dry-run"], "antiphon sweep") == 0
    assert capsys.readouterr().out.splitlines()[1] == f"{long}: interrupted"

    config.write_text(config.read_text() + "# changed\n")
    with pytest.raises(ConfigError, match="as it was then; give another --name"):
        main(both, "antiphon sweep")


@pytest.mark.integration
def test_a_run_that_was_cut_in_the_middle_ends_as_it_would_have(config, tmp_path, monkeypatch):
    """Cut as by a power failure: what is on disk at its eighth step is all the sweep goes on from,
    a checkpoint of its fifth."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (run,) = members([("trainer.max_steps", ["12"])], [1337])
    whole, cut = tmp_path / "whole", tmp_path / "runs" / "cut"
    take_step = GPTModule.training_step

    def step(self: GPTModule, *given: Any) -> Any:
        if self.global_step == 7:
            shutil.copytree(whole, cut)
        return take_step(self, *given)

    monkeypatch.setattr(GPTModule, "training_step", step)
    given = ["--config", str(config), "--runs_dir", str(whole), "--name", run.name, *run.flags]
    assert fit_main(["fit", *given]) == 0
    monkeypatch.setattr(sys, "executable", warm.executable())
    again = [str(config), "--name", "cut", "--runs_dir", str(tmp_path / "runs")]
    assert main([*again, "--set", "trainer.max_steps=12"], "antiphon sweep") == 0
    log = (cut / "logs" / f"{run.name}.txt").read_text()
    assert "at step 5, 7 steps left" in log
    assert "not exact" not in log
    (row,) = csv.DictReader((cut / "sweep.csv").read_text().splitlines())
    (wanted,) = csv.DictReader(as_csv([result_of(whole, run)]).decode().splitlines())
    assert wanted["val_loss"]
    assert row | {"seconds": ""} == wanted | {"seconds": ""}


@pytest.mark.integration
def test_a_setting_that_fit_does_not_know_ends_the_sweep_at_once(config, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", warm.executable())
    argv = [str(config), "--name", "t", "--runs_dir", str(tmp_path / "runs"), "--seeds", "3"]
    with pytest.raises(ConfigError, match=r"did you mean --model\.optimizer\.lr\?"):
        main([*argv, "--set", "model.optimizer.lrr=1,2"], "antiphon sweep")


def _commands() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                found.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return found
