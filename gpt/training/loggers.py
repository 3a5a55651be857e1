"""Where the numbers of a run go: always a CSV file, and Weights & Biases when it is wanted."""

from __future__ import annotations

import csv
import io
import os
import secrets
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from gpt.files import write_atomically
from gpt.training.progress import say
from gpt.training.wandb_mode import Mode
from gpt.training.wandb_mode import Wandb as Wandb
from gpt.training.wandb_mode import wandb_mode as wandb_mode


class MetricsCSV(Logger):
    """One row per logging step in one file, each written as it comes.

    The column `step` counts the optimizer steps done, the one just logged included. A new metric
    adds a column. A run that begins anew replaces the file; a resumed one goes on in it, and rows
    of steps that are now done again are dropped.

    Args:
        path: the file.
        keep: steps whose rows stay if they are there: those done before the resume.
    """

    def __init__(self, path: Path, *, keep: int = 0) -> None:
        super().__init__()
        self.path = path
        self._keep = keep
        self._columns: list[str] = []
        self._rows: list[dict[str, Any]] | None = None

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: `config.yaml` holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        done = (step or 0) + 1
        row = {"step": done, **{k: float(v) for k, v in metrics.items() if k != "epoch"}}
        first = self._rows is None
        if self._rows is None:
            self._rows = self._earlier_rows()
            self._columns = list(dict.fromkeys(key for old in self._rows for key in old))
        self._rows.append(row)
        new = [key for key in row if key not in self._columns]
        if new or first:
            self._columns += new
            self._write_all()
        else:
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerow(row)

    def _earlier_rows(self) -> list[dict[str, Any]]:
        if not self._keep or not self.path.is_file():
            return []
        with open(self.path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        # A line cut short by a crash has no step that can be read.
        return [
            row
            for row in rows
            if (row.get("step") or "").isdecimal() and int(row["step"]) <= self._keep
        ]

    def _write_all(self) -> None:
        assert self._rows is not None
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(self._rows)
        write_atomically(self.path, text.getvalue().encode())


class WandbRunId(Callback):
    """Keeps the run's id in its checkpoints, so that a resumed run continues the same curves."""

    KEY = "WandbRunId"

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id

    @property
    def state_key(self) -> str:
        return self.KEY

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    @classmethod
    def of(cls, checkpoint: dict[str, Any] | None) -> str:
        """The id in a checkpoint, or a new one."""
        return cls.kept(checkpoint) or secrets.token_hex(4)

    @classmethod
    def kept(cls, checkpoint: dict[str, Any] | None) -> str | None:
        """The id in a checkpoint, if there is one."""
        state = ((checkpoint or {}).get("callbacks") or {}).get(cls.KEY) or {}
        return str(state["run_id"]) if state.get("run_id") else None


@rank_zero_only
def _start_wandb(folder: Path, name: str, run_id: str, mode: Mode, config: dict[str, Any]) -> Any:
    import wandb

    settings = wandb.Settings(silent=True, console="off", init_timeout=30)
    options: dict[str, Any] = {
        "project": os.environ.get("WANDB_PROJECT", "antiphon"),
        "name": name,
        "id": run_id,
        "resume": "allow",
        "dir": str(folder),
        "config": config,
        "settings": settings,
    }
    try:
        return wandb.init(mode=mode, **options)
    except (wandb.Error, OSError) as error:
        if mode == "offline":
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        say(f"wandb: not online ({reason}); recording to {folder / 'wandb'} instead")
        return wandb.init(mode="offline", **options)


def make_wandb_logger(
    folder: Path,
    *,
    name: str,
    run_id: str,
    mode: Mode,
    config: dict[str, Any],
) -> Logger:
    """A wandb logger that neither asks nor waits for long; offline if the server is out of reach.

    Args:
        folder: the run's folder; wandb keeps its own below it.
        name: shown in wandb.
        run_id: continued if the server knows it.
        mode: from `wandb_mode`.
        config: shown with the run.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    folder.mkdir(parents=True, exist_ok=True)
    from lightning.pytorch.loggers import WandbLogger

    run = _start_wandb(folder, name, run_id, mode, config)
    return WandbLogger(experiment=run, save_dir=str(folder), log_model=False)


def finish_wandb(loggers: list[Logger]) -> None:
    """Close the wandb run, if one is among the loggers: what is still in memory is written."""
    for logger in loggers:
        if logger.__class__.__name__ == "WandbLogger":
            experiment = logger.experiment  # type: ignore[attr-defined]
            experiment.finish()
