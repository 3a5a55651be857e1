"""Lightning's training loop without its detours, where a run is of the common kind.

Lightning asks at every batch what cannot change in a run: which strategy, which precision, whether
a hook is overridden, who moves a batch, what profiler there is. Each answer takes a microsecond in
a cold cache, and a step needs hundreds. Here they are found once, and what is left is done in the
same order: hooks, counters, logging, checkpoints and numbers are those of Lightning's own loop, to
the bit. Where anything is out of the ordinary, Lightning's own code runs instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from gpt.training.lean import NOTHING, STEP_HOOKS, NoProfiler, is_empty_hook

KNOWN = ((2, 6),)
"""Versions of Lightning whose loop is the one that is shortened here."""

_OWN_STEPS = ("optimizer_step", "optimizer_zero_grad", "backward")
_OWN_PRECISION = (
    "pre_backward",
    "backward",
    "post_backward",
    "optimizer_step",
    "_wrap_closure",
    "_after_closure",
    "_clip_gradients",
)


@dataclass
class _Way:
    """How the batches of a run are gone through.

    Attributes:
        takes_index: whether `training_step` takes the number of the batch.
        arrive: puts a batch where the model is, in its precision.
        context: of the forward pass.
        callbacks: those of the trainer when it was last looked who has which hook.
        having: callbacks and at last the module, where they have more than an empty hook.
    """

    module: L.LightningModule
    takes_index: bool
    arrive: Callable[[Any], Any]
    context: Callable[[], AbstractContextManager[Any]]
    callbacks: list[Callback] = field(default_factory=list)
    having: dict[str, list[Callback | L.LightningModule]] = field(default_factory=dict)

    def look_for_hooks(self, trainer: L.Trainer) -> None:
        self.callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]  # a connector sets it
        owners: list[Callback | L.LightningModule] = [*self.callbacks, self.module]
        self.having = {
            name: [owner for owner in owners if not is_empty_hook(owner, name)]
            for name in STEP_HOOKS
        }


def common_way(trainer: L.Trainer, fetcher: _DataFetcher) -> _Way | None:
    """The way of a run of the common kind: one process, one optimizer that Lightning steps, no
    scaled gradients, no profiler; None if it is not."""
    strategy, module = trainer.strategy, trainer.lightning_module
    version = tuple(int(part) for part in L.__version__.split(".")[:2])
    if (
        version not in KNOWN
        or type(strategy) is not SingleDeviceStrategy
        or strategy.model is not module
        or type(trainer.profiler) not in (NoProfiler, PassThroughProfiler)  # type: ignore[attr-defined]  # as above
        or isinstance(fetcher, _DataLoaderIterDataFetcher)
        or not module.automatic_optimization
        or any(is_overridden(name, module) for name in _OWN_STEPS)
        or module._fabric is not None
        or not _is_plain(strategy.precision_plugin)
        or len(strategy.optimizers) != 1
        or strategy._lightning_optimizers[0]._optimizer is not strategy.optimizers[0]
    ):
        return None
    way = _Way(
        module,
        is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2),
        _arrival(trainer),
        _context(strategy.precision_plugin),
    )
    way.look_for_hooks(trainer)
    return way


def _is_plain(precision: Precision) -> bool:
    """Whether it does nothing around the backward pass and the optimizer's step."""
    kind = type(precision)
    if isinstance(precision, MixedPrecision) and kind is MixedPrecision:
        return precision.scaler is None
    return all(getattr(kind, name) is getattr(Precision, name) for name in _OWN_PRECISION)


def _context(precision: Precision) -> Callable[[], AbstractContextManager[Any]]:
    names = ("train_step_context", "forward_context")
    if all(getattr(type(precision), name) is getattr(Precision, name) for name in names):
        return lambda: NOTHING
    return precision.train_step_context


