"""`python train.py …` as a user runs it: processes, files, exit statuses."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gpt.checkpoint import load_model
from tests import warm
from tests.training.small import write_corpus

ROOT = Path(__file__).resolve().parents[2]
TRAIN = [sys.executable, str(ROOT / "train.py")]
CONFIG = """\
data: {source: text.txt, tokenizer: bytes, batch_size: 4}
model:
  preset: nano
  config: {n_layer: 1, d_model: 16, block_size: 32}
trainer: {max_steps: 4, val_check_interval: 2, log_every_n_steps: 1, accelerator: cpu}
samples: {max_tokens: 4}
"""

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "text.txt")
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return tmp_path


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    nothing = {"NETRC": os.devnull, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return {**kept, **nothing}


def run(folder: Path, command: list[str]) -> str:
    """What a command prints; its stdin is closed, so that whoever asks gets an error."""
    done = warm.run(command, cwd=folder, env=environment(), text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def losses(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv without their throughput."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k not in ("tokens_per_s", "mfu")} for row in rows]


SEVERAL = """\
import sys
from gpt.training.cli import main
for line in sys.argv[1:]:
    print("$", line, flush=True)
    assert main(line.split()) == 0
print("wandb imported:", "wandb" in sys.modules)
"""


def run_several(folder: Path, *lines: str) -> list[str]:
    """What each command line prints, all in one process: most of a short run is importing."""
    return run(folder, [sys.executable, "-c", SEVERAL, *lines]).split("$ ")[1:]


def steps_logged(folder: Path) -> list[int]:
    with open(folder / "metrics.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["train/loss"]]


def test_a_run_can_be_made_measured_made_again_and_gone_on_with(folder: Path) -> None:
    made, repeated, *_, measured, otherwise, resumed = run_several(
        folder,
        "fit --config tiny.yaml",
        # The config that the run left repeats it, elsewhere and in its own folder.
        "fit --config runs/tiny/config.yaml --name again",
        "fit --config runs/tiny/config.yaml",
        "test --config tiny.yaml",
        "validate --config tiny.yaml --data.eval_batch_size 3 --ckpt_path best",
        "fit --config tiny.yaml --ckpt_path last --trainer.max_steps 6",
    )
    tiny, again = folder / "runs" / "tiny", folder / "runs" / "again"
    names = {"checkpoints", "config.yaml", "metrics.csv", "model", "samples.txt"}
    assert {path.name for path in tiny.iterdir()} >= names
    assert {path.name for path in again.iterdir()} == {path.name for path in tiny.iterdir()}
    assert not list(tiny.rglob(".*"))  # nothing half written
    assert sorted(p.name for p in (tiny / "checkpoints").iterdir()) == [
        "best.ckpt", "last.ckpt", "previous.ckpt",
    ]  # fmt: skip
    assert "antiphon sample runs/tiny/model --prompt" in made
    assert "antiphon sample runs/again/model --prompt" in repeated
    assert load_model(tiny / "model").name == "tiny"

    assert steps_logged(again) == [1, 2, 3, 4]
    assert (again / "samples.txt").read_text().count("--- step") == 2
    bits = re.search(r"bits per byte +(\d+\.\d+)", measured)
    assert bits is not None
    assert 0 < float(bits[1]) < 9
    assert otherwise.splitlines()[1:] == measured.splitlines()[1:]

    assert "resuming from runs/tiny/checkpoints/last.ckpt at step 4, 2 steps left" in resumed
    assert torch.load(tiny / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 6
    assert steps_logged(tiny) == [1, 2, 3, 4, 5, 6]
    assert losses(tiny)[: len(losses(again))] == losses(again)
    assert (tiny / "samples.txt").read_text().count("--- step") == 3
    # Nobody asked for wandb, and this machine is not set up for it.
    assert "wandb imported: False" in resumed


def test_wandb_without_a_key_records_offline_and_a_resumed_run_keeps_its_id(folder: Path) -> None:
    fit = "fit --config tiny.yaml --wandb on"
    _, out = run_several(folder, fit, f"{fit} --resume --trainer.max_steps 5")
    assert "wandb imported: True" in out
    runs = sorted((folder / "runs" / "tiny" / "wandb").glob("offline-run-*"))
    assert len({path.name.rpartition("-")[2] for path in runs}) == 1, runs
    assert any(path.suffix == ".wandb" for path in runs[0].iterdir())
    assert not (folder / "wandb").exists()


def test_ctrl_c_saves_and_says_how_to_go_on(folder: Path) -> None:
    command = [*TRAIN, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "1000000",
               "--trainer.val_check_interval", "1000000"]  # fmt: skip
    metrics = folder / "runs" / "tiny" / "metrics.csv"
    process = warm.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        while not metrics.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    saved = torch.load(folder / "runs/tiny/checkpoints/last.ckpt", weights_only=True)
    assert f"stopped at step {saved['global_step']}; saved runs/tiny/checkpoints/last.ckpt" in out
    assert "train.py fit --config runs/tiny/config.yaml --resume\n" in out
    assert "try it: antiphon sample runs/tiny/checkpoints/last.ckpt" in out
