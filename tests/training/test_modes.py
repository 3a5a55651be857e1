"""The ways to run a step: unequal parts, document borders, recomputed activations, bf16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback

from gpt.data.batches import Batch
from gpt.evaluation import IGNORE
from gpt.training.data import TextDataModule
from tests.training.small import fit, make_data, make_module

T = 16


class Given:
    """A loader of these batches. (Lightning takes a list for a list of loaders.)"""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class GivenBatches(TextDataModule):
    """Training batches from a list instead of the text's."""

    batches: list[Batch]

    def train_dataloader(self):
        return Given(self.batches)


def given(corpus: Path, batches: list[Batch], batch_size: int) -> GivenBatches:
    data = GivenBatches(
        str(corpus), tokenizer="bytes", batch_size=batch_size, root=str(corpus.parent / "data"),
        block_size=T,
    )  # fmt: skip
    data.batches = batches
    return data


class FirstGradients(Callback):
    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []
        self.logged: list[float] = []

    def on_train_start(self, trainer, pl_module):
        def keep(*_):
            self.gradients = self.gradients or [p.grad.clone() for p in pl_module.parameters()]

        trainer.optimizers[0].register_step_post_hook(keep)  # what the step was made of

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.logged.append(float(trainer.callback_metrics["train/loss"]))


def block(seed: int, valid: int) -> Batch:
    ids = torch.randint(0, 256, (1, T), generator=torch.Generator().manual_seed(seed))
    targets = torch.full((1, T), IGNORE)
    targets[0, :valid] = ids[0, 1 : valid + 1]
    return Batch(ids, targets, valid)


def test_accumulation_weighs_parts_by_their_targets_and_logs_the_loss_of_all(tmp_path, corpus):
    """Parts with 3 and 1 targets make the step of one batch of 4, whose loss is what is logged."""
    three, one = block(1, 3), block(2, 1)
    both = Batch(torch.cat([three[0], one[0]]), torch.cat([three[1], one[1]]), 4)
    parts, whole = FirstGradients(), FirstGradients()
    accumulated = fit(
        tmp_path, corpus, 1, [parts], data=given(corpus, [three, one], 1),
        accumulate_grad_batches=2, gradient_clip_val=0,
    )  # fmt: skip
    fit(tmp_path, corpus, 1, [whole], data=given(corpus, [both], 2), gradient_clip_val=0)
    assert accumulated.trainer.global_step == 1
    for a, b in zip(parts.gradients, whole.gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-7)

    torch.manual_seed(0)
    module = make_module()
    module.trainer = accumulated.trainer
    module.configure_model()
    logits = module.gpt(both[0])
    loss = F.cross_entropy(logits.flatten(0, 1), both[1].flatten(), ignore_index=IGNORE)
    wanted = torch.autograd.grad(loss, list(module.gpt.parameters()))
    for a, b in zip(parts.gradients, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-7)
    assert parts.logged[-1] == pytest.approx(loss.item(), rel=1e-5)
    assert whole.logged[-1] == pytest.approx(loss.item(), rel=1e-5)


def test_a_step_without_any_target_leaves_the_model_alone(tmp_path, corpus):
    nothing = Batch(torch.ones(1, T, dtype=torch.int64), torch.full((1, T), IGNORE), 0)
    module = fit(
        tmp_path, corpus, 1, data=given(corpus, [nothing], 1),
        module=make_module(optimizer={"weight_decay": 0.0}),
    )  # fmt: skip
    torch.manual_seed(0)
    untrained = make_module()
    untrained.trainer = module.trainer
    untrained.configure_model()
    for a, b in zip(module.parameters(), untrained.parameters(), strict=True):
        assert torch.equal(a, b)


def test_document_borders_hide_earlier_documents_in_training_and_evaluation(tmp_path):
    corpus = tmp_path / "texts"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i:02}.txt").write_text(f"text {i} of many\n")

    def run(**options: bool) -> tuple[float, float]:
        data = TextDataModule(
            str(corpus), tokenizer="bytes", batch_size=4, root=str(tmp_path / "data"),
            block_size=T * 4, **options,
        )  # fmt: skip
        module = fit(tmp_path, corpus, 2, data=data,
                     module=make_module(config={"block_size": T * 4}),
                     val_check_interval=2)  # fmt: skip
        assert module.evaluation is not None
        metrics = module.trainer.callback_metrics
        return float(metrics["train/loss"]), module.evaluation.loss

    joined, apart = run(), run(document_borders=True)
    assert joined != apart

    # Evaluated apart, a document's loss is what it has alone.
    data = make_data(corpus, document_borders=True, block_size=T * 4)
    module = fit(tmp_path, corpus, 1, data=data, module=make_module(config={"block_size": T * 4}),
                 val_check_interval=1)  # fmt: skip
    assert module.evaluation is not None
    stream = data.prepared.val[0 : len(data.prepared.val)]
    nats, document = 0.0, [256]
    with torch.no_grad():
        for token in stream.tolist():
            document.append(token)
            if token == 256:
                ids = torch.tensor([document])
                nats += float(F.cross_entropy(module.gpt(ids[:, :-1])[0], ids[0, 1:],
                                              reduction="sum"))  # fmt: skip
                document = [256]
    blocks = len(stream) / (T * 4)
    # But for those that a block's border cuts in two: a few nats each.
    assert module.evaluation.nats == pytest.approx(nats, abs=3 * blocks)


def test_recomputed_activations_change_no_number(tmp_path, corpus):
    """Dropout included: the second time a block runs it drops the same."""

    def run(recompute: bool) -> list[torch.Tensor]:
        module = make_module(dropout=0.2, activation_checkpointing=recompute, config={"n_layer": 2})
        fit(tmp_path, corpus, 4, module=module)
        assert module.gpt.activation_checkpointing == recompute
        return [p.detach() for p in module.parameters()]

    for a, b in zip(run(False), run(True), strict=True):
        assert torch.equal(a, b)


def test_recomputing_keeps_fewer_activations(tmp_path, corpus):
    module = fit(tmp_path, corpus, 1, module=make_module(config={"n_layer": 3}))
    kept: dict[bool, int] = {}
    for recompute in (False, True):
        module.gpt.activation_checkpointing = recompute
        held: set[int] = set()

        def keep(tensor: torch.Tensor, held: set[int] = held) -> torch.Tensor:
            held.add(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module.gpt(torch.zeros(2, T, dtype=torch.int64)).sum()
        kept[recompute] = len(held)
    assert kept[True] < kept[False] / 2


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_loss_falls_in_bf16(tmp_path, corpus, precision):
    seen = FirstGradients()
    module = fit(tmp_path, corpus, 12, [seen], module=make_module(optimizer={"lr": 1e-2}),
                 precision=precision, val_check_interval=12)  # fmt: skip
    wanted = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert module.gpt.dtype == wanted
    assert seen.logged[-1] < seen.logged[0] - 0.3
    assert module.evaluation is not None
    assert module.evaluation.loss == pytest.approx(seen.logged[-1], abs=0.7)