def _arrival(trainer: L.Trainer) -> Callable[[Any], Any]:
    precision, module = trainer.precision_plugin, trainer.lightning_module
    names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    selector = trainer._data_connector._datahook_selector
    assert selector is not None  # once a run has begun
    before, transfer, after = (selector.get_instance(name) for name in names)
    device = trainer.strategy.root_device
    simple = (
        type(precision).convert_input is Precision.convert_input
        and type(module)._apply_batch_transfer_handler
        is L.LightningModule._apply_batch_transfer_handler
        and not is_overridden(names[0], before)
        and not is_overridden(names[2], after)
    )

    def move(batch: Any) -> Any:
        return transfer.transfer_batch_to_device(batch, device, 0)

    def all_of_it(batch: Any) -> Any:
        batch = module._on_before_batch_transfer(precision.convert_input(batch), dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    return move if simple else all_of_it


class LeanEpochLoop(_TrainingEpochLoop):
    """Goes through the batches of an epoch."""

    _way: _Way | None = None
    _result: dict[str, Any]

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        self._way = common_way(self.trainer, data_fetcher)
        if self._way is not None:
            data_fetcher._start_profiler = data_fetcher._stop_profiler = _nothing

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Take one batch. The first after a resume is left to Lightning.

        Raises:
            StopIteration: there are no more, or a hook ended the epoch.
        """
        way = self._way
        if way is None or self._restarting or self.automatic_optimization._skip_backward:
            super().advance(data_fetcher)
            return
        trainer, progress = self.trainer, self.batch_progress
        if self.val_loop._restarting:
            self.val_loop.restarting = False
        batch, _, _ = next(data_fetcher)
        batch_idx = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        batch = way.arrive(batch)
        progress.increment_ready()
        self._begin_logging(batch)
        outputs: dict[str, Any] | None = None
        ends = False
        if batch is None:
            self._warning_cache.warn(
                "train_dataloader yielded None. If this was on purpose, ignore this warning..."
            )
        else:
            ends = self._call(way, "on_train_batch_start", batch, batch_idx) == -1
            if ends:
                progress.increment_by(0, is_last_batch=True)
            else:
                progress.increment_started()
                outputs = self._optimize(way, batch, batch_idx)
        progress.increment_processed()
        if trainer.lr_scheduler_configs:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self._num_ready_batches_reached():
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if ends:
            raise StopIteration
        self._call(way, "on_train_batch_end", outputs, batch, batch_idx)
        self._end_logging()
        progress.increment_completed()
        if self._results:
            trainer._logger_connector.update_train_step_metrics()

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Validate where that is due."""
        trainer = self.trainer
        if (
            self._way is None
            or trainer.should_stop
            or trainer.received_sigterm
            or trainer.lr_scheduler_configs
            or getattr(self, "_skip_next_val", False)
            or not self._is_far_from_validation()
        ):
            super().on_advance_end(data_fetcher)
            return
        if not self._should_accumulate():
            self._batches_that_stepped += 1

    def _is_far_from_validation(self) -> bool:
        """Whether the numbers of the batch alone say that it is not validated after this one."""
        trainer = self.trainer
        every = trainer.val_check_batch
        if not isinstance(every, int) or getattr(trainer, "_val_check_time_interval", None):
            return False
        endless = trainer.check_val_every_n_epoch is None
        done = self.total_batch_idx if endless else self.batch_idx
        return (done + 1) % every != 0

    # --- Hooks and what is logged ----------------------------------------------------------------

    def _call(self, way: _Way, name: str, *args: Any) -> Any:
        """The hook of each callback, then the module's, whose answer comes back.

        `log` asks the module which of them it is called from. That is set past the module's own
        `__setattr__`, which would look whether it is a parameter.
        """
        trainer, module = self.trainer, way.module
        if trainer.callbacks != way.callbacks:  # someone came or went
            way.look_for_hooks(trainer)
        facts = module.__dict__
        before = facts["_current_fx_name"]
        facts["_current_fx_name"] = name
        answer = None
        for owner in way.having[name]:
            hook = getattr(owner, name)
            if not callable(hook):
                continue
            if owner is module:
                answer = hook(*args)
            else:
                hook(trainer, module, *args)
        facts["_current_fx_name"] = before
        return answer

    def _begin_logging(self, batch: Any) -> None:
        connector, results = self.trainer._logger_connector, self._results
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch = batch
        results.batch_size = results.dataloader_idx = None

    def _end_logging(self) -> None:
        results = self._results
        if results:  # something was logged through the module
            self.trainer._logger_connector.on_batch_end()
        results.batch = results.batch_size = None

    # --- The step --------------------------------------------------------------------------------

    def _optimize(self, way: _Way, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Loss and gradients of a batch, and the optimizer's step if it is the last of one."""
        optimizer = self.trainer.optimizers[0]
        part = partial(self._part, way, optimizer, batch, batch_idx)
        if self._should_accumulate():
            with torch.enable_grad():
                part()
        else:
            steps = self.automatic_optimization.optim_progress.optimizer.step
            steps.increment_ready()
            facts = way.module.__dict__
            before, facts["_current_fx_name"] = facts["_current_fx_name"], "optimizer_step"
            optimizer.step(closure=partial(self._whole, way, optimizer, part))
            facts["_current_fx_name"] = before
            steps.increment_completed()
        result, self._result = self._result, {}
        return result

    def _whole(self, way: _Way, optimizer: Optimizer, part: Callable[[], Tensor | None]) -> Any:
        """What an optimizer does before it moves the weights."""
        trainer, module = self.trainer, way.module
        loss = part()
        self._call(way, "on_before_optimizer_step", optimizer)
        facts = module.__dict__
        before, facts["_current_fx_name"] = facts["_current_fx_name"], "configure_gradient_clipping"
        module.configure_gradient_clipping(
            optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )
        facts["_current_fx_name"] = before
        return loss

    def _part(self, way: _Way, optimizer: Optimizer, batch: Any, batch_idx: int) -> Tensor | None:
        """The gradients of one batch."""
        trainer, module = self.trainer, way.module
        facts = module.__dict__
        before, facts["_current_fx_name"] = facts["_current_fx_name"], "training_step"
        with way.context():
            args = (batch, batch_idx) if way.takes_index else (batch,)
            output = module.training_step(*args)
        facts["_current_fx_name"] = before
        found = self._found(output)
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._zero_gradients(way, optimizer, batch_idx)
        if found.closure_loss is None:
            Closure.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
            self._result = {}
            return None
        facts["_current_fx_name"] = "backward"
        self._call(way, "on_before_backward", found.closure_loss)
        found.closure_loss.backward()  # type: ignore[no-untyped-call]  # torch gives it none
        self._call(way, "on_after_backward")
        facts["_current_fx_name"] = before
        self._result = found.asdict()
        return found.loss

    def _found(self, output: Any) -> ClosureResult:
        parts = self.trainer.accumulate_grad_batches
        if parts == 1 and isinstance(output, Tensor):
            return ClosureResult(output)  # there is nothing to divide by
        return ClosureResult.from_training_step_output(output, parts)

    def _zero_gradients(self, way: _Way, optimizer: Optimizer, batch_idx: int) -> None:
        times = self.automatic_optimization.optim_progress.optimizer.zero_grad
        times.increment_ready()
        self._call(way, "on_before_zero_grad", optimizer)
        times.increment_started()
        optimizer.zero_grad()
        times.increment_completed()


def _nothing() -> None:
    pass


class LeanTrainer(L.Trainer):
    """A Lightning trainer with the lean loop, whose two most wanted numbers are near at hand."""

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        loop = self.fit_loop.epoch_loop
        if type(loop) is _TrainingEpochLoop:
            # It is made into one, not replaced: its limits, its state and whoever holds it stay.
            loop.__class__ = LeanEpochLoop
        return super()._run(*args, **kwargs)

    @property
    def training(self) -> bool:
        """Whether it trains. Lightning compares the names of stages, whatever their case, and asks
        fourteen times a step."""
        return self.state.stage is RunningStage.TRAINING

    @training.setter
    def training(self, value: bool) -> None:
        if value or self.training:
            self.state.stage = RunningStage.TRAINING if value else None

    @property
    def global_step(self) -> int:
        """Optimizer steps taken. Lightning asks first whether the module takes them itself."""
        done = self.fit_loop.epoch_loop.automatic_optimization.optim_progress
        return done.optimizer.step.total.completed
