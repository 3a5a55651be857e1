from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback

from gpt.errors import CheckpointError, ConfigError, TokenizerError
from gpt.evaluation import Evaluation
from tests.training.small import fit, make_data, make_module, make_trainer, write_corpus


class Recorder(Callback):
    """The batches, losses and learning rates of each step, exactly."""

    def __init__(self):
        self.losses, self.batches, self.rates = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.batches.append(batch[1].clone())
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize(("max_steps", "told"), [(-1, "-1"), (0, "0")])
def test_a_run_without_an_end_is_refused(tmp_path, corpus, max_steps, told):
    with pytest.raises(ConfigError, match=f"max_steps is {told}.*set trainer.max_steps"):
        fit(tmp_path, corpus, max_steps)


def test_the_loss_falls_and_the_rate_is_the_schedules(tmp_path, corpus):
    seen = Recorder()
    fit(tmp_path, corpus, 30, [seen], module=make_module(optimizer={"lr": 1e-2}))
    assert sum(seen.losses[-5:]) < 0.8 * sum(seen.losses[:5])
    assert seen.rates[:3] == pytest.approx([5e-3, 1e-2, 1e-2])
    assert all(rate > 0 for rate in seen.rates)
    assert seen.rates[-1] == pytest.approx(1e-2 / 12)


def test_the_vocabulary_comes_from_the_tokenizer_or_may_be_larger(tmp_path, corpus):
    assert fit(tmp_path, corpus, 1).gpt.config.vocab_size == 257
    larger = make_module(config={"vocab_size": 300})
    assert fit(tmp_path, corpus, 1, module=larger).gpt.embed.num_embeddings == 300


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused_before_training(tmp_path, corpus):
    module = make_module(config={"vocab_size": 200})
    with pytest.raises(ConfigError, match=r"vocab_size is 200, but the bytes tokenizer .* 257"):
        fit(tmp_path, corpus, 1, module=module)


def test_building_twice_keeps_the_weights(tmp_path, corpus):
    module = fit(tmp_path, corpus, 1)
    gpt = module.gpt
    module.configure_model()
    assert module.gpt is gpt


@pytest.mark.parametrize("tied", [True, False])
def test_tying_survives_training_and_checkpoint(tmp_path, corpus, tied):
    module = fit(tmp_path, corpus, 2, module=make_module(config={"tie_embeddings": tied}))
    assert (module.gpt.head.weight is module.gpt.embed.weight) == tied
    assert torch.equal(module.gpt.head.weight, module.gpt.embed.weight) == tied


