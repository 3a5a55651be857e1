"""Lightning's loop with less to do at a step: what is here changes no number, only the time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PassThroughProfiler

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

    Lightning calls every hook of every callback, the empty ones included: a hundred a step, a
    millisecond on a slow core. It leaves out what is no function.
    """
    owners: list[Callback | L.LightningModule] = [*callbacks, module]
    for owner in owners:
        for name in STEP_HOOKS:
            if is_empty_hook(owner, name):
                setattr(owner, name, None)


def is_empty_hook(owner: Callback | L.LightningModule, name: str) -> bool:
    """Whether a step hook is only inherited, or was taken away."""
    base = Callback if isinstance(owner, Callback) else L.LightningModule
    hook = getattr(owner, name)
    return hook is None or getattr(hook, "__func__", None) is getattr(base, name)


F = TypeVar("F", bound=Callable[..., object])


def with_signature_at_hand(function: F) -> F:
    """Work a function's signature out once, for `inspect` to find: Lightning asks at every step
    whether `training_step` takes the number of the batch."""
    function.__dict__["__signature__"] = inspect.signature(function)
    return function


class _Nothing:
    """A context in which nothing happens."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


NOTHING = _Nothing()


class NoProfiler(PassThroughProfiler):
    """Measures nothing, with one context for everything.

    Lightning's own makes a generator for each hook: thirty a step, a dozen calls each.
    """

    def profile(self, action_name: str) -> _Nothing:  # type: ignore[override]  # any context does
        """The context for what is not measured."""
        return NOTHING
