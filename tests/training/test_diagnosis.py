"""The diagnosis in a run: it changes nothing, keeps a record, and a healthy run hears nothing."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from gpt.diagnosis import gradient_norms
from gpt.errors import ConfigError
from gpt.training.checkpoints import RunCheckpoints
from gpt.training.diagnosis import Diagnosis, frequency_entropy
from gpt.training.loggers import MetricsCSV
from gpt.training.run import RunFolder
from tests.training.small import fit, make_module, write_corpus


class Watch(Callback):
    """Notes the loss of each part and the random state after it."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append((float(outputs["loss"]), batch[0].sum().item(), torch.rand(()).item()))


def test_training_is_bit_equal_with_and_without(tmp_path, corpus):
    runs = []
    for callbacks in ([], [Diagnosis(1)]):
        watch = Watch()
        module = make_module(dropout=0.3, config={"attn_dropout": 0.1})
        fit(
            tmp_path,
            corpus,
            6,
            [*callbacks, watch],
            module=module,
            accumulate_grad_batches=2,
            val_check_interval=4,
        )
        assert module.gpt.training
        runs.append((watch.seen, [p.detach() for p in module.gpt.parameters()]))
    assert len(runs[0][0]) == 12
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_record_and_the_metrics_hold_what_was_measured(tmp_path, corpus):
    diagnosis = Diagnosis(2)
    diagnosis.path = tmp_path / "run" / "diagnosis.jsonl"
    metrics = MetricsCSV(tmp_path / "metrics.csv")
    before_clipping = []

    class Gradients(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            before_clipping.append(gradient_norms(module.gpt)["total"])

    module = make_module(config={"n_layer": 2})
    fit(
        tmp_path,
        corpus,
        4,
        [diagnosis, Gradients()],
        module=module,
        logger=[metrics],
        gradient_clip_val=0.01,
    )
    found = lines(diagnosis.path)
    assert [line["step"] for line in found] == [2, 4]
    assert found[1]["gradients"]["total"] == pytest.approx(before_clipping[3], rel=1e-5)
    assert before_clipping[3] > 0.1
    assert [len(layer["entropy"]) for layer in found[0]["layers"]] == [2, 2]
    assert found[0]["warnings"] == []
    text = metrics.path.read_text().splitlines()
    names = text[0].split(",")
    rows = [dict(zip(names, line.split(","), strict=False)) for line in text[1:]]
    logged = [row for row in rows if row.get("diag/grad_norm")]
    assert [row["step"] for row in logged] == ["2", "4"]
    losses = {row["step"]: float(row["train/loss"]) for row in rows if row.get("train/loss")}
    assert found[1]["loss"] == pytest.approx((losses["3"] + losses["4"]) / 2, rel=1e-5)
    layer = found[1]["layers"][1]
    share = layer["entropy_share"]
    for name, value in (
        ("entropy_min", min(share)),
        ("entropy_mean", sum(share) / 2),
        ("entropy_max", max(share)),
        ("logit_max", max(layer["logit_max"])),
        ("stream_rms", layer["stream_rms"]),
        ("dead_units", layer["dead_units"]),
        ("grad_norm", found[1]["gradients"]["1"]),
    ):
        assert float(logged[1][f"diag/L01/{name}"]) == pytest.approx(value, rel=1e-5), name


def test_a_probe_falls_on_the_first_logging_step_after_its_turn():
    def due(every, log_every):
        diagnosis = Diagnosis(every)
        return [step for step in range(1, 101) if diagnosis.is_due(step, log_every)]

    assert due(25, 10) == [30, 50, 80, 100]
    assert due(50, 10) == [50, 100]
    assert due(3, 50) == [50, 100]
    assert due(40, 1) == [40, 80]
    assert due(50, 0) == [50, 100]
    assert due(None, 10) == []


def test_a_resumed_run_goes_on_in_the_record_and_a_new_one_begins_it_anew(tmp_path, corpus):
    run = RunFolder(tmp_path / "runs", "r")

    def diagnosed(steps, **options):
        diagnosis = Diagnosis(2)
        diagnosis.path = run.path / "diagnosis.jsonl"
        fit(tmp_path, corpus, steps, [diagnosis, RunCheckpoints(run)], val_check_interval=4,
            **options)  # fmt: skip
        return diagnosis.path

    path = diagnosed(4)
    first = path.read_text()
    # Died after step 6, in the middle of a line; the checkpoint is that of step 4.
    path.write_text(first + '{"step": 6, "layers": []}\n{"step": 8, "la')
    path = diagnosed(8, ckpt_path=run.last)
    assert path.read_text().startswith(first)
    assert [line["step"] for line in lines(path)] == [2, 4, 6, 8]
    assert lines(path)[2]["layers"]
    assert [line["step"] for line in lines(diagnosed(2))] == [2]


def test_a_full_disk_loses_the_record_and_not_the_run(tmp_path, corpus, capsys):
    diagnosis = Diagnosis(2)
    (tmp_path / "file").touch()
    diagnosis.path = tmp_path / "file" / "diagnosis.jsonl"  # cannot be written, as on a full disk
    module = fit(tmp_path, corpus, 4, [diagnosis])
    assert module.trainer.global_step == 4
    assert capsys.readouterr().out.count("no more diagnosis is kept") == 1


def test_a_healthy_run_hears_nothing_and_an_ill_one_what_helps(tmp_path, capsys, monkeypatch):
    # A small model learns in a fifth of the steps.
    monkeypatch.setattr("gpt.training.symptoms.SETTLE_STEPS", 40)
    monkeypatch.setattr("gpt.training.symptoms.STALL_STEPS", 60)
    corpus = write_corpus(tmp_path / "text.txt", lines=300)

    def told(steps, **options):
        module = make_module(**options)
        fit(tmp_path, corpus, steps, [Diagnosis(10)], module=module, limit_val_batches=0)
        return [line for line in capsys.readouterr().out.splitlines() if "diagnosis at" in line]

    config = {"n_layer": 2, "d_model": 32}
    assert told(200, config=config, optimizer={"lr": 3e-3, "warmup_steps": 20}) == []
    ill = told(80, config={**config, "attn_scale": 1e-6}, optimizer={"lr": 1e-9, "warmup_steps": 1})
    assert len(ill) == 2
    assert ill[0].startswith("diagnosis at step 50: uniform heads (layer 0 heads 0, 1; layer 1 h")
    assert "model.config.attn_scale (now 1e-06; 1/sqrt(head_dim) is 0.25)" in ill[0]
    assert ill[1].startswith("diagnosis at step 70: stalled loss: not fallen for 60 steps")
    assert "model.optimizer.lr" in ill[1]


def test_bf16_is_probed_as_it_is_trained(tmp_path, corpus):
    diagnosis = Diagnosis(1)
    diagnosis.path = tmp_path / "diagnosis.jsonl"
    fit(tmp_path, corpus, 1, [diagnosis], precision="bf16-mixed")
    (found,) = lines(diagnosis.path)
    share = found["layers"][0]["entropy_share"]
    # Computed from bf16 queries and keys, but not in bf16, which has no such numbers.
    assert any(x != float(torch.tensor(x).bfloat16()) for x in share)
    assert all(0.5 < x < 1 for x in share)


def test_the_entropy_of_frequencies_is_what_a_unigram_model_pays():
    assert frequency_entropy(np.array([5] * 10, dtype=np.uint16)) == 0
    assert frequency_entropy(np.arange(8, dtype=np.uint32)) == pytest.approx(math.log(8))
    # Two texts one after the other: both are counted, though not whole.
    both = np.repeat([3, 900], 5000)
    assert frequency_entropy(both, most=1000) == pytest.approx(math.log(2), abs=1e-3)


@pytest.mark.parametrize("settings", [{"every_n_steps": 0}, {"sequences": 0}])
def test_settings_out_of_range_are_refused(settings):
    ((name, _),) = settings.items()
    with pytest.raises(ConfigError, match=f"diagnosis.{name} is 0"):
        Diagnosis(**settings)