def test_a_compiled_model_has_the_same_checkpoint_keys_and_each_loads_the_other(tmp_path, corpus):
    plain = fit(tmp_path, corpus, 1)
    plain.trainer.save_checkpoint(tmp_path / "plain.ckpt")
    # Evaluation is left out, so nothing needs to be compiled: the keys are what counts.
    compiled = make_module(compile=True)
    compiled.trainer = plain.trainer
    compiled.configure_model()
    assert list(compiled.state_dict()) == list(plain.state_dict())
    compiled.load_state_dict(torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"])
    plain.load_state_dict(compiled.state_dict())
    assert compiled.gpt._compiled_call_impl is not None


def test_accumulated_parts_make_the_same_step_as_one_batch_and_log_its_loss(tmp_path, corpus):
    whole = fit(tmp_path, corpus, 3, data=make_data(corpus, batch_size=6))
    parts = fit(
        tmp_path, corpus, 3, data=make_data(corpus, batch_size=2), accumulate_grad_batches=3
    )
    assert parts.trainer.global_step == whole.trainer.global_step == 3
    for (name, a), b in zip(whole.gpt.named_parameters(), parts.gpt.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name
    logged = [float(m.trainer.callback_metrics["train/loss"]) for m in (whole, parts)]
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)


def test_gradients_are_clipped_also_in_bf16(tmp_path, corpus):
    class Norms(Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if grads:
                found.append(float(torch.nn.utils.get_total_norm(grads)))

    found: list[float] = []
    for precision in ("32-true", "bf16-mixed"):
        fit(tmp_path, corpus, 3, [Norms()], precision=precision, gradient_clip_val=0.01)
    assert found
    assert max(found) <= 0.01 * 1.01


# --- Evaluation -----------------------------------------------------------------------------------


def evaluate(tmp_path, module, data):
    make_trainer(tmp_path, 1).validate(module, datamodule=data, verbose=False)
    return module.evaluation


def by_hand(module, data):
    """Every held-out token, given the tokens before it in its block, one block at a time."""
    gpt, T = module.gpt.double().eval(), data.block_size
    ids = [data.tokenizer.eot, *data.prepared.val[0 : len(data.prepared.val)].tolist()]
    nats = 0.0
    for start in range(0, len(ids) - 1, T):
        block = torch.tensor(ids[start : start + T + 1])
        with torch.no_grad():
            nats += float(F.cross_entropy(gpt(block[None, :-1])[0], block[1:], reduction="sum"))
    gpt.float()
    return nats, len(ids) - 1


def test_loss_and_bits_per_byte_are_those_computed_by_hand(tmp_path, corpus):
    data = make_data(corpus, tokenizer="bpe", vocab_size=300)
    module = fit(tmp_path, corpus, 4, data=data)
    found = evaluate(tmp_path, module, data)
    nats, targets = by_hand(module, data)
    assert found.targets == targets
    assert found.loss == pytest.approx(nats / targets, rel=1e-6)
    text = corpus.read_bytes()
    held_out = len(text) - data.prepared.train_bytes
    assert 0 < held_out < len(text)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / held_out, rel=1e-6)
    logged = module.trainer.callback_metrics
    assert float(logged["val/loss"]) == pytest.approx(nats / targets, rel=1e-5)
    assert float(logged["val/bpb"]) == pytest.approx(nats / math.log(2) / held_out, rel=1e-5)


def test_evaluation_is_the_same_twice_and_whatever_the_batch_size(tmp_path, corpus):
    module = fit(tmp_path, corpus, 4, module=make_module(dropout=0.3))
    first = evaluate(tmp_path, module, make_data(corpus, eval_batch_size=1))
    assert evaluate(tmp_path, module, make_data(corpus, eval_batch_size=1)) == first
    for size in (3, 100):
        other = evaluate(tmp_path, module, make_data(corpus, eval_batch_size=size))
        assert other.targets == first.targets
        assert other.nats == pytest.approx(first.nats, rel=1e-6)


def test_part_of_the_text_has_no_bits_per_byte(tmp_path, corpus):
    module = fit(tmp_path, corpus, 1)
    trainer = make_trainer(tmp_path, 1, limit_val_batches=1)
    trainer.validate(module, datamodule=make_data(corpus, eval_batch_size=1), verbose=False)
    assert module.evaluation.targets == 16
    assert module.evaluation.bits_per_byte is None
    assert "val/bpb" not in trainer.callback_metrics


def test_perplexity_of_a_hopeless_model_is_infinite_not_an_error():
    assert Evaluation(nats=1e6, targets=10, text_bytes=1).perplexity == math.inf
    assert Evaluation(nats=20.0, targets=10, text_bytes=1).perplexity == pytest.approx(math.e**2)


# --- Checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path, corpus):
    module = fit(tmp_path, corpus, 2)
    module.trainer.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_a_checkpoint_is_plain_data_and_describes_its_model(saved):
    found = torch.load(saved, weights_only=True)
    assert found["antiphon"]["model"]["vocab_size"] == 257
    assert found["antiphon"]["tokenizer"]["kind"] == "bytes"
    assert all(key.startswith("gpt.") for key in found["state_dict"])
    assert "hyper_parameters" not in found


def test_another_tokenizer_is_refused_and_both_are_named(tmp_path, corpus, saved):
    data = make_data(corpus, tokenizer="chars")
    with pytest.raises(TokenizerError, match=r"bytes of 257 tokens .*chars of \d+ tokens"):
        fit(tmp_path, corpus, 4, data=data, ckpt_path=saved)


def test_another_vocabulary_of_the_same_kind_and_size_is_refused(tmp_path, corpus):
    module = fit(tmp_path, corpus, 1, data=make_data(corpus, tokenizer="bpe", vocab_size=290))
    module.trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = tmp_path / "other.txt"
    other.write_text(corpus.read_text()[::-1])
    data = make_data(other, tokenizer="bpe", vocab_size=290)
    with pytest.raises(TokenizerError, match=r"bpe of 290 tokens .*bpe of 290 tokens"):
        fit(tmp_path, other, 2, data=data, ckpt_path=tmp_path / "a.ckpt")


def test_another_architecture_is_refused_and_the_fields_are_named(tmp_path, corpus, saved):
    module = make_module(config={"n_layer": 2, "norm": "layernorm"})
    with pytest.raises(
        CheckpointError, match=r"n_layer 1 \(checkpoint\) and 2 .*norm rmsnorm .* layernorm"
    ):
        fit(tmp_path, corpus, 4, module=module, ckpt_path=saved)


def test_dropout_may_change_from_run_to_run(tmp_path, corpus, saved):
    module = fit(tmp_path, corpus, 3, module=make_module(dropout=0.2), ckpt_path=saved)
    assert module.trainer.global_step == 3


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path, corpus, saved):
    found = torch.load(saved, weights_only=True)
    del found["antiphon"]
    torch.save(found, saved)
    with pytest.raises(CheckpointError, match="no model description"):
        fit(tmp_path, corpus, 4, ckpt_path=saved)


@pytest.mark.parametrize(("first", "accumulate"), [(4, 1), (7, 1), (3, 2)])
def test_a_resumed_run_is_bit_equal_to_a_straight_one(tmp_path, first, accumulate):
    """Dropout is on; 10 blocks of text, so that epochs end inside both parts."""
    corpus = write_corpus(tmp_path / "short.txt", lines=5)
    options = {"accumulate_grad_batches": accumulate}

    class Save(Callback):
        def on_validation_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    straight = Recorder()
    module = make_module(dropout=0.2)
    fit(tmp_path, corpus, 10, [straight, Save()], module=module,
        val_check_interval=first * accumulate, **options)  # fmt: skip
    resumed = Recorder()
    again = fit(tmp_path, corpus, 10, [resumed], module=make_module(dropout=0.2), seed=99,
                ckpt_path=tmp_path / f"{first}.ckpt", **options)  # fmt: skip
    done = first * accumulate
    assert len(module.data.prepared.train) // 16 < 4 * done
    assert len(resumed.losses) == 10 * accumulate - done
    assert all(map(torch.equal, resumed.batches, straight.batches[done:]))
    assert resumed.losses == straight.losses[done:]
    assert resumed.rates == straight.rates[done:]
    assert all(map(torch.equal, module.gpt.parameters(), again.gpt.parameters()))


def test_flags_given_on_resume_win(tmp_path, corpus, saved):
    seen = Recorder()
    module = make_module(optimizer={"lr": 5e-4, "schedule": "constant", "weight_decay": 0.7,
                                    "betas": (0.5, 0.6)})  # fmt: skip
    fit(tmp_path, corpus, 4, [seen], module=module, ckpt_path=saved)
    groups = module.trainer.optimizers[0].param_groups
    assert seen.rates == [5e-4, 5e-4]
    assert [group["weight_decay"] for group in groups] == [0.7, 0.0]
    assert [tuple(group["betas"]) for group in groups] == [(0.5, 0.6)] * 2
