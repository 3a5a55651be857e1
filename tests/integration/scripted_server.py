"""A server process with a scripted model: `antiphon serve` in all but what it loads.

MODEL is a folder. Loading waits until it holds the file `loaded`; the model says `a` for ever, a
token every 10 ms, or as fast as it can if the folder holds `fast`. Once it holds the file `break`
the engine's scheduler fails; with `stuck` a forward does not end, and with `fail` each raises.
"""

from __future__ import annotations

import sys
import time

from gpt.tokenizer import Tokenizer
from serve.engine import Engine
from serve.folders import ModelSource
from serve.life import run
from serve.server import Settings, parse, start_log
from tests.serve.scripted import ScriptedModel


def load(settings: Settings, source: ModelSource, replaces: Engine | None) -> Engine:
    while not (source.path / "loaded").exists():
        time.sleep(0.01)

    def following(position: int, token: int) -> int:
        if not fast:
            time.sleep(0.01)
        if (source.path / "break").exists():
            engine._scheduler.schedule = lambda: 1 / 0  # type: ignore[method-assign]
        while (source.path / "stuck").exists():
            time.sleep(0.01)
        if (source.path / "fail").exists():
            raise RuntimeError("the accelerator is gone")
        return ord("a")

    fast = (source.path / "fast").exists()
    tokenizer = Tokenizer.bytes()
    model = ScriptedModel(tokenizer.n_vocab, following, block_size=10_000)
    engine = Engine(
        model,
        tokenizer,
        name=source.name or "scripted",
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_waiting_tokens=settings.max_waiting_tokens,
    )
    return engine


if __name__ == "__main__":
    settings = parse(sys.argv[1:], "antiphon serve")
    start_log(settings)
    sys.exit(run(settings, load))
