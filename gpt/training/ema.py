"""An exponential moving average of the weights: smoother than the last step's, often better.

Checkpoints follow the convention of Lightning's own callback, which only its later versions have:
`state_dict` holds the averaged weights, so that whatever opens the file gets those, and
`current_model_state` the ones that training goes on with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from gpt.errors import ConfigError
from gpt.training.sharding import is_sharded

TRAINED_KEY = "current_model_state"


class EMA(Callback):
    """Averages the weights after every step; validation, samples and the exported model use it.

    After n steps the decay is `min(decay, (1 + n) / (10 + n))`, so that the random weights of the
    beginning are soon forgotten however short the run. The average is kept in float32, since in
    bf16 a thousandth of a weight's change is lost.

    Args:
        decay: share of the average that a step leaves; 0.999 averages over about 1,000 steps.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self.weights: dict[str, Tensor] | None = None
        self._trained: dict[str, Tensor] | None = None  # while the average stands in their place

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raises ConfigError where the weights are spread over the processes."""
        if is_sharded(trainer.strategy):
            raise ConfigError(
                f"model.optimizer.ema_decay is {self.decay}, but trainer.strategy fsdp2 shards the "
                "weights, which cannot be averaged; use ddp, or set ema_decay to 0"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin with the weights at hand, unless a checkpoint brought an average."""
        if self.weights is None:
            self.weights = {n: p.detach().float().clone() for n, p in _parameters(pl_module)}
        else:
            self.weights = {n: self.weights[n].to(p.device) for n, p in _parameters(pl_module)}

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        assert self.weights is not None
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        now = [p.detach().float() for _, p in _parameters(pl_module)]
        torch._foreach_lerp_(list(self.weights.values()), now, 1 - decay)
        self.steps += 1

    # --- Standing in ----------------------------------------------------------------------------

    def swap_in(self, module: L.LightningModule) -> None:
        """Put the average into the model. The trained weights are kept to the bit."""
        if self.weights is None or self._trained is not None:
            return
        self._trained = {name: p.detach().clone() for name, p in _parameters(module)}
        _copy(self.weights, module)

    def swap_out(self, module: L.LightningModule) -> None:
        """Put the trained weights back."""
        if self._trained is not None:
            _copy(self._trained, module)
            self._trained = None

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.swap_in(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.swap_out(pl_module)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self.swap_out(pl_module)

    # --- Checkpoints ----------------------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.weights is None:
            return
        names = {id(p): name for name, p in _parameters(pl_module)}
        averaged, trained = dict(checkpoint["state_dict"]), dict(checkpoint["state_dict"])
        for key, p in pl_module.named_parameters(remove_duplicate=False):  # a tied one has two keys
            if key in averaged and id(p) in names:
                averaged[key] = self.weights[names[id(p)]].to(p.dtype)
                if self._trained is not None:
                    trained[key] = self._trained[names[id(p)]]
        checkpoint["state_dict"], checkpoint[TRAINED_KEY] = averaged, trained
        # Tensors that are the same in both places take up room in the file once.
        checkpoint["ema"] = {"steps": self.steps, "weights": dict(self.weights)}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if "ema" in checkpoint and trainer.state.fn == "fit":
            self.steps = checkpoint["ema"]["steps"]
            self.weights = {n: w.clone() for n, w in checkpoint["ema"]["weights"].items()}


def use_trained_weights(checkpoint: dict[str, Any]) -> None:
    """Make `state_dict` the weights that training goes on with, where they are not those already.

    Also for a run that no longer averages.
    """
    if TRAINED_KEY in checkpoint:
        checkpoint["state_dict"] = checkpoint[TRAINED_KEY]


@contextmanager
def averaged(trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
    """The model with its averaged weights, if the run averages them."""
    ema = next((c for c in trainer.callbacks if isinstance(c, EMA)), None)  # type: ignore[attr-defined]
    if ema is None or ema._trained is not None:
        yield
        return
    ema.swap_in(module)
    try:
        yield
    finally:
        ema.swap_out(module)


def _parameters(module: L.LightningModule) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


@torch.no_grad()
def _copy(weights: dict[str, Tensor], module: L.LightningModule) -> None:
    for name, p in _parameters(module):
        p.copy_(weights[name])
