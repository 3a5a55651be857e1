from __future__ import annotations

import json
import math
import re

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from gpt.cli import main as antiphon
from gpt.errors import ConfigError
from gpt.training.checkpoints import CheckpointSchedule, RunCheckpoints
from gpt.training.guard import DivergedError, LossGuard
from gpt.training.run import RunFolder
from tests.training.small import fit, make_data, make_module


class Break(Callback):
    """Puts a number into the weights before a step, as a fault of the hardware or a bug would."""

    def __init__(self, step, value):
        self.step, self.value = step, value

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            with torch.no_grad():
                pl_module.gpt.embed.weight[:] = self.value


class Losses(Callback):
    """Says what the guard is to see as the loss of each step."""

    def __init__(self, losses):
        self.losses = list(losses)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.step_loss = torch.tensor(float(self.losses.pop(0)))


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "runs", "a")


def guarded(run, **options):
    guard = LossGuard(**options)
    guard.run = run
    return [guard, RunCheckpoints(run, CheckpointSchedule(every_n_steps=2), guard)]


def test_a_nan_stops_the_run_and_names_step_batch_and_checkpoint(tmp_path, corpus, run):
    seen = []

    class Batches(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 5:
                seen.append(batch[0])

    callbacks = [Break(5, math.nan), Batches(), *guarded(run)]
    with pytest.raises(DivergedError) as caught:
        fit(tmp_path, corpus, 9, callbacks, accumulate_grad_batches=2)
    told = str(caught.value)
    assert "\n" not in told
    assert told.startswith("the loss is nan at step 6: training diverged.")
    assert "blocks 40 to 47" in told
    assert f"the last good checkpoint is {run.last} (step 4)" in told
    assert "--resume" in told
    command = re.search(r"antiphon (data inspect \S+ --at \d+)", told)
    assert antiphon(command[1].split()) == 0
    assert torch.load(run.last, weights_only=True)["global_step"] == 4
    # The places that are listed are those of the batches that the step had.
    listed = json.loads((run.path / "diverged.json").read_text())
    data = make_data(corpus)
    data.setup("fit")
    tokens = data.prepared.train
    ring = [*tokens[0 : len(tokens)], *tokens[0:16]]
    starts = [block["start"] for block in listed["blocks"]]
    assert [ring[start : start + 16] for start in starts] == torch.cat(seen).tolist()
    assert all(str(start) in told for start in starts[:4])


def test_a_gradient_that_is_not_finite_is_found_in_its_own_step(tmp_path, corpus, run):
    class Explode(Callback):
        def on_after_backward(self, trainer, pl_module):
            if trainer.global_step == 2:
                pl_module.gpt.embed.weight.grad[0, 0] = math.inf

    for clip in (1.0, None):
        with pytest.raises(DivergedError, match="the gradient norm is inf at step 3"):
            fit(tmp_path, corpus, 5, [Explode(), *guarded(run)], gradient_clip_val=clip)


def test_without_the_guard_a_state_that_is_not_finite_still_is_not_saved(tmp_path, corpus, run):
    callbacks = [Break(3, math.nan), *guarded(run, enabled=False)]
    with pytest.raises(DivergedError, match=r"not finite at step 4.*last\.ckpt \(step 2\)"):
        fit(tmp_path, corpus, 9, callbacks)
    assert torch.load(run.last, weights_only=True)["global_step"] == 2


GOOD = [3.0] * 20


@pytest.mark.parametrize(
    ("losses", "options", "stops_at"),
    [
        ([*GOOD, *[7.0] * 4], {"patience": 3}, 23),
        ([*GOOD, 50, 50, 3, 50, 50, 3], {"patience": 3}, None),  # spikes that pass
        ([*GOOD, *[5.0] * 6], {"patience": 3}, None),  # 1.5 * 3 + 1 is not reached
        ([*GOOD, *[5.0] * 6], {"patience": 3, "factor": 1.2}, 23),
        ([*GOOD, *[7.0] * 6], {"patience": 3, "factor": None}, None),
        ([*GOOD, *[7.0] * 6], {"patience": 3, "enabled": False}, None),
        ([3.0] * 10 + [90.0] * 12, {"patience": 3}, None),  # too early to know
        ([0.001] * 20 + [0.9] * 6, {"patience": 3}, None),  # noise near zero
        ([9.0 - i / 3 for i in range(26)], {"patience": 3}, None),
    ],
)
def test_a_loss_that_stays_far_above_its_median_has_exploded(
    tmp_path, corpus, run, losses, options, stops_at
):
    callbacks = [Losses(losses), *guarded(run, **options)]
    if stops_at is None:
        fit(tmp_path, corpus, len(losses), callbacks)
        return
    told = f"after 3 steps far above the usual 3 at step {stops_at}.*factor null would let it pass"
    with pytest.raises(DivergedError, match=told):
        fit(tmp_path, corpus, len(losses), callbacks)


def test_a_resumed_run_remembers_what_was_usual(tmp_path, corpus, run):
    fit(tmp_path, corpus, 20, [Losses(GOOD), *guarded(run)])
    with pytest.raises(DivergedError, match="usual 3 at step 22"):
        fit(tmp_path, corpus, 24, [Losses([7.0] * 4), *guarded(run, patience=2)],
            ckpt_path=run.last)  # fmt: skip


def test_settings_that_cannot_be_are_refused():
    for options, told in (({"factor": 0.5}, "factor is 0.5"), ({"patience": 0}, "patience is 0")):
        with pytest.raises(ConfigError, match=told):
            LossGuard(**options)


def test_a_module_without_dropout_and_a_good_loss_passes(tmp_path, corpus, run):
    fit(tmp_path, corpus, 3, guarded(run), module=make_module())
    assert not (run.path / "diverged.json").exists()
