"""TrainCLI: what the trainer's command line is made of, and how a run is put together from it.

Flags win over the YAML file, the YAML file over the preset that it names, the preset over the
defaults. A preset that is a flag wins over the file too. Nothing that a checkpoint remembers
overrides what is given here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import ActionYesNo
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger

from gpt.checkpoint import LoadedModel
from gpt.config import GPTConfig
from gpt.errors import ConfigError, UserError
from gpt.evaluation import describe
from gpt.files import write_atomically
from gpt.lora import LoRAConfig
from gpt.training.base import defaults_from, open_base
from gpt.training.callbacks import FinalValidation, SampleText, StopCleanly
from gpt.training.checkpoints import CheckpointSchedule, ExportModel, RunCheckpoints, is_trial
from gpt.training.checks import (
    check_endless,
    check_precision,
    check_same_groups,
    check_steps_left,
    tell_of_earlier_run,
)
from gpt.training.command import command_of
from gpt.training.data import TextDataModule
from gpt.training.diagnosis import Diagnosis
from gpt.training.early_stopping import StopEarly
from gpt.training.ema import EMA
from gpt.training.exactness import SETTINGS_KEY
from gpt.training.finetune import BaseValidation, begin_with
from gpt.training.guard import LossGuard
from gpt.training.lean import NoProfiler, skip_empty_hooks
from gpt.training.loggers import (
    MetricsCSV,
    Wandb,
    WandbRunId,
    finish_wandb,
    make_wandb_logger,
    wandb_mode,
)
from gpt.training.lr_find import RangeTrainer, check_range, fit_arguments, range_options
from gpt.training.memory import MemoryCheck
from gpt.training.module import GPTModule
from gpt.training.parser import (
    describe_subcommands,
    gives_preset,
    with_preset,
)
from gpt.training.progress import RunProgress, say
from gpt.training.record import RunRecord
from gpt.training.run import RunFolder
from gpt.training.storage import find_last_good, read_checkpoint
from gpt.training.tensorboard import TensorBoard
from gpt.training.throughput import Throughput

MAX_SEED = 2**32 - 1  # numpy's

TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": -1,  # a run's length is max_steps
    "val_check_interval": 250,
    "check_val_every_n_epoch": None,  # count batches through, there is one endless epoch
    "log_every_n_steps": 10,
    "gradient_clip_val": 1.0,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
    "use_distributed_sampler": False,  # the loaders share the blocks out themselves
}


class SaveRunConfig(SaveConfigCallback):
    """Writes `config.yaml` into the run's folder: given back to `fit`, it repeats the run.

    Not before training starts: until then the text or the checkpoint may be refused, and what an
    earlier run left in the folder must be there still.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Nothing yet; Lightning would save here."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and not is_trial(trainer):
            if self.config.ckpt_path is None:
                RunFolder(Path(self.config.runs_dir), self.config.name).samples.unlink(
                    missing_ok=True
                )
            self.save_config(trainer, pl_module, "fit")

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        config = self.config.clone()
        # Repeating a resumed run means doing all of it.
        config.ckpt_path, config.resume = None, False
        path = RunFolder(Path(config.runs_dir), config.name).config
        write_atomically(path, self.parser.dump(config, skip_none=False).encode())


