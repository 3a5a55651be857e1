from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from gpt.checkpoint import load_model
from gpt.errors import ConfigError
from gpt.training.checkpoints import ExportModel, RunCheckpoints
from gpt.training.ema import EMA, averaged
from gpt.training.optim import OptimizerConfig
from gpt.training.run import RunFolder
from tests.training.small import fit, make_module


class Weights(Callback):
    """The weights after each step, and those that validation saw."""

    def __init__(self):
        self.steps, self.validated = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.steps.append(copies(pl_module))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.steps.append(copies(pl_module))

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx:
            return
        self.validated.append(copies(pl_module))


def copies(module):
    return [p.detach().clone() for p in module.parameters()]


def equal(some, others):
    return all(map(torch.equal, some, others))


def by_hand(steps, decay):
    average = [p.double() for p in steps[0]]
    for n, weights in enumerate(steps[1:]):
        d = min(decay, (1 + n) / (10 + n))
        average = [d * a + (1 - d) * w for a, w in zip(average, weights, strict=True)]
    return average


def test_the_average_is_that_computed_by_hand_and_is_what_is_validated_and_exported(
    tmp_path, corpus
):
    run, seen, ema = RunFolder(tmp_path, "a"), Weights(), EMA(0.4)
    kept = RunCheckpoints(run)
    plain = Weights()
    options = {"accumulate_grad_batches": 2, "val_check_interval": 10}
    fit(tmp_path, corpus, 10, [plain], **options)
    module = fit(tmp_path, corpus, 10, [ema, seen, kept, ExportModel(run, kept)], **options)
    assert all(map(equal, seen.steps, plain.steps))  # training is not touched by it
    assert equal(module.parameters(), seen.steps[-1])
    wanted = by_hand(seen.steps, 0.4)
    for found, exact in zip(ema.weights.values(), wanted, strict=True):
        assert torch.allclose(found.double(), exact, atol=1e-6)
    half = by_hand(seen.steps[:6], 0.4)  # of the validation after 5 steps
    for found, exact in zip(seen.validated[0], half, strict=True):
        assert torch.allclose(found.double(), exact, atol=1e-6)
    exported = load_model(run.model).model
    assert torch.equal(exported.embed.weight, ema.weights["gpt.embed.weight"])
    assert not torch.equal(exported.embed.weight, module.gpt.embed.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_opens_as_the_average_and_training_goes_on_without_it(tmp_path, corpus, tied):
    run = RunFolder(tmp_path, "a")

    def module():
        return make_module(config={"tie_embeddings": tied}, optimizer={"schedule": "constant"})

    ema = EMA(0.9)
    trained = fit(tmp_path, corpus, 3, [ema, RunCheckpoints(run)], module=module())
    opened = load_model(run.last).model
    for key in ("embed.weight", "head.weight"):
        average = ema.weights["gpt.embed.weight" if tied else f"gpt.{key}"]
        assert torch.equal(opened.state_dict()[key], average)
    # A run that no longer averages goes on with the trained weights.
    seen = Weights()
    fit(tmp_path, corpus, 4, [seen], module=module(), ckpt_path=run.last)
    straight = Weights()
    fit(tmp_path, corpus, 4, [straight], module=module())
    assert equal(seen.steps[-1], straight.steps[-1])
    assert equal(straight.steps[3], trained.parameters())


def test_samples_are_of_the_average_and_the_weights_come_back_to_the_bit(tmp_path, corpus):
    ema, seen = EMA(0.9), []

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            before = copies(pl_module)
            with averaged(trainer, pl_module), averaged(trainer, pl_module):
                seen.append(equal(pl_module.parameters(), ema.weights.values()))
                trainer.save_checkpoint(tmp_path / "inside.ckpt")
            seen.append(equal(pl_module.parameters(), before))
            trained = torch.load(tmp_path / "inside.ckpt")["current_model_state"]
            seen.append(torch.equal(trained["gpt.embed.weight"], pl_module.gpt.embed.weight))

    fit(tmp_path, corpus, 2, [ema, Look()])
    assert seen == [True] * 6


def test_the_average_of_bf16_weights_is_kept_in_float32(tmp_path, corpus):
    ema = EMA(0.999)
    module = fit(tmp_path, corpus, 2, [ema], precision="bf16-true")
    assert {w.dtype for w in ema.weights.values()} == {torch.float32}
    assert module.gpt.embed.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(ConfigError, match=r"optimizer\.ema_decay is .*below 1"):
        OptimizerConfig(ema_decay=decay)
