"""The range test: what it suggests is worth taking, and nothing of a run is touched."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest
from lightning.pytorch.callbacks import Callback

from gpt.errors import ConfigError
from gpt.training.cli import main
from gpt.training.lr_find import RangeSweep, RangeTest, check_range, fit_arguments
from tests.training.small import fit, make_module, write_corpus


def curve(losses, low=1e-6, high=1.0, steps=None):
    steps = len(losses) if steps is None else steps
    rates = low * (high / low) ** (np.arange(len(losses)) / (steps - 1))
    return RangeTest(rates, np.array(losses, dtype=float), steps, went_off=len(losses) < steps)


def valley(steps=120):
    """Flat at 8, falls fastest in the middle (1e-3), lowest at 1e-2.4, then off."""
    x = np.linspace(-6, 0, steps)
    return 8 - 3 / (1 + np.exp(-6 * (x + 3))) + 4 * np.clip(x + 2.4, 0, None) ** 2


def test_the_steepest_fall_is_suggested_whatever_the_noise():
    for noise in (0.0, 0.1):
        random = np.random.default_rng(0)
        found = curve(valley() + noise * random.standard_normal(120))
        assert 4e-4 < found.suggestion < 2.5e-3
        assert 1e-3 < found.rates[found.lowest] < 2e-2
        assert found.suggestion == float(f"{found.rates[found.steepest]:.1e}")


def test_losses_that_are_no_numbers_end_the_curve():
    losses = [*valley()[:100], math.inf, math.nan, 3.0]
    found = curve(losses, steps=120)
    assert np.isfinite(found.smoothed[:100]).all()
    assert np.isnan(found.smoothed[100:]).all()
    assert found.suggestion == pytest.approx(1e-3, rel=0.5)


@pytest.mark.parametrize(
    ("losses", "steps", "told"),
    [
        (np.full(50, 8.0), 50, "did not fall.*larger --max_lr or more --steps"),
        (np.linspace(8, 14, 30), 50, "only went off; give a smaller --min_lr"),
        ([math.nan], 50, "only went off; give a smaller --min_lr"),
        ([math.inf, 8.0], 50, "only went off"),
        (8 - 3 * np.linspace(0, 1, 50) ** 3, 50, "still falling at the rate 1.0e.00.*--max_lr"),
    ],
)
def test_a_range_that_shows_nothing_is_told_with_what_to_change(losses, steps, told, tmp_path):
    found = curve(losses, steps=steps)
    with pytest.raises(ConfigError, match=told):
        _ = found.suggestion
    found.write_png(tmp_path / "x.png", "nothing")
    found.write_csv(tmp_path / "x.csv")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "settings",
    [(0.0, 1.0, 50), (1e-3, 1e-4, 50), (1e-3, math.inf, 50), (math.nan, 1.0, 50), (1e-6, 1.0, 5)],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError):
        check_range(*settings)


def test_rates_grow_by_one_factor_and_are_those_the_optimizer_uses(tmp_path, corpus):
    class Used(Callback):
        def __init__(self):
            self.rates = []

        def on_before_zero_grad(self, trainer, module, optimizer):
            self.rates.append(optimizer.param_groups[0]["lr"])

    sweep, used = RangeSweep(1e-5, 1e-1, 9), Used()
    fit(tmp_path, corpus, 9, [sweep, used], accumulate_grad_batches=2, limit_val_batches=0)
    assert sweep.rates == pytest.approx([10 ** (-5 + i / 2) for i in range(9)])
    assert used.rates[-8:] == pytest.approx(sweep.rates[:8])
    assert len(sweep.losses) == 9


def test_a_sweep_ends_when_the_loss_goes_off(tmp_path, corpus):
    sweep = RangeSweep(1e-3, 1e6, 60)
    module = fit(
        tmp_path,
        corpus,
        60,
        [sweep],
        module=make_module(config={"qk_norm": False, "norm": "layernorm"}),
        gradient_clip_val=None,
        limit_val_batches=0,
    )
    assert sweep.went_off
    assert 5 < len(sweep.losses) < 60
    assert module.trainer.global_step == len(sweep.losses)


def test_the_first_losses_are_those_of_fit(tmp_path, corpus):
    class Losses(Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, module, *_):
            self.seen.append(float(trainer.callback_metrics["train/loss"]))

    plain = Losses()
    fit(tmp_path, corpus, 1, [plain])
    sweep = RangeSweep(1e-5, 1e-1, 20)
    fit(tmp_path, corpus, 2, [sweep])
    assert sweep.losses[0] == plain.seen[0]


# --- The command ---------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The flags of a small run, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write_corpus(tmp_path / "text.txt", lines=200)
    (tmp_path / "small.yaml").write_text(
        "data: {source: text.txt, tokenizer: bytes, batch_size: 4}\n"
        "model:\n  config: {n_layer: 1, d_model: 16, n_head: 2, block_size: 16}\n"
        "  optimizer: {warmup_steps: 2}\n"
        "trainer: {max_steps: 40, accelerator: cpu, enable_progress_bar: false}\n"
        "samples: {every_n_steps: 5, max_tokens: 2}\ndiagnosis: {every_n_steps: 5}\n"
    )
    return tmp_path


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_suggestion_trains_and_an_existing_run_is_left_alone(small, capsys):
    run = small / "runs" / "small"
    assert main(["fit", "--config", "small.yaml", "--model.optimizer.lr", "1e-7"]) == 0
    before = contents(run)
    capsys.readouterr()
    # The config of the run as well as the file it was made from will do.
    arguments = ["--config", "runs/small/config.yaml", "--steps", "80"]
    assert main(["lr-find", *arguments], "antiphon train") == 0
    out = capsys.readouterr().out
    after = contents(run)
    new = {path.name: after.pop(path) for path in (run / "lr-find.csv", run / "lr-find.png")}
    assert after == before
    assert new["lr-find.png"].startswith(b"\x89PNG")
    rows = list(csv.DictReader(new["lr-find.csv"].decode().splitlines()))
    assert list(rows[0]) == ["step", "lr", "loss", "smoothed"]
    assert float(rows[0]["lr"]) == 1e-6
    assert "--- step" not in out  # no samples
    assert "model.optimizer.lr " in out
    suggested = float(out.partition("model.optimizer.lr ")[2].split(":")[0])
    assert 1e-4 < suggested < 0.5
    command = out.partition("use it: antiphon train ")[2].split("\n")[0]
    assert command.split()[:3] == ["fit", "--config", "runs/small/config.yaml"]
    assert command.split()[-2:] == ["--model.optimizer.lr", f"{suggested:.1e}"]
    assert main([*command.split(), "--name", "found"]) == 0
    with open(small / "runs" / "found" / "metrics.csv", encoding="utf-8") as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    with open(run / "metrics.csv", encoding="utf-8") as file:
        slow = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert losses[-1] < slow[-1] - 0.5


def test_a_range_without_a_minimum_is_one_line_and_the_plot_is_there(small, capsys):
    asked = ["lr-find", "--config", "small.yaml", "--steps", "20"]
    assert main([*asked, "--max_lr", "1e-5"]) == 1
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("train.py: error: the loss did not fall between the rates 1.0e-06 and")
    assert sorted(p.name for p in (small / "runs" / "small").iterdir()) == [
        "lr-find.csv",
        "lr-find.png",
    ]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--min_lr", "1"], "0 < min_lr < max_lr"),
        (["--steps", "3"], "steps is 3"),
        (["--trainer.fast_dev_run", "true"], "fast_dev_run is True"),
        (["--ckpt_path", "last"], "begins with new weights"),
        (["--data.source", "nowhere.txt"], "neither a file"),
    ],
)
def test_a_refused_search_leaves_no_folder_behind(small, capsys, more, told):
    assert main(["lr-find", "--config", "small.yaml", *more]) == 1
    assert told in capsys.readouterr().err
    assert not (small / "runs" / "small").exists()


def test_the_command_to_use_is_the_one_given_without_the_range():
    given = ["lr-find", "--config=a.yaml", "--min_lr", "1e-5", "--steps=30", "--name", "x",
             "--model.optimizer.lr", "1", "--max_lr=2"]  # fmt: skip
    assert fit_arguments(given) == ["fit", "--config=a.yaml", "--name", "x"]
