"""Where a run keeps its things, and where the shipped configs are."""

from __future__ import annotations

import contextlib
import difflib
import importlib.resources
import os
from dataclasses import dataclass
from pathlib import Path

from gpt.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class RunFolder:
    """The places of one run, `<runs_dir>/<name>/`.

    Raises:
        ConfigError: a name that is no single folder's.
    """

    runs_dir: Path
    name: str

    def __post_init__(self) -> None:
        if not self.name or self.name in (".", "..") or set(self.name) & set("/\\\0"):
            raise ConfigError(
                f"the run's name is {self.name!r}, but it becomes a folder: letters, digits, "
                "'-', '_' and '.', no slashes"
            )

    @property
    def path(self) -> Path:
        return self.runs_dir / self.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def best(self) -> Path:
        return self.path / "checkpoints" / "best.ckpt"

    @property
    def last(self) -> Path:
        return self.path / "checkpoints" / "last.ckpt"

    @property
    def previous(self) -> Path:
        """What `last.ckpt` was before it was replaced."""
        return self.path / "checkpoints" / "previous.ckpt"

    @property
    def begun(self) -> Path:
        """There while a new run has saved nothing yet and the checkpoints are still another's."""
        return self.path / "checkpoints" / ".begun"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def samples(self) -> Path:
        return self.path / "samples.txt"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def report(self) -> tuple[Path, ...]:
        """The page about the run, and its curve."""
        return self.path / "report.html", self.path / "loss.png"

    def create(self) -> None:
        """Make the folder and write to it: better now than after an hour of preparing text.

        Raises:
            ConfigError: it cannot be made or written to.
        """
        probe = self.path / f".probe-{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"cannot write to the run's folder {self.path}: {error.strerror or error}; "
                "give another --runs_dir or --name"
            ) from None

    def remove_if_empty(self) -> None:
        """Take the folder away if no run has left anything in it."""
        for folder in (self.best.parent, self.path):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def checkpoint(self, given: str) -> Path:
        """The checkpoint meant by `best`, `last` or a path.

        Raises:
            CheckpointError: there is no such file.
        """
        path = {"best": self.best, "last": self.last}.get(given, Path(given))
        if not path.is_file():
            hint = "give --ckpt_path best, last or a file"
            if given in ("best", "last"):
                hint = "train first (fit), or give --name or --ckpt_path of another run"
                if given == "best" and self.last.is_file():
                    hint = "nothing was validated yet, but last.ckpt is there: --ckpt_path last"
            raise CheckpointError(f"there is no checkpoint at {path}; {hint}")
        return path


def shipped_configs() -> dict[str, Path]:
    """The configs that come with the package, by name."""
    try:
        files = [Path(str(file)) for file in importlib.resources.files("gpt.configs").iterdir()]
    except ModuleNotFoundError:
        # In a source tree the package `gpt.configs` is the folder configs/ beside gpt/.
        files = list((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    return {path.stem: path for path in sorted(files) if path.suffix == ".yaml"}


def find_config(given: str) -> Path:
    """The file meant by `--config`: a path, or the name of a shipped config.

    Raises:
        ConfigError: neither; the names are listed.
    """
    path = Path(given)
    if path.is_file():
        return path
    shipped = shipped_configs()
    if path.parent == Path() and path.name.removesuffix(".yaml") in shipped:
        return shipped[path.name.removesuffix(".yaml")]
    near = difflib.get_close_matches(path.stem, shipped, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"there is no config {given!r}{hint} (give a file, or one of: {', '.join(shipped)})"
    )
