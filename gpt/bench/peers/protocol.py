"""What a peer's process and the benchmark say to each other: a line of JSON each way.

Imports nothing that a peer's own environment may lack. A peer is a function that opens a model and
returns another, which makes texts:

    open(folder, dtype, threads) -> (version, make)
    make(prompts, tokens) -> (texts, times)

`texts` are the ids made, `times` the moments (seconds, by one clock) of the beginning and at which
each step's tokens were there for all texts that run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Make = Callable[[list[list[int]], int], "tuple[list[list[int]], list[float]]"]
Open = Callable[[str, str, int], "tuple[str, Make]"]


def while_all_run(began: float, moments: list[list[float]]) -> list[float]:
    """`times` from the moments at which each text got each of its tokens: the beginning, when
    every text had its first token, and each later token's of the text that was last to begin,
    until the first text is over."""
    last = max(moments, key=lambda each: each[0])
    over = min(each[-1] for each in moments)
    return [began, last[0], *[moment for moment in last[1:] if moment <= over]]


def serve(open_model: Open) -> None:
    """Answer the benchmark until it closes the line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(**said: Any) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    make: Make | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if make is None:
                version, make = open_model(asked["model"], asked["dtype"], asked["threads"])
                answer(version=version)
            else:
                texts, times = make(asked["prompts"], asked["tokens"])
                answer(texts=texts, times=times)
        except Exception as error:  # noqa: BLE001 - the benchmark says which peer and why
            answer(error=" ".join(f"{type(error).__name__}: {error}".split())[:300])
