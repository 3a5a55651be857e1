"""What tests do on a terminal."""

from __future__ import annotations

import pexpect


def interrupt(child: pexpect.spawn) -> None:
    """Press Ctrl-C at the prompt until it is heard: Python misses one that comes between the prompt
    and its waiting for a key."""
    for _ in range(20):
        child.sendintr()
        if child.expect_exact(["Ctrl-D or /quit leaves", pexpect.TIMEOUT], timeout=5) == 0:
            return
    raise AssertionError("Ctrl-C does nothing")