class TrainCLI(LightningCLI):
    """Adds the run's folder, presets, shipped configs, samples and loggers to LightningCLI."""

    stop: StopCleanly | None = None
    base: LoadedModel | None = None
    resume_from: Path | None = None
    steps_done = 0

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        own = {"model", "datamodule", "weights_only", "verbose"}
        loaders = {"dataloaders", "train_dataloaders", "val_dataloaders"}
        return dict.fromkeys(("fit", "validate", "test", "lr-find"), own | loaders)

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Lightning would list them with what its own docstrings say."""
        super()._add_subcommands(parser, **kwargs)
        describe_subcommands(parser)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--seed_everything",
            type=int,
            default=1337,
            help="Seed of weights, data order, dropout.",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--name",
            type=str | None,
            default=None,
            help="The run's name and folder; null: the config file's name.",
        )
        parser.add_argument("--runs_dir", type=str, default="runs", help="Folder of all runs.")
        parser.add_argument(
            "--wandb",
            type=Wandb,
            default="auto",
            help="Weights & Biases: auto uses it where a key or WANDB_MODE=offline is set; "
            "on without a key records offline.",
        )
        parser.add_argument(
            "--tensorboard",
            type=bool,
            default=True,
            help="Write curves and samples for TensorBoard into the run's folder.",
        )
        parser.add_argument(
            "--resume",
            action=ActionYesNo,
            default=False,
            help="Go on with the last good checkpoint of this run, if it has one; else begin. The "
            "same command can be given again after a crash.",
        )
        parser.add_class_arguments(CheckpointSchedule, "checkpoint")
        parser.add_lightning_class_args(LossGuard, "guard")
        parser.add_lightning_class_args(SampleText, "samples")
        parser.add_lightning_class_args(Diagnosis, "diagnosis")
        parser.add_lightning_class_args(StopEarly, "early_stopping")
        parser.link_arguments("seed_everything", "data.seed")

    # --- Parsing --------------------------------------------------------------------------------

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse twice if a preset is named: its values become the defaults of the second time."""
        self.arguments = list(args)
        showing = [word for word in args if word.partition("=")[0] == "--print_config"]
        # Shown is what the second time makes of it.
        self.config = parser.parse_args([word for word in args if word not in showing])
        given = self.config[self.config.subcommand]
        if given.model.preset is not None:
            values = GPTConfig.preset(given.model.preset).to_dict()
            self._subcommand_parsers[self.config.subcommand].set_defaults(
                {f"model.config.{name}": value for name, value in values.items()}
            )
            if gives_preset(self.arguments):
                args = with_preset(self.arguments, given.model.preset)
        if given.model.init_from is not None:
            self._take_from_base(given.model)
        if showing or given.model.preset is not None or given.model.init_from is not None:
            self.config = parser.parse_args(args)
            given = self.config[self.config.subcommand]
        if not 0 <= given.seed_everything <= MAX_SEED:
            raise ConfigError(
                f"seed_everything is {given.seed_everything}, but must be in 0 to {MAX_SEED}"
            )
        if given.name is None:
            given.name = Path(str(given.config[-1])).stem if given.get("config") else "run"

    def _take_from_base(self, model: Any) -> None:
        """Make what the model to begin with is the defaults. It may be gone when a run is resumed,
        whose config.yaml says all of it; if it is needed, `begin_with` says what is missing."""
        if Path(model.init_from).exists():
            self.base = open_base(model.init_from)
        defaults = defaults_from(self.base, model.init_from, LoRAConfig(**model.lora.as_dict()))
        self._subcommand_parsers[self.config.subcommand].set_defaults(defaults)

    def _parse_ckpt_path(self) -> None:
        """Lightning would let a checkpoint's hyperparameters override the flags."""

    # --- Building -------------------------------------------------------------------------------

    @property
    def run_folder(self) -> RunFolder:
        given = self.config[self.subcommand]
        return RunFolder(Path(given.runs_dir), given.name)

    def before_instantiate_classes(self) -> None:
        trainer = self.config[self.subcommand].trainer
        check_precision(trainer.precision, trainer.accelerator)
        check_endless(trainer)
        config = self.config[self.subcommand]
        given = config.ckpt_path
        if config.resume:
            if given is not None:
                raise ConfigError(f"--resume and --ckpt_path {given} are both given; give one")
            if self.subcommand != "fit":
                raise ConfigError("--resume is for fit; to measure the newest, --ckpt_path last")
            self.resume_from = self._last_good()
            config.ckpt_path = None if self.resume_from is None else str(self.resume_from)
        elif self.subcommand == "fit":
            self.resume_from = None if given is None else self.run_folder.checkpoint(str(given))
        elif self.subcommand == "lr-find":
            check_range(
                config.min_lr, config.max_lr, config.steps, given, trial=trainer.fast_dev_run
            )
        else:
            self.resume_from = self.run_folder.checkpoint("best" if given is None else str(given))

    def _last_good(self) -> Path | None:
        found, problems = find_last_good(self.run_folder)
        for problem in problems:
            say(problem)
        if found is None:
            why = "no whole checkpoint of its own" if problems else "it has no checkpoint"
            say(f"nothing to resume in {self.run_folder.path}: {why}; starting from the beginning")
        return found

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        given = self._get(self.config_init, "trainer")
        self.model.run_name = self.run_folder.name
        begin_with(self.model, self.datamodule, self.base, self.resume_from)
        self.base = None
        bar: list[Callback] = []
        if given.get("enable_progress_bar") is not False:
            bar.append(RunProgress())
        own: dict[str, Any] = {"default_root_dir": str(self.run_folder.path)}
        if self.subcommand == "fit":
            callbacks, loggers = self._fit_parts(bar)
            own["logger"] = [*loggers, *_as_list(given.get("logger"))]
        else:
            callbacks = bar
            own |= {"logger": False, "enable_checkpointing": False}
        if given.get("profiler") is None:
            own["profiler"] = NoProfiler()
        own["callbacks"] = [*_as_list(given.get("callbacks")), *callbacks]
        try:
            if self.subcommand == "lr-find":
                # Without what belongs to a run: it would be written over, or stop the sweep.
                own |= {**range_options(self.config[self.subcommand].steps), "callbacks": bar}
                return RangeTrainer(**{**given, **own, **kwargs})
            trainer = super().instantiate_trainer(**own, **kwargs)
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise ConfigError(
                f"trainer.accelerator is {given.accelerator}, trainer.devices {given.devices}, "
                f"trainer.strategy {given.strategy}, which cannot be had here (auto takes what "
                f"there is): {error}"
            ) from None
        skip_empty_hooks(trainer.callbacks, self.model)  # type: ignore[attr-defined]
        return trainer

    def _fit_parts(self, bar: list[Callback]) -> tuple[list[Callback], list[Logger]]:
        run = self.run_folder
        checkpoint = read_checkpoint(self.resume_from) if self.resume_from else None
        self.steps_done = 0 if checkpoint is None else int(checkpoint["global_step"])
        if not self._get(self.config_init, "trainer").fast_dev_run:
            self._get(self.config_init, "samples").path = run.samples
            self._get(self.config_init, "diagnosis").path = run.path / "diagnosis.jsonl"
        if checkpoint is not None:
            settings = checkpoint.get(SETTINGS_KEY, {})
            check_same_groups(settings, self.model.optimizer_config)
        if checkpoint is not None and not self._get(self.config, "resume"):
            check_steps_left(checkpoint, self._get(self.config_init, "trainer").max_steps)
        guard = self._get(self.config_init, "guard")
        guard.run = run
        checkpoints = RunCheckpoints(run, self._get(self.config_init, "checkpoint"), guard)
        self.stop = StopCleanly(checkpoints)
        callbacks: list[Callback] = [
            MemoryCheck(),
            Throughput(),
            FinalValidation(),
            *bar,  # after what it shows has been logged
            self.stop,
            RunRecord(run),
            ExportModel(run, checkpoints),
            checkpoints,
        ]
        if self.model.optimizer_config.ema_decay:
            callbacks.insert(0, EMA(self.model.optimizer_config.ema_decay))
        if self.model.init_from is not None:
            callbacks.append(BaseValidation())
        loggers: list[Logger] = [MetricsCSV(run.metrics, keep=self.steps_done)]
        if self._get(self.config, "tensorboard"):
            loggers.append(TensorBoard(run.path / "tensorboard", keep=self.steps_done))
        mode = wandb_mode(self._get(self.config, "wandb"))
        run_id = WandbRunId.of(checkpoint)
        if mode is not None or WandbRunId.kept(checkpoint):
            # Kept also by a part of the run that is not recorded.
            callbacks.append(WandbRunId(run_id))
        if mode is not None:
            run.create()
            self._dump_config()
            loggers.append(
                make_wandb_logger(
                    run.path, name=run.name, run_id=run_id, mode=mode, config=self.config_dump
                )
            )
        return callbacks, loggers

    # --- Running --------------------------------------------------------------------------------

    def fit(self, model: GPTModule, datamodule: TextDataModule, **_: Any) -> None:
        if not is_trial(self.trainer):
            self.run_folder.create()
            if self.resume_from is None and not self._get(self.config, "resume"):
                tell_of_earlier_run(self.run_folder)
        if self.resume_from is not None:
            left = self.trainer.max_steps - self.steps_done
            say(
                f"resuming from {self.resume_from} at step {self.steps_done}, "
                + (f"{left} steps left" if left > 0 else "nothing left to train")
            )
        try:
            self.trainer.fit(model, datamodule=datamodule, ckpt_path=self.resume_from)
            finish_wandb(self.trainer.loggers)
        except UserError:
            # Refused before it wrote anything: the folder made for it goes as well.
            self.run_folder.remove_if_empty()
            raise
        except SystemExit:
            # Lightning's answer to Ctrl-C, once everything is torn down.
            if self.stop is not None and self.stop.saved:
                run = self.run_folder
                command = self.parser.prog
                command = f"python {command}" if command.endswith(".py") else command
                say(
                    f"stopped at step {self.trainer.global_step}; saved {run.last}\n"
                    f"go on with: {command} fit --config {run.config} --resume\n"
                    f"try it: antiphon sample {run.last}"
                )
            raise KeyboardInterrupt from None

    def validate(self, model: GPTModule, datamodule: TextDataModule, **_: Any) -> None:
        self.trainer.validate(
            model, datamodule=datamodule, ckpt_path=self.resume_from, verbose=False
        )
        self._report(model)

    def test(self, model: GPTModule, datamodule: TextDataModule, **_: Any) -> None:
        self.trainer.test(model, datamodule=datamodule, ckpt_path=self.resume_from, verbose=False)
        self._report(model)

    def lr_find(self, model: GPTModule, datamodule: TextDataModule, **settings: Any) -> None:
        run = self.run_folder
        run.create()
        try:
            found = self.trainer.lr_find(model, datamodule, **settings)  # type: ignore[attr-defined]
        except SystemExit:
            raise KeyboardInterrupt from None
        finally:
            run.remove_if_empty()
        if self.trainer.is_global_zero:
            found.report(run, [command_of(self.parser.prog), *fit_arguments(self.arguments)])

    def _report(self, model: GPTModule) -> None:
        found = model.evaluation
        assert found is not None
        say(describe(found, text="held-out text", checkpoint=self.resume_from))


setattr(TrainCLI, "lr-find", TrainCLI.lr_find)  # where LightningCLI looks for it


def _as_list(value: Any) -> list[Any]:
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
