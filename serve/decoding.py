"""The engine as `antiphon bench decode` and `prefill` measure it: scheduler, cache, step, replies.

Run as a process of its own, `python -m serve.decoding`, that answers as the peers do
(`gpt/bench/peers/protocol.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as Seq
from importlib.metadata import PackageNotFoundError, version

import torch

from gpt.bench.peers.protocol import Make, serve, while_all_run
from gpt.native.precision import open_model as open_for_decoding
from gpt.params import SamplingParams
from gpt.starter import Starter
from serve.asked import Asked
from serve.engine import Engine
from serve.observing import Observer, Source, Text
from serve.reply import TextReply
from serve.results import Delta


def open_model(folder: str, dtype: str, threads: int) -> tuple[str, Make]:
    """See `gpt.bench.peers.protocol`."""
    torch.set_num_threads(threads)
    loaded, kind, _ = open_for_decoding(folder, dtype, torch.device("cpu"))
    # Without the prefix cache: every round must compute its prompts.
    engine = Engine(
        loaded.model, loaded.tokenizer, name=loaded.name, dtype=kind, prefix_cache=False
    )
    engine.start()
    starter = Starter(loaded.model.config, loaded.tokenizer)

    def make(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
        return asyncio.run(_make(engine, starter, prompts, tokens))

    try:
        own = version("antiphon")
    except PackageNotFoundError:
        own = "source"
    return own, make


class Clock(Observer):
    """Notes when each text got its tokens. A reader may find those of several steps at once."""

    def __init__(self) -> None:
        self.moments: dict[Source, list[float]] = {}

    def stepped(self, tokens: int, made: Seq[Text], began: float, now: float) -> None:
        for text in made:
            self.moments.setdefault(text.reply, []).append(now)


async def _make(
    engine: Engine, starter: Starter, prompts: list[list[int]], tokens: int
) -> tuple[list[list[int]], list[float]]:
    params = SamplingParams(temperature=0, seed=0, max_tokens=tokens, ignore_end_of_text=True)
    engine.observer = clock = Clock()
    began = time.monotonic()
    replies = [engine.submit(Asked([starter.start(prompt, params)])) for prompt in prompts]

    async def read(reply: TextReply) -> list[int]:
        return [id_ async for event in reply if isinstance(event, Delta) for id_ in event.token_ids]

    texts = await asyncio.gather(*map(read, replies))
    return list(texts), while_all_run(began, [clock.moments[reply] for reply in replies])


if __name__ == "__main__":
    serve(open_model)
