"""Corpora at hand, room on disk, the server's port, and the terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from gpt.data.named import NAMED, FileCorpus, WheelCorpus
from gpt.data.wheels import cache_folder
from gpt.doctor.report import Finding, count
from gpt.terminal import shows_colour

TOPIC = "Places"
PORT = 50051
LITTLE_ROOM = 2e9  # bytes
NO_ROOM = 50e6  # bytes: less than one checkpoint of the smallest recipe


def corpora() -> Iterator[Finding]:
    """Which named corpora are on this machine already. Whether they are whole is not checked."""
    folder = cache_folder()
    there: list[str] = []
    missing: list[str] = []
    for name, corpus in NAMED.items():
        (there if _at_hand(corpus, folder) else missing).append(name)
    yield Finding(
        TOPIC,
        "corpora",
        "ok",
        f"in {folder}: {', '.join(there) or 'none yet'}"
        + (f"; not yet: {', '.join(missing)}" if missing else ""),
        "those are fetched when first used; without a network, `antiphon train fit --data.source "
        "NAME` says which file to bring and where to put it (ANTIPHON_CACHE moves the folder)"
        if missing
        else "",
        {"folder": str(folder), "there": there, "missing": missing},
    )


def _at_hand(corpus: object, folder: Path) -> bool:
    if isinstance(corpus, WheelCorpus):
        return (folder / corpus.wheel).is_file()
    if isinstance(corpus, FileCorpus):
        own = os.environ.get(corpus.variable)
        return (Path(own).expanduser() if own else folder / corpus.file).is_file()
    return False


def room() -> Iterator[Finding]:
    """Space for prepared text, runs and caches; those on one disk share a line."""
    places = {
        "./data": Path("data"),
        "./runs": Path("runs"),
        "corpus cache": cache_folder(),
    }
    with contextlib.suppress(ImportError):  # tiktoken may be what is missing
        from gpt.encodings import cache_folder as tiktoken_folder

        if folder := tiktoken_folder():
            places["tiktoken cache"] = folder
    disks: dict[int, list[str]] = {}
    free: dict[int, int] = {}
    for name, path in places.items():
        existing = _existing(path)
        disk = existing.stat().st_dev
        disks.setdefault(disk, []).append(name)
        free[disk] = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK):
            yield Finding(
                TOPIC,
                "disk",
                "note",
                f"{name} cannot be written: {existing} belongs to another",
                "work in a folder of your own; --data.root, --runs_dir, ANTIPHON_CACHE and "
                "TIKTOKEN_CACHE_DIR name others",
            )
    for disk, names in disks.items():
        little = free[disk] < LITTLE_ROOM
        needed = bool({"./data", "./runs"} & set(names))
        yield Finding(
            TOPIC,
            "disk",
            "broken" if needed and free[disk] < NO_ROOM else "note" if little else "ok",
            f"{count(free[disk], 'B')} free for {', '.join(names)}",
            "a run keeps two checkpoints of 12 bytes a parameter, prepared text takes 2 to 4 "
            "bytes a token; remove old ones from runs/ and data/"
            if little
            else "",
            {"free": free[disk], "places": names},
        )


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that is there."""
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path


def port(number: int = PORT) -> Iterator[Finding]:
    """Whether `antiphon serve` would get its default port."""
    with socket.socket() as probe:
        # As the server binds it: what a server that has just ended left behind does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            yield Finding(
                TOPIC,
                "port",
                "note",
                f"{number}, the default of serve, cannot be had: {error.strerror}",
                "perhaps a server runs already; if not, take another: antiphon serve MODEL "
                "--port 0 takes a free one",
                {"port": number, "free": False},
            )
            return
    yield Finding(
        TOPIC, "port", "ok", f"{number}, the default of serve, is free",
        facts={"port": number, "free": True},
    )  # fmt: skip


def terminal() -> Iterator[Finding]:
    """Whether text comes in colour and in every script."""
    coloured = shows_colour(sys.stdout)
    if not sys.stdout.isatty():
        found = "standard output is no terminal: no colours, no bars"
    elif coloured:
        found = f"{os.environ.get('TERM', 'unknown')}, {shutil.get_terminal_size().columns} columns"
        found += ", colours (NO_COLOR=1 turns them off)"
    else:
        found = "no colours, because NO_COLOR is set or TERM is dumb"
    encoding = (sys.stdout.encoding or "unknown").lower()
    utf8 = encoding.replace("-", "") == "utf8"
    yield Finding(
        TOPIC,
        "terminal",
        "ok" if utf8 else "note",
        f"{found}; writes {encoding}",
        "" if utf8 else "PYTHONUTF8=1 lets every character through",
        {"colours": coloured, "encoding": encoding},
    )
