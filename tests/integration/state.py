"""What a server process under a long run tells of itself, in a file, ten times a second."""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from pathlib import Path

from serve.engine import Engine


def keep_state(engines: weakref.WeakSet[Engine], folder: Path) -> None:
    """Write `state.json` from here on, in a thread: how many engines there are, what they hold, and
    how much memory the process takes, where the system tells."""
    threading.Thread(target=_keep, args=(engines, folder), daemon=True).start()


def _keep(engines: weakref.WeakSet[Engine], folder: Path) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    while True:
        living = list(engines)
        state = {
            "engines": len(living),
            "held": sum(engine.held for engine in living),
            "pages": sum(engine.pages_used for engine in living),
            "preempted": sum(engine.preemptions for engine in living),
            "threads": threading.active_count(),
        }
        del living  # an engine that was replaced must be free to go
        if (statm := Path("/proc/self/statm")).exists():
            state["bytes"] = int(statm.read_text().split()[1]) * page
        (folder / "state.part").write_text(json.dumps(state))
        os.replace(folder / "state.part", folder / "state.json")
        time.sleep(0.1)
