"""Lines from a person at a terminal, with editing, history and completion; or from a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

HISTORY_LINES = 1000
HISTORY_BYTES = 2**20
"""A history that has become larger, by huge lines, is begun again: it would slow every start."""


def history_file() -> Path:
    """Where lines are remembered: the user's state folder (XDG base directories)."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "antiphon" / "sample_history"


@contextlib.contextmanager
def line_input(words: Callable[[str], list[str]]) -> Iterator[Callable[[str], str]]:
    """A function that shows a prompt and returns the next line, without its end.

    It raises EOFError after the last line. From a pipe nothing is shown: whoever reads the output
    wants the texts alone.

    Args:
        words: what the line so far may be completed with.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield lambda prompt: _piped()
        return
    try:
        import readline
    except ImportError:  # a Python without it: no editing, no history
        yield input
        return
    with _remembered(readline):
        readline.set_completer_delims("")  # a line is completed as a whole
        readline.set_completer(lambda text, state: [*words(text), None][state])
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        yield input


def _piped() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


@contextlib.contextmanager
def _remembered(readline: ModuleType) -> Iterator[None]:
    """Read the history, and add to it what was typed. A state folder that cannot be used is no
    reason not to go on; what was typed is then forgotten."""
    path = history_file()
    readline.clear_history()
    readline.set_history_length(HISTORY_LINES)
    with contextlib.suppress(OSError):
        if path.stat().st_size <= HISTORY_BYTES:
            readline.read_history_file(path)
        else:
            path.unlink()
    known = readline.get_current_history_length()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _append(readline, path, known)


def _append(readline: ModuleType, path: Path, known: int) -> None:
    """Two programs at once each add their lines; prompts are nobody else's business."""
    new = readline.get_current_history_length() - known
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    if hasattr(readline, "append_history_file"):
        readline.append_history_file(max(0, new), path)
    else:  # libedit
        readline.write_history_file(path)
    path.chmod(0o600)
