"""What the terminal shows while a run goes on: a bar, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

from gpt.lora import adapter_count
from gpt.training.memory import MemoryCheck
from gpt.training.module import GPTModule
from gpt.training.throughput import Throughput, is_logging_step

LINES_PER_RUN = 20
SECONDS_BETWEEN_LINES = 60.0
BAR = "{n_fmt}/{total_fmt}{desc}  left {remaining} {bar}"
"""The numbers first: on a narrow terminal it is the bar that shrinks."""
BESIDE_NUMBERS = len("  left 1:23:45 |")


@rank_zero_only
def say(text: str) -> None:
    """Print a line without breaking a bar that is being drawn."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def count(n: float) -> str:
    """A number for people: 950, 12.3 k, 4.56 M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f}"


class RunProgress(ProgressBar):
    """Steps done, loss, learning rate, tokens/s, MFU, last validation loss and time left.

    On a terminal it is a bar on stderr; elsewhere a line on stdout now and then, so that a log file
    stays readable: 20 in a run, and one a minute in long runs.
    """

    def __init__(self, *, terminal: bool | None = None) -> None:
        super().__init__()
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._enabled = True
        self._bar: tqdm[Any] | None = None
        self._eval_bar: tqdm[Any] | None = None
        self._started = self._last_line = 0.0
        self._first_step = self._step = 0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def _new_bar(self, **options: Any) -> tqdm[Any]:
        return tqdm(
            disable=not (self._enabled and self._terminal),
            dynamic_ncols=True,
            file=sys.stderr,
            **options,
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        if self._enabled:
            say(describe_run(trainer, pl_module))
        self._first_step = self._step = trainer.global_step
        self._started = self._last_line = time.monotonic()
        self._bar = self._new_bar(
            total=trainer.max_steps, initial=trainer.global_step, bar_format=BAR
        )

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        assert self._bar is not None
        if step == self._step:
            return  # inside an accumulated step
        last = step == trainer.max_steps
        # Reading a metric waits for the device, so the numbers change at the logging steps only.
        if is_logging_step(trainer) or last:
            shown = self._numbers(trainer)
            self._bar.set_description_str(self._that_fit(shown, trainer.max_steps), refresh=False)
            if self._enabled and not self._terminal and self._line_is_due(step, trainer.max_steps):
                left = (trainer.max_steps - step) * (time.monotonic() - self._started)
                left /= max(1, step - self._first_step)
                say("  ".join([f"step {step}/{trainer.max_steps}", *shown, f"left {_clock(left)}"]))
        self._bar.update(step - self._step)
        self._step = step

    def _that_fit(self, shown: list[str], total: int) -> str:
        """The numbers as the bar shows them; validation, then MFU, only if there is room."""
        assert self._bar is not None
        columns = None if self._bar.disable else self._bar.format_dict["ncols"]
        room = (columns or 80) - 2 * len(str(total)) - 1 - BESIDE_NUMBERS
        while True:
            text = "".join(f"  {number}" for number in shown)
            if len(text) <= room or not shown[-1].startswith(("val ", "mfu ")):
                return text
            shown = shown[:-1]

    def _line_is_due(self, step: int, total: int) -> bool:
        now = time.monotonic()
        every = max(1, total // LINES_PER_RUN)
        if step % every and step != total and now - self._last_line < SECONDS_BETWEEN_LINES:
            return False
        self._last_line = now
        return True

    @staticmethod
    def _numbers(trainer: L.Trainer) -> list[str]:
        metrics = trainer.callback_metrics
        shown = []
        for name, label, form in (
            ("train/loss", "loss", "{:.4f}"),
            ("lr", "lr", "{:.2e}"),
            ("tokens_per_s", "tokens/s", "{:,.0f}"),
            ("mfu", "mfu", "{:.0%}"),
            ("val/loss", "val", "{:.4f}"),
        ):
            if name in metrics:
                shown.append(f"{label} {form.format(float(metrics[name]))}")
        return shown

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def _close(self) -> None:
        for bar in (self._eval_bar, self._bar):
            if bar is not None:
                bar.close()
        self._eval_bar = None

    # --- Evaluation, inside a run or on its own --------------------------------------------------

    def _start_evaluation(self, total: Any) -> None:
        total = sum(total) if isinstance(total, list) else total
        self._eval_bar = self._new_bar(total=total, leave=False, unit="batch", desc="evaluate")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start_evaluation(trainer.num_val_batches)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start_evaluation(trainer.num_test_batches)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        assert self._eval_bar is not None
        self._eval_bar.update()

    def on_test_batch_end(self, *_: Any, **__: Any) -> None:
        assert self._eval_bar is not None
        self._eval_bar.update()

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._eval_bar is not None:
            self._eval_bar.close()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._eval_bar is not None:
            self._eval_bar.close()
        assert isinstance(pl_module, GPTModule)
        if self._enabled and trainer.state.fn == "fit" and pl_module.evaluation is not None:
            found = pl_module.evaluation
            bpb = "" if found.bits_per_byte is None else f"  val/bpb {found.bits_per_byte:.4f}"
            say(f"step {trainer.global_step}  val/loss {found.loss:.4f}{bpb}")


def describe_run(trainer: L.Trainer, module: GPTModule) -> str:
    """What is about to be trained, on how much, for how long."""
    config, data = module.config, module.data
    per_step = (
        data.batch_size
        * data.block_size
        * trainer.world_size
        * trainer.accumulate_grad_batches
    )  # fmt: skip
    tokens = len(data.prepared.train)
    limits = [each.limit for each in trainer.callbacks if isinstance(each, Throughput)]  # type: ignore[attr-defined]
    checks = [each.told for each in trainer.callbacks if isinstance(each, MemoryCheck)]  # type: ignore[attr-defined]
    memory = "".join(f"\nmemory: {told}" for told in checks if told)
    speed = "".join(f"\nspeed: mfu is the share of {limit.what}" for limit in limits if limit)
    adapters = adapter_count(config, module.lora)
    begun = ""
    if module.init_from is not None:
        frozen = (
            f", frozen; LoRA trains {count(adapters)} numbers beside it (rank {module.lora.rank})"
        )
        begun = f"base:  {module.init_from}{frozen if adapters else ''}\n"
    short = data.block_size < config.block_size
    blocks = f" in blocks of {data.block_size}" if short else ""
    return (
        f"model: {count(module.gpt.num_params() - adapters)} parameters ({config.n_layer} layers, "
        f"{config.d_model} wide, context {config.block_size}, vocabulary {config.vocab_size})\n"
        f"{begun}"
        f"text:  {data.source_name}, {count(tokens)} tokens to learn from, "
        f"{count(len(data.prepared.val))} held out ({data.tokenizer.kind})\n"
        f"run:   {trainer.max_steps} steps of {count(per_step)} tokens{blocks}, "
        f"{trainer.max_steps * per_step / tokens:.2g} times through the text, "
        f"on {module.device}, {trainer.precision}{memory}{speed}"
    )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
