"""What `fit` costs over a bare loop that takes the same steps, and what the loader costs.

    python -m benchmarks.loop [--rounds 200 --steps 5 --milliseconds 40]

One process, one run of the real command with all that it does at a step (callbacks, progress, CSV,
TensorBoard, its checks), validations apart. Every few steps, before a batch, it stands still while
a bare PyTorch loop takes as many: the same weights to begin with, the same batches, the same
optimizer, clipping and schedule, nothing shown or kept. A slow spell so hits both, and what is
printed is the median of the differences of neighbours. In the end the weights of both must be the
same, or it was not the same work. The batch is chosen so that a bare step takes about 40 ms.

On a machine that is busy with other things, `--clock cpu` counts the process's own time, and needs
OMP_NUM_THREADS=1 to mean anything.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback

from gpt.bench.output import machine_facts, machine_line
from gpt.config import PRESETS, GPTConfig
from gpt.data.batches import Batch, TrainBlocks
from gpt.model import GPT
from gpt.training import cli
from gpt.training.module import GPTModule
from gpt.training.optim import OptimizerConfig, learning_rate, make_optimizer

CLIP = 1.0
WARM_UP = 2  # rounds that do not count


class Bare:
    """A training loop as one would write it by hand."""

    def __init__(
        self, model: GPT, blocks: TrainBlocks, optimizer: OptimizerConfig, total: int
    ) -> None:
        self.model = model
        self.batches = iter(blocks)
        self.settings, self.total = optimizer, total
        self.optimizer = make_optimizer(
            model.named_parameters(), optimizer, model.config, fused=True
        )
        self.step = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            ids, targets, _ = next(self.batches)
            nats = F.cross_entropy(
                self.model(ids).flatten(0, 1), targets.flatten(), reduction="sum"
            )
            self.optimizer.zero_grad()
            (nats / ids.numel()).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            rate = learning_rate(self.step, self.total, self.settings)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.step += 1


class Interleave(Callback):
    """Times blocks of steps of the run it is in, and of a bare loop between them.

    Args:
        steps: of one block.
        clock: seconds.
    """

    def __init__(self, steps: int, clock: Callable[[], float]) -> None:
        self.steps, self.clock = steps, clock
        self.bare: Bare | None = None
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.loading: list[float] = []
        self.same = False
        self._mark = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GPTModule)
        if self.bare is None:
            self._begin(trainer, pl_module)
        elif batch_idx % self.steps == 0:
            self._between()
        self._mark = self._mark or self.clock()

    def _begin(self, trainer: L.Trainer, module: GPTModule) -> None:
        model = GPT(module.config)
        model.load_state_dict(module.gpt.state_dict())
        self.bare = Bare(
            model, module.data.train_dataloader(), module.optimizer_config, trainer.max_steps
        )
        self._alone = iter(module.data.train_dataloader())

    def _between(self) -> None:
        assert self.bare is not None
        now = self.clock()
        self.ours.append(now - self._mark)
        self.bare.run(self.steps)
        then = self.clock()
        self.theirs.append(then - now)
        for _ in range(self.steps):
            next(self._alone)
        self.loading.append(self.clock() - then)
        self._mark = 0.0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self.bare is not None
        assert isinstance(pl_module, GPTModule)
        self.bare.run(trainer.max_steps - self.bare.step)
        pairs = zip(pl_module.gpt.parameters(), self.bare.model.parameters(), strict=True)
        self.same = all(torch.equal(ours, theirs) for ours, theirs in pairs)


def choose_batch(config: GPTConfig, milliseconds: float, clock: Callable[[], float]) -> int:
    """Blocks of a bare step that takes about so long."""
    tokens = torch.randint(config.vocab_size, (100_000,)).numpy()
    best, nearest = 1, float("inf")
    for batch in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        torch.manual_seed(0)
        blocks = TrainBlocks(tokens, block_size=config.block_size, batch_size=batch, seed=0)
        bare = Bare(GPT(config), blocks, OptimizerConfig(), 100)
        bare.run(3)
        taken = []
        for _ in range(7):
            began = clock()
            bare.run(1)
            taken.append(clock() - began)
        off = abs(statistics.median(taken) * 1e3 - milliseconds)
        if off < nearest:
            best, nearest = batch, off
    return best


def write_text(path: Path) -> None:
    """About half a megabyte of words."""
    pick = random.Random(0)
    words = ["".join(pick.choices("abcdefghijklmnop", k=pick.randint(2, 8))) for _ in range(500)]
    path.write_text("".join(" ".join(pick.choices(words, k=10)) + "\n" for _ in range(9000)))


def run_command(folder: Path, preset: str, batch: int, interleave: Interleave, total: int) -> None:
    """`fit`, with one callback more."""
    status = cli.main(
        ["fit", "--name", "loop", f"--runs_dir={folder}",
         f"--data.source={folder / 'text.txt'}", f"--data.root={folder / 'data'}",
         "--data.tokenizer=bytes",
         f"--data.batch_size={batch}", f"--model.preset={preset}", "--wandb=off",
         "--trainer.accelerator=cpu", f"--trainer.max_steps={total}",
         f"--trainer.gradient_clip_val={CLIP}", f"--trainer.val_check_interval={10**9}"],
        callbacks=[interleave],
    )  # fmt: skip
    assert status == 0, "fit failed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="nano", choices=PRESETS)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=5, help="steps of a round")
    parser.add_argument("--milliseconds", type=float, default=40.0, help="of a bare step")
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    args = parser.parse_args()
    clock = time.perf_counter if args.clock == "wall" else time.process_time

    config = GPTConfig.preset(args.preset).replace(vocab_size=257)
    batch = choose_batch(config, args.milliseconds, clock)
    interleave = Interleave(args.steps, clock)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_text(folder / "text.txt")
        total = (args.rounds + WARM_UP) * args.steps + 1
        run_command(folder, args.preset, batch, interleave, total)

    ours, theirs, loading = (
        [seconds * 1e3 / args.steps for seconds in each[WARM_UP:]]
        for each in (interleave.ours, interleave.theirs, interleave.loading)
    )
    over = [a - b for a, b in zip(ours, theirs, strict=True)]
    quarters = statistics.quantiles(over, n=4)
    bare, cost, load = map(statistics.median, (theirs, over, loading))
    same = "yes" if interleave.same else "NO"
    print(machine_line(machine_facts()))
    print(
        f"{args.preset}, {batch} blocks of {config.block_size} tokens, {len(over)} rounds of "
        f"{args.steps} steps each; the same weights in the end: {same}"
    )
    print(f"  bare loop   {bare:8.3f} ms a step")
    print(f"  fit         {statistics.median(ours):8.3f} ms a step")
    print(
        f"  difference  {cost:8.3f} ms, {cost / bare:.1%} of the bare step, "
        f"{cost / args.milliseconds:.1%} of {args.milliseconds:g} ms  "
        f"(quartiles {quarters[0]:.3f} to {quarters[2]:.3f} ms)"
    )
    print(f"  loader      {load:8.3f} ms a batch, {load / bare:.2%} of the bare step, in both")


if __name__ == "__main__":
    main()
