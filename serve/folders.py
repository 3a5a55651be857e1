"""Where a model lies, and whether what lies there is still what was loaded.

No torch: what is wrong with what was named is said before that is loaded.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from gpt.errors import CheckpointError

FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
"""Of a model folder, as `gpt.checkpoint` has them; the first says that it is one."""

BEST = Path("checkpoints", "best.ckpt")
"""Where a run keeps its best checkpoint (`gpt.training.run`). It is replaced as soon as there is a
better one; the run's model folder is written once, at the end."""

HASH_BLOCK = 2**20
VERSION_DIGITS = 16


@dataclass(frozen=True)
class ModelSource:
    """A model to serve.

    Attributes:
        path: model folder, run folder or Lightning checkpoint.
        name: what clients call it; empty: what it calls itself.
        watched: whether it is followed while the server runs.
    """

    path: Path
    name: str = ""
    watched: bool = False

    @classmethod
    def parse(cls, text: str) -> ModelSource:
        """`FOLDER` or `NAME=FOLDER`; a folder that has such a name is itself."""
        name, equals, path = text.partition("=")
        if equals and name and path and "/" not in name and not os.path.exists(text):
            return cls(Path(path), name)
        return cls(Path(text))

    def __str__(self) -> str:
        return f"{self.name}={self.path}" if self.name else str(self.path)

    @property
    def place(self) -> Path:
        """What to open: of a run that is followed its best checkpoint, once there is one."""
        best = self.path / BEST
        if self.watched and not os.path.exists(self.path / FILES[0]) and os.path.exists(best):
            return best
        return self.path

    @property
    def expected(self) -> bool:
        """Whether nothing is there yet, but a run is on its way to its first checkpoint."""
        begun = self.watched and os.path.isdir((self.path / BEST).parent)
        return begun and self.place == self.path and not files_of(self.path)


@dataclass(frozen=True)
class Found:
    """What lies somewhere at a moment.

    Attributes:
        path: what to open.
        marks: of each file where it is and when it last changed, in any way; empty: there is none.
    """

    path: Path
    marks: tuple[tuple[str, int, int, int, int], ...]

    @classmethod
    def at(cls, source: ModelSource) -> Found:
        """What is there now. Nothing, if it is gone or just being replaced."""
        path = source.place
        marks = []
        try:
            for file in files_of(path):
                stat = os.stat(file)
                # A file that is put at the place of another keeps its own times, but the moment of
                # the change itself is the system's.
                mark = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime_ns)
                marks.append((str(file), *mark))
        except OSError:
            marks = []
        return cls(path, tuple(marks))

    def version(self) -> str:
        """The first digits of a SHA-256 over the files, names and bytes; empty if there are none.

        Equal versions are equal models, on this server or another.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if not self.marks:
            return ""
        whole = hashlib.sha256()
        try:
            for name, *_ in self.marks:
                file = Path(name)
                part = hashlib.sha256()
                with open(file, "rb") as data:
                    while block := data.read(HASH_BLOCK):
                        part.update(block)
                title = file.name if self.path.is_dir() else "checkpoint"
                whole.update(f"{title} {part.hexdigest()}\n".encode())
        except OSError as error:
            raise CheckpointError(f"cannot read {name}: {error.strerror}") from None
        return whole.hexdigest()[:VERSION_DIGITS]


def files_of(path: Path) -> list[Path]:
    """The files that a model is read from."""
    if os.path.isfile(path):
        return [path]
    folder = path if os.path.exists(path / FILES[0]) else path / "model"
    if not os.path.exists(folder / FILES[0]):
        return []
    return [folder / name for name in FILES if os.path.exists(folder / name)]
