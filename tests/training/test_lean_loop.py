from __future__ import annotations

import inspect
import shutil

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException

from gpt.training import lean_loop
from gpt.training.lean import NoProfiler
from gpt.training.lean_loop import LeanEpochLoop, LeanTrainer
from gpt.training.loggers import MetricsCSV
from gpt.training.module import GPTModule
from gpt.training.train_cli import TRAINER_DEFAULTS
from tests.training.small import make_data, make_module

STEP_STATES = ("on_save_checkpoint", "state_dict", "state_key", "on_load_checkpoint")
HOOKS = [
    name
    for name, hook in inspect.getmembers(Callback, inspect.isfunction)
    if name.startswith("on_") and name not in STEP_STATES
]


class Records(Callback):
    """Notes every hook with what it was given and what Lightning says of the run in it, and logs
    now and then."""

    def __init__(self):
        self.calls = []

    def note(self, name, trainer, module, args):
        loop = trainer.fit_loop.epoch_loop
        self.calls.append((
            name, module._current_fx_name, trainer.global_step, trainer.state.stage,
            loop.state_dict(), trainer.is_last_batch, trainer._logger_connector._first_loop_iter,
            torch.is_grad_enabled(), tuple(plain(arg) for arg in args),
        ))  # fmt: skip
        if name == "on_train_batch_end" and trainer.global_step % 2:
            module.log("mine", float(args[2]), on_step=True, on_epoch=True)


def recording(name):
    def hook(self, trainer, module, *args):
        self.note(name, trainer, module, args)

    return hook


for each in HOOKS:
    setattr(Records, each, recording(each))


def plain(value):
    """What can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, torch.optim.Optimizer):
        return [
            value.param_groups[0]["lr"],
            [p.grad is None for p in value.param_groups[0]["params"]],
        ]
    return repr(value) if isinstance(value, BaseException) else value


def run(kind, folder, module, loaders, steps, ckpt_path=None, callbacks=(), **options):
    """Train, and everything that came of it."""
    records = Records()
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    settings = {
        **TRAINER_DEFAULTS, "accelerator": "cpu", "logger": MetricsCSV(folder / "metrics.csv"),
        "max_steps": steps, "enable_progress_bar": False, "log_every_n_steps": 2,
        "default_root_dir": str(folder), "callbacks": [*callbacks, records, saves], **options,
    }  # fmt: skip
    trainer = kind(**settings)
    trainer.fit(module, ckpt_path=ckpt_path, **loaders)
    saved = {
        path.name: plain(torch.load(path, weights_only=False))
        for path in sorted(folder.glob("*.ckpt"))
    }
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    rows = (folder / "metrics.csv").read_text()
    return trainer, (saved, records.calls, metrics, rows, plain(dict(module.state_dict())))


def both(tmp_path, make, steps, resume=None, **options):
    """The same training with Lightning's own trainer and the lean one; what came of each."""
    found = []
    if resume is not None:
        resume = shutil.copy(resume, tmp_path / "from.ckpt")
    for kind, profiler in ((L.Trainer, None), (LeanTrainer, NoProfiler())):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        torch.manual_seed(0)
        module, loaders = make()
        trainer, outcome = run(
            kind, folder, module, loaders, steps, profiler=profiler,
            ckpt_path=resume, **options,
        )  # fmt: skip
        found.append(outcome)
    assert type(trainer.fit_loop.epoch_loop) is LeanEpochLoop
    return trainer, found


def assert_same(found):
    own, lean = found
    for ours, theirs in zip(lean[1], own[1], strict=True):
        assert ours == theirs
    for ours, theirs in zip(lean, own, strict=True):
        assert ours == theirs
    assert own[0]
    assert own[1]


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.05},
        {"accumulate_grad_batches": 2, "precision": "bf16-mixed"},
        {"precision": "bf16-true", "gradient_clip_algorithm": "value"},
    ],
    ids=lambda options: "-".join(options),
)
def test_it_trains_as_lightning_does_to_the_bit(tmp_path, corpus, options):
    def make():
        return make_module(dropout=0.2), {"datamodule": make_data(corpus)}

    options["val_check_interval"] = 4
    trainer, found = both(tmp_path, make, 5, **options)
    assert trainer.fit_loop.epoch_loop._way is not None
    assert_same(found)
    assert "on_validation_end" in {call[0] for call in found[0][1]}
    (middle,) = (tmp_path / "run").glob("step=3.ckpt")
    _, resumed = both(tmp_path, make, 5, resume=middle, **options)
    assert_same(resumed)
    assert resumed[1][-1] == found[1][-1]


