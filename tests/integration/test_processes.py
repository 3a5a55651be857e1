"""Several processes train as one does: DDP and FSDP2 over gloo, with real processes."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt.training import cli
from tests import warm
from tests.training import several
from tests.training.small import write_corpus

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.integration


def found(folder: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"found-{rank}.json").read_text())


def train(folder: Path, corpus: Path, *arguments: str, processes: int = 1) -> dict[str, Any]:
    folder.mkdir()
    argv = [str(folder), str(corpus), "--ragged", "--devices", str(processes), *arguments]
    if processes == 1:
        several.main(argv)
        return found(folder)
    # What Lightning leaves behind in this process (a seed for all that it starts) is not for them.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    done = warm.run(
        [sys.executable, "-m", "tests.training.several", *argv],
        cwd=ROOT, env={**env, "OMP_NUM_THREADS": "1"}, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return found(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "end.ckpt", weights_only=True)[
        "state_dict"
    ]
    return state


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One process: four steps of four blocks, and two more from the checkpoint."""
    base = tmp_path_factory.mktemp("processes")
    corpus = write_corpus(base / "text.txt")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(base / "four", corpus, "--steps", "4")
    train(base / "six", corpus, "--steps", "6", "--resume", str(base / "four" / "end.ckpt"))
    train(base / "muon", corpus, "--steps", "4", "--optimizer", "muon")
    train(base / "muon-six", corpus, "--steps", "6", "--optimizer", "muon",
          "--resume", str(base / "muon" / "end.ckpt"))  # fmt: skip
    torch.set_num_threads(threads)
    return base, corpus


@pytest.mark.parametrize(
    ("strategy", "batch_size", "accumulate"), [("ddp", "2", "1"), ("fsdp2", "1", "2")]
)
def test_two_processes_do_what_one_does_and_exchange_checkpoints(
    straight: tuple[Path, Path], strategy: str, batch_size: str, accumulate: str
) -> None:
    base, corpus = straight
    shared = ("--strategy", strategy, "--batch-size", batch_size, "--accumulate", accumulate)
    # Four steps from nothing in two processes; then one process goes on from their checkpoint ...
    folder = base / strategy
    both = train(folder, corpus, *shared, "--steps", "4", processes=2)
    one = found(base / "four")
    assert both["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert both["untrained"] == one["untrained"], "evaluation is the same to the last bit"
    assert both["evaluation"] == pytest.approx(one["evaluation"], rel=1e-5)
    looked = [json.loads(line) for line in (folder / "diagnosis.jsonl").read_text().splitlines()]
    assert [line["step"] for line in looked] == [2, 4]
    norms = looked[1]["gradients"]
    parts = [norm**2 for part, norm in norms.items() if part != "total"]
    assert norms["total"] == pytest.approx(sum(parts) ** 0.5, rel=1e-4)
    shares = [batch for rank in (0, 1) for batch in found(folder, rank)["batches"]]
    blocks = sorted(block for batch in one["batches"] for block in batch)
    assert sorted(block for share in shares for block in share) == blocks, "each went to one"
    for name, tensor in weights(base / "four").items():
        assert torch.allclose(weights(folder)[name], tensor, atol=2e-5), name

    on = train(base / f"{strategy}-then-one", corpus, "--steps", "6",
               "--resume", str(folder / "end.ckpt"))  # fmt: skip
    six = found(base / "six")
    assert on["losses"] == pytest.approx(six["losses"], rel=1e-4)

    # ... and two processes go on from the checkpoint of one.
    back = train(base / f"one-then-{strategy}", corpus, *shared, "--steps", "6",
                 "--resume", str(base / "four" / "end.ckpt"), processes=2)  # fmt: skip
    assert back["losses"] == pytest.approx(six["losses"], rel=1e-4)
    for name, tensor in weights(base / "six").items():
        assert torch.allclose(weights(base / f"one-then-{strategy}")[name], tensor, atol=5e-5), name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_take_muons_step_as_one_does(
    straight: tuple[Path, Path], strategy: str
) -> None:
    """From one process's checkpoint, so that what is kept of its steps is spread, too."""
    base, corpus = straight
    folder = base / f"muon-then-{strategy}"
    both = train(folder, corpus, "--strategy", strategy, "--batch-size", "2", "--optimizer", "muon",
                 "--steps", "6", "--resume", str(base / "muon" / "end.ckpt"),
                 processes=2)  # fmt: skip
    assert both["losses"] == pytest.approx(found(base / "muon-six")["losses"], rel=1e-4)
    wanted = weights(base / "muon-six")
    for name, tensor in weights(folder).items():
        assert torch.allclose(tensor, wanted[name], atol=2e-4), name
    states = [torch.load(path / "end.ckpt", weights_only=True)["optimizer_states"][0]["state"]
              for path in (folder, base / "muon-six")]  # fmt: skip
    for name in ("momentum", "squares"):
        kept = [
            sorted(float(kept[name].norm()) for kept in each.values() if name in kept)
            for each in states
        ]
        assert len(kept[0]) == 8
        assert kept[0] == pytest.approx(kept[1], rel=1e-3), "whole tensors, as without sharding"


def validations(run: Path) -> list[tuple[int, float]]:
    """Step and held-out loss, as `metrics.csv` of a run has them."""
    with open(run / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/loss")]
    return [(int(row["step"]), float(row["val/loss"])) for row in rows]


@pytest.mark.timeout(240)
def test_sharded_training_on_the_command_line_validates_within_the_run(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text.txt")
    config = {
        "runs_dir": str(tmp_path),
        # Seven blocks are held out; in batches of one the processes have unequal shares.
        "data": {"source": str(tmp_path / "text.txt"), "tokenizer": "bytes", "eval_batch_size": 1,
                 "root": str(tmp_path / "data")},
        "model": {"preset": "nano", "config": {"n_layer": 2, "n_head": 2, "block_size": 32}},
        "trainer": {"accelerator": "cpu", "max_steps": 5, "val_check_interval": 2},
        "samples": {"max_tokens": 3},
    }  # fmt: skip
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    argv = ["fit", "--config", str(tmp_path / "c.yaml"), "--wandb", "off"]
    sharded = ["--data.batch_size=2", "--trainer.devices=2", "--trainer.strategy=fsdp2"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PL_")}
    done = warm.run(
        [sys.executable, str(ROOT / "train.py"), *argv, *sharded, "--name=both"],
        cwd=ROOT, env={**env, "OMP_NUM_THREADS": "1"}, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert cli.main([*argv, "--data.batch_size=4", "--trainer.devices=1", "--name=one"]) == 0
    both, one = validations(tmp_path / "both"), validations(tmp_path / "one")
    assert [step for step, _ in both] == [step for step, _ in one] == [2, 4, 5]
    assert [loss for _, loss in both] == pytest.approx([loss for _, loss in one], rel=1e-4)
    samples = [(tmp_path / name / "samples.txt").read_text() for name in ("both", "one")]
    assert samples[0].count("--- step") == samples[1].count("--- step") == 3
    assert (tmp_path / "both" / "model" / "config.json").is_file()
