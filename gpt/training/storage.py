"""Checkpoint files on disk: written whole and durably, checked before they are trusted."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from gpt.errors import CheckpointError
from gpt.files import sync_folder
from gpt.training.run import RunFolder


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint straight to its file and flushes it to the disk.

    Lightning's own builds it in memory and sends it through the folder for temporary files: twice
    the memory, and a process that is killed there leaves the whole of it behind.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Raises OSError as the file system gave it."""
        with open(path, "wb") as file:
            recorder = _FirstError(file)
            # torch's zip writer would hide why a write failed behind a complaint of its own.
            torch.save(checkpoint, recorder)  # type: ignore[arg-type]
            if recorder.error is not None:
                raise recorder.error
            file.flush()
            os.fsync(file.fileno())


class _FirstError:
    """A file that remembers the first write that failed; what is written after that is dropped."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                return self._file.write(data)
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        if self.error is None:
            self._file.flush()


def put_in_place(scratch: Path, target: Path, previous: Path | None) -> None:
    """Rename a complete file over `target`, which is kept as `previous` (None: it is not).

    At every moment there is a whole file at `target`, if there was one before.
    """
    if previous is not None and target.is_file():
        replace_with_copy(target, previous)
    os.replace(scratch, target)
    sync_folder(target.parent)


def replace_with_copy(source: Path, target: Path) -> None:
    """A hard link where the file system has them: checkpoints are replaced, never written to."""
    scratch = target.with_name(f".{target.name}.new")
    scratch.unlink(missing_ok=True)
    try:
        os.link(source, scratch)
    except OSError:
        shutil.copyfile(source, scratch)
        with open(scratch, "rb") as file:
            os.fsync(file.fileno())
    os.replace(scratch, target)
    sync_folder(target.parent)


def remove_products(run: RunFolder) -> None:
    """Take away the model and the report of an earlier run: they would pass for this one's.

    The model's folder is renamed first, so that no half of it is ever there to be used.
    """
    leaving = run.model.with_name(f".{run.model.name}.old")
    shutil.rmtree(leaving, ignore_errors=True)  # of a run that was killed right here
    if run.model.is_dir():
        os.replace(run.model, leaving)
        shutil.rmtree(leaving, ignore_errors=True)
    for product in run.report:
        product.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The checkpoint as plain data, its tensors still on disk. No code in it is ever run.

    Raises:
        CheckpointError: not a checkpoint.
    """
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is not a checkpoint: give a .ckpt file that fit wrote")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # torch.load fails in as many ways as there are files that are no checkpoint; all mean the same.
    except Exception as error:  # noqa: BLE001
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is no readable checkpoint: {reason}") from None
    if not isinstance(found, dict) or "state_dict" not in found:
        raise CheckpointError(f"{path} is no checkpoint of this trainer: it has no state_dict")
    return found


def verify_checkpoint(path: Path) -> int:
    """Read all of a checkpoint against the checksums in it, and return its step.

    Raises:
        CheckpointError: cut short, changed on disk, or not a checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged} is wrong")
    step = read_checkpoint(path).get("global_step")
    if not isinstance(step, int):
        raise CheckpointError(f"{path} is no checkpoint of this trainer: it has no step")
    return step


def find_last_good(run: RunFolder) -> tuple[Path | None, list[str]]:
    """The newest checkpoint of a run that is whole, and what is wrong with newer ones.

    None if there is no whole one.
    """
    if run.begun.is_file():
        problem = (
            "the run that began last was cut off before its first checkpoint (those of the run "
            "before it are still there: --ckpt_path last goes on with that one)"
        )
        return None, [problem]
    problems = []
    for path in (run.last, run.previous, run.best):
        if not path.is_file():
            continue
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return path, problems
    return None, problems