class Users(L.LightningModule):
    """Does what users' modules do and ours does not."""

    def __init__(self, ends_at=None, returns=None):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.ends_at, self.returns = ends_at, returns
        self.calls = []

    def training_step(self, batch):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        if self.returns == "nothing" and self.global_step == 1:
            return None
        return {"loss": loss, "more": batch.sum()} if self.returns == "more" else loss

    def validation_step(self, batch):
        self.log("val", self.layer(batch).mean())

    def on_train_batch_start(self, batch, batch_idx):
        self.calls.append(("start", self._current_fx_name))
        return -1 if batch_idx == self.ends_at else None

    def on_before_zero_grad(self, optimizer):
        self.calls.append(("zero", self._current_fx_name))

    def on_before_backward(self, loss):
        self.calls.append(("before", loss.item(), self._current_fx_name))

    def on_after_backward(self):
        self.calls.append(("after", self._current_fx_name))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.calls.append(("end", plain(outputs), self._current_fx_name))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch * 2

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Stops(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step >= 3


@pytest.mark.parametrize(
    "case", [{}, {"ends_at": 3}, {"returns": "more"}, {"returns": "nothing"}, {"stops": True}],
    ids=str,
)  # fmt: skip
def test_what_users_do_is_done(tmp_path, case):
    modules = []

    def make():
        modules.append(Users(case.get("ends_at"), case.get("returns")))
        data = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2)
        held = torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=2)
        return modules[-1], {"train_dataloaders": data, "val_dataloaders": held}

    _, found = both(
        tmp_path, make, 8, val_check_interval=3, max_epochs=3, accumulate_grad_batches=1,
        callbacks=[Stops()] if case.get("stops") else [],
    )  # fmt: skip
    assert_same(found)
    assert modules[0].calls == modules[1].calls
    assert modules[0].calls


class StepsItself(GPTModule):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.stepped = True
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("why", ["optimizer_step", "profiler", "version", "scaler"])
def test_what_is_out_of_the_ordinary_is_left_to_lightning(tmp_path, corpus, why, monkeypatch):
    module, options = make_module(), {"profiler": NoProfiler()}
    if why == "optimizer_step":
        module.__class__ = StepsItself
    elif why == "profiler":
        options["profiler"] = "simple"
    elif why == "version":
        monkeypatch.setattr(lean_loop, "KNOWN", ((1, 0),))
    else:
        options["plugins"] = [MixedPrecision("16-mixed", "cpu")]
    trainer = LeanTrainer(
        **TRAINER_DEFAULTS, accelerator="cpu", logger=False, max_steps=2,
        enable_progress_bar=False, enable_checkpointing=False, default_root_dir=str(tmp_path),
        limit_val_batches=0, **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=make_data(corpus))
    assert trainer.global_step == 2
    assert trainer.fit_loop.epoch_loop._way is None
    assert getattr(module, "stepped", False) == (why == "optimizer_step")


class Ends(Callback):
    """Ends the run in its third step, as an error or a signal would."""

    def __init__(self, how):
        self.how = how

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 2 and self.how == "error":
            raise ValueError("stop here")
        trainer._signal_connector.received_sigterm = trainer.global_step == 2


@pytest.mark.parametrize("how", ["error", "signal"])
def test_an_end_within_a_step_leaves_the_counters_as_lightning_does(tmp_path, corpus, how):
    states = []
    for kind in (L.Trainer, LeanTrainer):
        trainer = kind(
            **TRAINER_DEFAULTS, accelerator="cpu", logger=False, max_steps=4,
            enable_progress_bar=False, enable_checkpointing=False, callbacks=[Ends(how)],
            default_root_dir=str(tmp_path), profiler=NoProfiler(),
        )  # fmt: skip
        module = make_module()
        with pytest.raises(ValueError if how == "error" else SIGTERMException):
            trainer.fit(module, datamodule=make_data(corpus))
        states.append((trainer.fit_loop.state_dict(), module._current_fx_name))
    assert states[0] == states[1]
    assert type(trainer.fit_loop.epoch_loop) is LeanEpochLoop
