"""What happens beside the training loop: samples, the last validation, Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.errors import ConfigError, PromptError, TokenizerError
from gpt.generate import generate
from gpt.model import GPT
from gpt.params import SamplingParams
from gpt.plan import AttentionPlan
from gpt.training.checkpoints import RunCheckpoints
from gpt.training.ema import averaged
from gpt.training.module import GPTModule
from gpt.training.progress import say
from gpt.training.sharding import is_sharded
from gpt.training.tensorboard import TensorBoard
from gpt.training.throughput import is_logging_step


class FinalValidation(Callback):
    """Makes the last step of a run a validated one, wherever `val_check_interval` falls.

    Without it the steps since the last validation would be in no checkpoint.
    """

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == trainer.max_steps:
            # Lightning validates after batches whose number this divides; it is asked right after.
            trainer.val_check_batch = trainer.fit_loop.total_batch_idx + 1


class _Eager:
    """The model past torch.compile: samples have many shapes, and compiling each would take longer
    than the training between two samples."""

    def __init__(self, gpt: GPT) -> None:
        self.gpt = gpt

    @property
    def config(self) -> GPTConfig:
        return self.gpt.config

    def __call__(self, ids: Tensor, plan: AttentionPlan, cache: KVCache) -> Tensor:
        return self.gpt.forward(ids, plan, cache)


class SampleText(Callback):
    """Prints what the model writes as it learns, and appends it to `samples.txt`.

    The training's random numbers are untouched: the sampler has its own.

    Args:
        prompts: what to continue; an empty one starts a new document.
        every_n_steps: how often; 0: with each validation; null: never.
        max_tokens: length of a sample.
        temperature: of the sampler.
        top_k: of the sampler; 0 keeps the whole vocabulary.
        seed: the same each time, so that what changes is the model.
    """

    def __init__(
        self,
        prompts: list[str] = [""],  # noqa: B006  # read only; a tuple cannot be given in YAML
        every_n_steps: int | None = 0,
        max_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int = 0,
        seed: int = 1337,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 0:
            raise ConfigError(f"samples.every_n_steps is {every_n_steps}, but must be >= 0 or null")
        self.prompts = prompts
        self.every_n_steps = every_n_steps
        self.params = SamplingParams(
            temperature=temperature, top_k=top_k, max_tokens=max_tokens, seed=seed
        )
        self.path: Path | None = None
        """Where samples are appended; the trainer's command line gives it."""
        self._size: int | None = None  # of what a resumed run keeps

    def state_dict(self) -> dict[str, Any]:
        path = self.path
        return {"size": path.stat().st_size if path is not None and path.is_file() else 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._size = state_dict["size"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Drop samples of steps that are now done again."""
        size, path = self._size, self.path
        if trainer.is_global_zero and size is not None and path is not None and path.is_file():
            os.truncate(path, min(size, path.stat().st_size))

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step_done = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self.every_n_steps and step_done and trainer.global_step % self.every_n_steps == 0:
            self.sample(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.every_n_steps == 0 and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.sample(trainer, pl_module)

    def sample(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write one sample for each prompt."""
        assert isinstance(pl_module, GPTModule)
        # Where the model is sharded, a forward needs all processes: each writes the same text.
        if not (trainer.is_global_zero or is_sharded(trainer.strategy)):
            return
        with averaged(trainer, pl_module):
            self._sample(trainer, pl_module)

    def _sample(self, trainer: L.Trainer, pl_module: GPTModule) -> None:
        gpt = pl_module.gpt
        training = gpt.training
        gpt.eval()
        try:
            for prompt in self.prompts:
                text = self._continue(pl_module, prompt)
                if trainer.is_global_zero:
                    self._show(trainer, prompt, text)
        finally:
            gpt.train(training)

    def _continue(self, module: GPTModule, prompt: str) -> str:
        pieces = generate(
            _Eager(module.gpt),
            module.tokenizer,
            prompt,
            self.params,
            dtype=module.gpt.dtype,
            device=module.gpt.device,
        )
        try:
            return "".join(piece.text for piece in pieces)
        except (PromptError, TokenizerError) as error:
            # A sample is no reason to lose a run.
            return f" [no sample: {error}]"

    def _show(self, trainer: L.Trainer, prompt: str, text: str) -> None:
        step = trainer.global_step
        block = f"--- step {step}\n{prompt}{text}\n"
        say(block)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{block}\n")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoard):
                number = f" {self.prompts.index(prompt) + 1}" if len(self.prompts) > 1 else ""
                logger.log_text(f"sample{number}", f"{prompt}{text}", step)


class Stopped(KeyboardInterrupt):
    """Training was stopped between two steps, after its state was saved."""


class StopCleanly(Callback):
    """On Ctrl-C or SIGTERM, finishes the step, saves `last.ckpt` and ends; a second ends at once.

    Args:
        checkpoints: saves the state.

    Attributes:
        signum: the signal that ended the run, if one did.
        saved: whether the state was saved after it.
    """

    def __init__(self, checkpoints: RunCheckpoints) -> None:
        self.checkpoints = checkpoints
        self.signum: int | None = None
        self.saved = False
        self._previous: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
        say("stopping after this step and saving it; once more stops at once")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Between two steps: inside an accumulated one there are gradients that no checkpoint holds,
        # and before this the last step is neither logged nor, where that is due, validated.
        if batch_idx % trainer.accumulate_grad_batches or not self._asked(trainer):
            return
        self.checkpoints.save(trainer)
        self.saved = True
        raise Stopped

    def _asked(self, trainer: L.Trainer) -> bool:
        if trainer.world_size == 1:
            return self.signum is not None
        if not is_logging_step(trainer):
            return False
        # A signal reaches the processes in different steps, and all must stop in the same.
        return trainer.strategy.reduce_boolean_decision(self.signum is not None, all=False)

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._restore()
