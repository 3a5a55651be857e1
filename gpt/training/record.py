"""Keeps `run.json`, the facts of a run that stand in no other file, and makes its report."""

from __future__ import annotations

import json
import shlex
import sys
import time
from datetime import datetime, timezone
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from gpt.files import write_atomically
from gpt.lora import adapter_count
from gpt.training.checkpoints import is_trial
from gpt.training.curves import RECORD_FILE, read_record
from gpt.training.early_stopping import StopEarly
from gpt.training.environment import environment
from gpt.training.module import GPTModule
from gpt.training.progress import say
from gpt.training.report import write_report
from gpt.training.run import RunFolder
from gpt.training.throughput import Throughput

FORMAT = "antiphon-run/1"


class RunRecord(Callback):
    """Writes `run.json` when training starts, at each validation and at the end, then the report.

    A resumed run adds a sitting to the record. Neither the record nor the report may cost a run: a
    failure to write is one line on stderr.

    Args:
        run: the run's folder.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._record: dict[str, Any] | None = None
        self._began = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero or is_trial(trainer):
            return
        assert isinstance(pl_module, GPTModule)
        self._began = time.monotonic()
        record = self._facts(trainer, pl_module)
        step = trainer.global_step
        earlier = read_record(self.run.path / RECORD_FILE) if step else {}
        record["sittings"] = [
            *(earlier.get("sittings") or []),
            {
                "began": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "from_step": step,
                "command": shlex.join(sys.argv),
            },
        ]
        self._record = record
        self._write(trainer, "running")

    def _facts(self, trainer: L.Trainer, module: GPTModule) -> dict[str, Any]:
        data, prepared = module.data, module.data.prepared
        limits = [each.limit for each in trainer.callbacks if isinstance(each, Throughput)]  # type: ignore[attr-defined]
        return {
            "format": FORMAT,
            "name": self.run.name,
            "parameters": module.gpt.num_params() - adapter_count(module.config, module.lora),
            "init_from": module.init_from,
            "adapters": adapter_count(module.config, module.lora),
            "flops_per_token": module.flops_per_token,
            "speed_limit": next((limit.what for limit in limits if limit), None),
            "source": data.source_name,
            "tokenizer": f"{data.tokenizer.kind}, {data.tokenizer.n_vocab} tokens",
            "train_tokens": len(prepared.train),
            "val_tokens": len(prepared.val),
            "batch_tokens": data.batch_size
            * data.block_size
            * trainer.world_size
            * trainer.accumulate_grad_batches,
            "max_steps": trainer.max_steps,
            "environment": environment(module.device, str(trainer.precision)),
        }

    def _write(self, trainer: L.Trainer, state: str) -> None:
        """Bring the sitting up to date and write all of it."""
        if self._record is None:
            return
        self._record["sittings"][-1] |= {
            "to_step": trainer.global_step,
            "seconds": round(time.monotonic() - self._began, 1),
            "state": state,
        }
        try:
            text = json.dumps(self._record, indent=2, ensure_ascii=False) + "\n"
            write_atomically(self.run.path / RECORD_FILE, text.encode("utf-8", "replace"))
        except OSError as error:
            print(f"cannot write {RECORD_FILE}: {error.strerror or error}", file=sys.stderr)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer, "running")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        reasons = [each.reason for each in trainer.callbacks if isinstance(each, StopEarly)]  # type: ignore[attr-defined]
        reason = next((reason for reason in reasons if reason), None)
        self._finish(trainer, f"stopped early: {reason}" if reason else "finished")

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Also a run that was interrupted or failed has curves worth seeing."""
        if isinstance(exception, KeyboardInterrupt):
            self._finish(trainer, "interrupted")
        else:
            self._finish(trainer, f"failed: {' '.join(str(exception).split())[:300]}")

    def _finish(self, trainer: L.Trainer, state: str) -> None:
        if self._record is None:
            return
        self._write(trainer, state)
        self._record = None
        try:
            page = write_report(self.run.path)
        # Whatever goes wrong in drawing, the training is done and its model must still be exported.
        except Exception as error:  # noqa: BLE001
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            print(f"no report: {reason}", file=sys.stderr)
        else:
            say(f"report: {page}")
