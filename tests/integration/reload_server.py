"""The server of the reloads: the real one, with the soak's model in one version after the other.

MODEL is a folder with a `config.json`, `{"shift": N}`, which says what follows what; one without a
shift cannot be loaded. `pause` is what each forward takes besides, in seconds. `state.json` beside
the folder tells what the engines hold, and how many there are.
"""

from __future__ import annotations

import json
import sys

from gpt.errors import CheckpointError
from serve.engine import Engine
from serve.folders import ModelSource
from serve.life import run
from serve.server import Settings, parse, start_log
from tests.integration.soak_server import ENGINES, RememberingModel, remembering
from tests.integration.state import keep_state


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
        keep_state(ENGINES, source.path.parent)
    return engine


if __name__ == "__main__":
    settings = parse(sys.argv[1:], "antiphon serve")
    start_log(settings)
    sys.exit(run(settings, load))
