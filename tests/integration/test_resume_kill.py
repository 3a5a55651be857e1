"""A run that is killed again and again ends as the run that was not, to the bit.

ANTIPHON_KILLS sets how often (20), ANTIPHON_KILL_SEED when.
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.integration.test_train import environment
from tests.training.small import write_corpus

KILLS = int(os.environ.get("ANTIPHON_KILLS", "20"))
SEED = os.environ.get("ANTIPHON_KILL_SEED", "4")
KILLER = Path(__file__).with_name("killer.py")

# Dropout, accumulation, an average of the weights, a corpus that is read through every few steps,
# and saves that fall between the validations.
CONFIG = """\
data: {source: text.txt, tokenizer: bytes, batch_size: 2}
model:
  config: {n_layer: 1, d_model: 16, n_head: 2, block_size: 16, dropout: 0.2}
  optimizer: {warmup_steps: 10, ema_decay: 0.9}
trainer:
  max_steps: %d
  accumulate_grad_batches: 2
  val_check_interval: 14
  log_every_n_steps: 1
  accelerator: cpu
checkpoint: {every_n_steps: 3}
samples: {max_tokens: 4}
diagnosis: {every_n_steps: null}
wandb: "off"
"""

pytestmark = pytest.mark.integration


def losses(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv without what depends on the clock."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k not in ("tokens_per_s", "mfu")} for row in rows]


def tensors(tree: Any, path: str = "") -> dict[str, Any]:
    """Everything in a checkpoint, flat."""
    if isinstance(tree, dict):
        parts = tree.items()
    elif isinstance(tree, list | tuple):
        parts = enumerate(tree)
    else:
        return {path: tree}
    return {k: v for name, value in parts for k, v in tensors(value, f"{path}/{name}").items()}


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def check_equal(one: Path, other: Path) -> None:
    """Raises AssertionError that names what differs between two checkpoints."""
    first, second = (tensors(torch.load(path, weights_only=True)) for path in (one, other))
    assert first.keys() == second.keys()
    different = [
        name
        for name in first
        if not same(first[name], second[name])
        # How often Lightning was asked, and where the run's folder is.
        and not name.startswith(("/loops/fit_loop/epoch_loop.val_loop", "/antiphon/name"))
    ]
    assert different == []


def test_a_run_killed_at_random_moments_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text.txt", lines=8)
    (tmp_path / "a.yaml").write_text(CONFIG % (30 + 4 * KILLS))

    command = [sys.executable, str(KILLER), SEED, "straight=0", f"killed={KILLS}", "--"]
    done = warm.run(
        [*command, "fit", "--config", "a.yaml", "--resume"],
        cwd=tmp_path, env=environment(), text=True, timeout=280,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    assert "not exact" not in done.stdout
    assert f"killed: killed {KILLS} times" in done.stdout
    straight, killed = tmp_path / "runs" / "straight", tmp_path / "runs" / "killed"
    assert losses(killed) == losses(straight)
    assert (killed / "samples.txt").read_bytes() == (straight / "samples.txt").read_bytes()
    for name in ("last", "best"):
        check_equal(killed / f"checkpoints/{name}.ckpt", straight / f"checkpoints/{name}.ckpt")
    weights = [(run / "model/model.safetensors").read_bytes() for run in (killed, straight)]
    assert weights[0] == weights[1]
