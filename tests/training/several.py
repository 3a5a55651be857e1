"""Trains a tiny model in one or more processes; run by the tests as a script.

python -m tests.training.several FOLDER CORPUS --strategy ddp --devices 2 --accumulate 2 …
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback

from gpt.data.batches import Batch, TrainBlocks
from gpt.evaluation import IGNORE
from gpt.training.callbacks import FinalValidation
from gpt.training.diagnosis import Diagnosis
from tests.training.small import make_data, make_module, make_trainer


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.batches: list[list[int]] = []
        self.untrained: float | None = None

    def on_validation_end(self, trainer, pl_module):
        if trainer.sanity_checking:
            self.untrained = pl_module.evaluation.nats

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch[0][:, 0].tolist())
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.losses.append(float(trainer.callback_metrics["train/loss"]))


class Ragged:
    """Of each block as many targets as its first token says: any share of them, and the same ones
    however the blocks are spread over processes and parts."""

    def __init__(self, blocks: TrainBlocks) -> None:
        self.blocks = blocks
        self.state_dict, self.load_state_dict = blocks.state_dict, blocks.load_state_dict

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Batch]:
        for ids, targets, _ in self.blocks:
            kept = torch.arange(ids.shape[1]) < (ids[:, :1] % (ids.shape[1] + 1))
            yield Batch(ids, torch.where(kept, targets, IGNORE), int(kept.sum()))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ragged", action="store_true", help="leave out some targets")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    module = make_module(config={"n_layer": 2, "n_head": 2}, optimizer={"kind": args.optimizer})
    data = make_data(args.corpus, batch_size=args.batch_size)
    if args.ragged:
        data.train_dataloader = lambda: Ragged(type(data).train_dataloader(data))
    losses, diagnosis = Losses(), Diagnosis(2)
    diagnosis.path = args.folder / "diagnosis.jsonl"
    trainer = make_trainer(
        args.folder, args.steps, [losses, FinalValidation(), diagnosis],
        strategy=args.strategy, devices=args.devices,
        accumulate_grad_batches=args.accumulate, num_sanity_val_steps=-1,
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=args.resume)
    trainer.save_checkpoint(args.folder / "end.ckpt")
    assert module.evaluation is not None
    found = {
        "losses": losses.losses,
        "batches": losses.batches,
        "untrained": losses.untrained,
        "evaluation": module.evaluation.nats,
    }
    (args.folder / f"found-{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
