"""What tests do on a terminal."""

from __future__ import annotations

import signal
from pathlib import Path

import pexpect


def hearing() -> None:
    """Called in a program before it begins: it hears Ctrl-C, though whoever started the tests, or a
    test before, may have that ignored or held back, which programs inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def interrupt(child: pexpect.spawn) -> None:
    """Press Ctrl-C at the prompt until it is heard.

    Python misses one that comes between the prompt and its waiting for a key. And what was typed
    right before is thrown away by the terminal: where readline has been told of it already, it
    waits for it, and until another key comes it looks at no signal.
    """
    for _ in range(20):
        child.sendintr()
        if _heard(child):
            return
        child.send("x")
        if _heard(child):
            return
    raise AssertionError(f"Ctrl-C does nothing; shown: {child.before!r}; {signals_of(child.pid)}")


def _heard(child: pexpect.spawn) -> bool:
    found: int = child.expect_exact(["Ctrl-D or /quit leaves", pexpect.TIMEOUT], timeout=5)
    return found == 0


def signals_of(pid: int) -> str:
    """What the system says of a program's signals, where it says so."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return ", ".join(line for line in lines if line.startswith(("State", "Sig", "Shd")))
