from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from gpt.flops import flops_per_token
from gpt.machine import Limit
from gpt.training.throughput import Throughput, compute_dtype
from tests.training.small import fit


class Clock:
    """A clock that starts far from zero and is moved by hand."""

    now = 1e9

    def __call__(self):
        return self.now


class Busy(Callback):
    """Takes two seconds for a batch and a hundred for a validation."""

    def __init__(self, clock):
        self.clock, self.rates = clock, []

    def on_before_zero_grad(self, *_):
        self.clock.now += 2.0

    def on_validation_end(self, *_):
        self.clock.now += 100.0

    def on_train_batch_end(self, trainer, *_):
        self.rates.append(float(trainer.callback_metrics["tokens_per_s"]))


def test_throughput_is_tokens_over_the_seconds_of_training(tmp_path, corpus):
    clock = Clock()
    busy = Busy(clock)
    fit(tmp_path, corpus, 4, [Throughput(clock), busy], val_check_interval=2)
    assert busy.rates == [4 * 16 / 2.0] * 4


def test_throughput_counts_all_parts_of_a_step(tmp_path, corpus):
    clock = Clock()
    throughput = Throughput(clock)

    class Tick(Callback):
        def on_train_batch_start(self, *_):
            clock.now += 1.0

    # The tick comes after the clock was read, so it falls into the batch.
    module = fit(tmp_path, corpus, 2, [throughput, Tick()], accumulate_grad_batches=3)
    assert float(module.trainer.callback_metrics["tokens_per_s"]) == pytest.approx(4 * 16)


def test_one_step_has_a_throughput(tmp_path, corpus):
    busy = Busy(clock := Clock())
    fit(tmp_path, corpus, 1, [Throughput(clock), busy])
    assert busy.rates == [4 * 16 / 2.0]


def test_mfu_is_the_share_of_the_limit_that_the_model_s_products_make(tmp_path, corpus):
    clock = Clock()
    throughput = Throughput(clock, Limit(1e6, "a million a second"))
    module = fit(tmp_path, corpus, 2, [throughput, Busy(clock)])
    expected = 4 * 16 / 2.0 * flops_per_token(module.config).training / 1e6
    assert float(module.trainer.callback_metrics["mfu"]) == pytest.approx(expected)


def test_on_a_cpu_the_limit_is_measured_without_touching_the_training(tmp_path, corpus):
    with_it, without = Throughput(), []
    losses = []
    for callbacks in ([with_it], without):
        module = fit(tmp_path, corpus, 2, callbacks)
        losses.append(float(module.trainer.callback_metrics["train/loss"]))
    assert with_it.limit is not None
    assert "measured" in with_it.limit.what
    assert losses[0] == losses[1]


def test_the_precision_of_a_run_is_that_of_its_products():
    names = ["32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true"]
    assert [compute_dtype(name) for name in names] == [
        torch.float32, torch.bfloat16, torch.bfloat16, torch.float16, torch.float64,
    ]  # fmt: skip
