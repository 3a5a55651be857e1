"""The server of the reloads: the real one, with the soak's model in one version after the other.

MODEL is a folder with a `config.json`, `{"shift": N}`, which says what follows what; one without a
shift cannot be loaded. `pause` is what each forward takes besides, in seconds. `state.json` beside
the folder tells what the engines hold, and how many there are.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from pathlib import Path

from gpt.errors import CheckpointError
from serve.engine import Engine
from serve.folders import ModelSource
from serve.life import run
from serve.server import Settings, parse, start_log
from tests.integration.soak_server import RememberingModel, remembering

ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def load(settings: Settings, source: ModelSource, replaces: Engine | None) -> Engine:
    values = json.loads((source.path / "config.json").read_text())
    if "shift" not in values:
        raise CheckpointError(f"{source.path} has no shift")
    engine = remembering(settings, values["shift"])
    assert isinstance(engine.model, RememberingModel)
    engine.model.pause = values.get("pause", 0.0)
    engine.name = source.name or "soak"
    ENGINES.add(engine)
    if replaces is None:
        report = threading.Thread(target=keep_state, args=(source.path.parent,), daemon=True)
        report.start()
    return engine


def keep_state(folder: Path) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    while True:
        engines = list(ENGINES)
        state = {
            "engines": len(engines),
            "held": sum(engine.held for engine in engines),
            "pages": sum(engine.pages_used for engine in engines),
            "threads": threading.active_count(),
        }
        del engines
        if (statm := Path("/proc/self/statm")).exists():
            state["bytes"] = int(statm.read_text().split()[1]) * page
        (folder / "state.part").write_text(json.dumps(state))
        os.replace(folder / "state.part", folder / "state.json")
        time.sleep(0.1)


if __name__ == "__main__":
    settings = parse(sys.argv[1:], "antiphon serve")
    start_log(settings)
    sys.exit(run(settings, load))
