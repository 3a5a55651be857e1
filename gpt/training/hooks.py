"""Sparing the training loop the calls to hooks that do nothing."""

from __future__ import annotations

from collections.abc import Iterable

import lightning as L
from lightning.pytorch.callbacks import Callback

STEP_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""What Lightning calls at every step, of the module and of each callback."""


def skip_empty_hooks(callbacks: Iterable[Callback], module: L.LightningModule) -> None:
    """Take away the step hooks that a callback or the module only inherits.

    Lightning opens a profiler's context around every hook of every callback, the empty ones
    included: a hundred a step, a millisecond on a slow core. It leaves out what is no function.
    """
    for callback in callbacks:
        _skip(callback, Callback)
    _skip(module, L.LightningModule)


def _skip(owner: Callback | L.LightningModule, base: type) -> None:
    for name in STEP_HOOKS:
        if getattr(type(owner), name) is getattr(base, name):
            setattr(owner, name, None)
