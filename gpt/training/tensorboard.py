"""Curves and samples for TensorBoard, in the run's folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

SECONDS_BETWEEN_FLUSHES = 10.0


class TensorBoard(Logger):
    """Writes event files that `tensorboard --logdir` shows, one per sitting of the run.

    Lightning's own logger opens its file before the run's text and checkpoint are accepted, and its
    writer's thread blocks the training for good once the disk is full. This one opens its file with
    the first numbers, writes in place, and gives up with one line if it cannot.

    Steps are counted as in `metrics.csv`. A run that begins anew takes away the files of the one
    before; a resumed one adds a file, which hides the steps that are done again.

    Args:
        folder: of the event files.
        keep: steps whose numbers stay if they are there: those done before the resume.
    """

    def __init__(self, folder: Path, *, keep: int = 0) -> None:
        super().__init__()
        self.folder = folder
        self._keep = keep
        self._writer: Any = None
        self._given_up = False
        self._flushed = 0.0

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: `config.yaml` holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        from tensorboardX.summary import scalar

        done = (step or 0) + 1
        self._write(
            done,
            [scalar(name, float(value)) for name, value in metrics.items() if name != "epoch"],
        )

    @rank_zero_only
    def log_text(self, name: str, text: str, step: int) -> None:
        """Show a text as it stands, at a number of steps done."""
        from tensorboardX.summary import text as summary

        # Markdown: four spaces before a line keep it as it is.
        as_is = "\n".join(f"    {line}" for line in text.splitlines())
        self._write(step, [summary(name, as_is)])

    def _write(self, step: int, summaries: list[Any]) -> None:
        if self._given_up:
            return
        from tensorboardX.proto.event_pb2 import Event

        try:
            if self._writer is None:
                self._writer = self._open()
            for summary in summaries:
                self._writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))
            if time.monotonic() - self._flushed > SECONDS_BETWEEN_FLUSHES:
                self._writer.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            self._give_up(error)

    def _open(self) -> Any:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._keep:
            for old in self.folder.glob("events.out.tfevents.*"):
                old.unlink()
        writer = EventsWriter(str(self.folder / "events"))
        if self._keep:
            start = SessionLog(status=SessionLog.START)
            writer.write_event(Event(step=self._keep + 1, session_log=start))
        return writer

    def _give_up(self, error: OSError) -> None:
        self._given_up = True
        print(
            f"cannot write for TensorBoard to {self.folder}: {error.strerror or error}; the run "
            "goes on without",
            file=sys.stderr,
        )

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._writer is None or self._given_up:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._give_up(error)
        self._given_up = True
