"""Stops a run whose loss is no longer a number, or has exploded, and says where to look."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections import deque
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from gpt.data.batches import TrainBlocks
from gpt.errors import ConfigError, UserError
from gpt.files import write_atomically
from gpt.training.module import GPTModule
from gpt.training.run import RunFolder
from gpt.training.throughput import is_logging_step

WINDOW = 100
"""Steps whose median is what a loss is compared with."""
WARM = 20
"""Steps that must have gone well before any is called an explosion."""
MARGIN = 1.0
"""Nats: below it, a loss near zero would explode by noise alone."""
SHOWN = 4


class DivergedError(UserError):
    """Training went off: the loss is no longer a number, or far above what it was."""


class _Step(NamedTuple):
    """An optimizer step to be looked at. Its batch begins with the block `first` of the run's
    order."""

    number: int
    first: int
    end: int
    loss: Tensor
    norm: Tensor | None


class LossGuard(Callback):
    """Stops a run at a loss or gradient that is not finite, and at a loss that has exploded.

    A loss has exploded when it was above `factor` times the median of the last 100 good steps plus
    1 nat for `patience` steps on end; single spikes pass. No such state is ever saved. The numbers
    are read after every step on a CPU, and elsewhere at the logging steps and before a checkpoint,
    since reading waits for the device.

    Args:
        enabled: false lets everything pass; a state that is not finite still is not saved.
        factor: of the median; null lets explosions pass.
        patience: steps on end that must be above.
    """

    def __init__(
        self, enabled: bool = True, factor: float | None = 1.5, patience: int = 10
    ) -> None:
        if factor is not None and not (math.isfinite(factor) and factor >= 1):
            raise ConfigError(f"guard.factor is {factor}, but must be at least 1, or null")
        if patience < 1:
            raise ConfigError(f"guard.patience is {patience}, but must be at least 1")
        self.enabled = enabled
        self.factor = factor
        self.patience = patience
        self.run: RunFolder | None = None
        """Where the list of the batch's blocks is left; the trainer's command line gives it."""
        self.last_good = "there is no checkpoint of this run yet"
        self._good: deque[float] = deque(maxlen=WINDOW)
        self._above = 0
        self._pending: list[_Step] = []
        self._next_block = 0

    def state_dict(self) -> dict[str, Any]:
        return {"good": list(self._good), "above": self._above}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._good.extend(state_dict["good"])
        self._above = state_dict["above"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._next_block = _loader(trainer).state_dict()["blocks_drawn"]

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self.enabled or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        assert isinstance(pl_module, GPTModule)
        assert pl_module.step_loss is not None
        first, self._next_block = self._next_block, _loader(trainer).state_dict()["blocks_drawn"]
        self._pending.append(
            _Step(
                trainer.global_step,
                first,
                self._next_block,
                pl_module.step_loss,
                pl_module.gradient_norm,
            )
        )
        if pl_module.device.type == "cpu" or is_logging_step(trainer):
            self.check(trainer)

    def check(self, trainer: L.Trainer) -> None:
        """Look at the steps since the last look.

        Raises:
            DivergedError: one of them went off; it is the first that did.
        """
        steps, self._pending = self._pending, []
        for step, (loss, norm) in zip(steps, _numbers(steps, trainer), strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {norm}"
                self._stop(trainer, step, what)
            usual = self._usual(loss)
            if self.factor is None or loss <= self.factor * usual + MARGIN:
                self._good.append(loss)
                self._above = 0
                continue
            self._above += 1
            if self._above >= self.patience:
                self._stop(
                    trainer, step, f"loss is {loss:.4g} after {self._above} steps far above the "
                    f"usual {usual:.4g}", off_switch=" (guard.factor null would let it pass)",
                )  # fmt: skip

    def _usual(self, loss: float) -> float:
        """What a loss is compared with; where it is no explosion beside the smallest, that."""
        if len(self._good) < WARM or self.factor is None:
            return math.inf
        smallest = min(self._good)
        if loss <= self.factor * smallest + MARGIN:
            return smallest  # the median, which has to be sorted for, would say the same
        return statistics.median(self._good)

    def check_state(self, module: L.LightningModule, step: int) -> None:
        """Raises DivergedError if a weight is not finite: such a state must not be saved."""
        # After an evaluation FSDP2 keeps the weights of the outermost part whole until the next
        # step, and a norm is of whole ones or of sharded ones.
        kinds: dict[type[Tensor], list[Tensor]] = {}
        for weight in module.parameters():
            kinds.setdefault(type(weight.data), []).append(weight.detach())
        norms = [float(_whole(torch.nn.utils.get_total_norm(same))) for same in kinds.values()]
        if not all(map(math.isfinite, norms)):
            raise DivergedError(
                f"some weights are not finite at step {step}: training diverged, and this state is "
                f"not saved; {self.last_good}. {_ADVICE}"
            )

    def _stop(self, trainer: L.Trainer, step: _Step, what: str, off_switch: str = "") -> None:
        loader = _loader(trainer)
        blocks = [
            {"block": n, "epoch": n // loader.blocks_per_epoch, "start": block_start(loader, n)}
            for n in range(step.first, step.end)
        ]
        module = trainer.lightning_module
        assert isinstance(module, GPTModule)
        folder = shlex.quote(str(module.data.prepared.folder))
        starts = ", ".join(str(block["start"]) for block in blocks[:SHOWN])
        listed = ""
        if len(blocks) > SHOWN:
            starts += ", …"
            if self.run is not None and trainer.is_global_zero:
                path = self.run.path / "diverged.json"
                found = {"step": step.number, "what": what, "block_size": loader.block_size}
                write_atomically(path, json.dumps({**found, "blocks": blocks}, indent=1).encode())
                listed = f"; all in {path}"
        raise DivergedError(
            f"the {what} at step {step.number}: training diverged. Its batch is blocks "
            f"{step.first} to {step.end - 1} (epoch {blocks[0]['epoch']}): {loader.block_size} "
            f"training tokens each from {starts}{listed}; look with: antiphon data inspect "
            f"{folder} --at {blocks[0]['start']}. Nothing of it was saved; "
            f"{self.last_good}. {_ADVICE}{off_switch}"
        )


_ADVICE = (
    "Lower model.optimizer.lr or raise model.optimizer.warmup_steps, then start again, or go on "
    "from there with --resume"
)


def block_start(loader: TrainBlocks, number: int) -> int:
    """The training token at which a block of the run's order starts."""
    epoch, place = divmod(number, loader.blocks_per_epoch)
    return int(loader.cuts(epoch)[place])


def _loader(trainer: L.Trainer) -> TrainBlocks:
    loader = trainer.train_dataloader
    assert isinstance(loader, TrainBlocks)
    return loader


def _whole(value: Tensor) -> Tensor:
    """A sharded number put together; all processes do it at once."""
    if type(value) is Tensor:
        return value  # at once: it is asked at every step
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _numbers(steps: list[_Step], trainer: L.Trainer) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step: one wait for the device, one exchange of processes."""
    if not steps:
        return []
    if len(steps) == 1 and trainer.world_size == 1:
        loss, norm = steps[0].loss, steps[0].norm
        return [(float(loss), 0.0 if norm is None else float(_whole(norm)))]
    device = trainer.strategy.root_device
    losses = torch.stack([step.loss.to(device).double() for step in steps])
    if trainer.world_size > 1:
        losses = trainer.strategy.reduce(losses, reduce_op="mean")
    norms = [
        torch.zeros_like(losses[0]) if step.norm is None else _whole(step.norm).to(losses)
        for step in steps
    ]
    both: list[tuple[float, float]] = list(
        map(tuple, torch.stack([losses, torch.stack(norms)], dim=1).tolist())
    )
    return both
