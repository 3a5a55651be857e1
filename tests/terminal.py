"""What tests do on a terminal."""

from __future__ import annotations

import signal

import pexpect


def hearing() -> None:
    """Called in a program before it begins: it hears Ctrl-C, though whoever started the tests, or a
    test before, may have that ignored, which programs inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt(child: pexpect.spawn) -> None:
    """Press Ctrl-C at the prompt until it is heard: Python misses one that comes between the prompt
    and its waiting for a key."""
    for _ in range(20):
        child.sendintr()
        if child.expect_exact(["Ctrl-D or /quit leaves", pexpect.TIMEOUT], timeout=5) == 0:
            return
    raise AssertionError("Ctrl-C does nothing")
