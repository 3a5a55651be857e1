"""What a step of the engine costs besides the model: `python -m benchmarks.overhead`.

Runs decode steps of a full batch in this thread, without gRPC and without the engine's, and takes
the time of each part of a step. A step's forward pass and the draw of its tokens are work on
numbers; the rest is what Python and the scheduler cost. Medians of the steps, in milliseconds, with
the share of the step.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import gpt.generate
import gpt.sampling
import serve.engine
from gpt.bench.output import machine_facts, machine_line, table
from gpt.config import PRESETS, GPTConfig
from gpt.model import GPT
from gpt.params import SamplingParams
from gpt.starter import Starter
from gpt.tokenizer import Tokenizer
from serve.asked import Asked
from serve.bench.processes import made_up_tokenizer
from serve.engine import Engine
from serve.held import Held

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
    "masked": {"temperature": 0.8, "stop_tokens": (5, 6)},  # and never before min_tokens
    "constrained": {"temperature": 0.8, "regex": "[a-z]*"},
}


class Clock:
    """Adds up what calls take, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + took

        return call

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        setattr(owner, attribute, self.timed(name, getattr(owner, attribute)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="gpt2-124m", choices=sorted(PRESETS))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    print(machine_line(machine_facts()))

    size = GPTConfig.preset(args.preset).vocab_size
    tokenizer = made_up_tokenizer(size) if size else Tokenizer.bytes()
    torch.manual_seed(0)
    model = GPT(GPTConfig.preset(args.preset, vocab_size=tokenizer.n_vocab)).eval()
    clock = Clock()
    for owner, attribute, name in (
        (gpt.generate.AttentionPlan, "paged", "plan"),
        (gpt.generate, "_draw", "sampling"),
        (gpt.sampling, "mask", "  of it gpt.filters.mask"),
        (gpt.generate.KVCache, "broken", "KVCache.broken"),
        (Held, "take", "detokenizing, events"),
        (Engine, "_next_work", "scheduling, integrity"),
        (serve.engine, "emit", "waking the event loop"),
    ):
        clock.watch(owner, attribute, name)
    model.forward = clock.timed("model", model.forward)  # type: ignore[method-assign]  # timed in place
    print(f"{args.preset}, {args.streams} texts, {args.steps} steps")
    loop = asyncio.new_event_loop()
    for kind in args.kinds:
        loop.run_until_complete(_measure(args, model, tokenizer, kind, clock))
    loop.close()


async def _measure(
    args: argparse.Namespace, model: GPT, tokenizer: Tokenizer, kind: str, clock: Clock
) -> None:
    engine = Engine(
        model, tokenizer, name="overhead", max_running=args.streams,
        n_pages=1 + args.streams * ((args.prompt + args.steps + 24) // 16 + 1),
    )  # fmt: skip
    starter = Starter(model.config, tokenizer)
    numbers = random.Random(0)
    replies = []
    most = args.steps + 20
    for i in range(args.streams):
        params = SamplingParams(
            seed=i,
            max_tokens=most,
            ignore_end_of_text=kind != "constrained",
            min_tokens=most if kind == "masked" else 0,
            **KINDS[kind],
        )
        prompt = [numbers.randrange(200) for _ in range(args.prompt)]
        replies.append(engine.submit(Asked([starter.start(prompt, params)])))
    steps: list[dict[str, float]] = []
    while len(steps) < args.steps:
        clock.seconds.clear()
        began = time.perf_counter()
        engine.turn()
        took = time.perf_counter() - began
        if all(s.output_len > 2 for s in engine._held):  # all are past their prompts
            steps.append({"step": took, **clock.seconds})
        await asyncio.sleep(0)
        for reply in replies:  # as the service does, which must not be taken for a slow reader
            reply._waiting.clear()
    names = list(dict.fromkeys(name for step in steps for name in step))
    middle = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
    mean = {name: statistics.mean(step.get(name, 0.0) for step in steps) for name in names}
    parts = [name for name in names if name != "step" and not name.startswith(" ")]
    rest = [step["step"] - sum(step.get(name, 0.0) for name in parts) for step in steps]
    middle["other"], mean["other"] = statistics.median(rest), statistics.mean(rest)
    rows = [
        [name, f"{middle[name] * 1e3:.2f}", f"{mean[name] * 1e3:.2f}",
         f"{mean[name] / mean['step']:.1%}"]
        for name in (*names, "other")
    ]  # fmt: skip
    print()
    print("\n".join(table([kind, "median, ms", "mean, ms", "share"], rows)))
    besides = mean["step"] - mean["model"] - mean["sampling"]
    print(
        f"scheduler and Python: {besides / mean['step']:.1%} of a step; "
        f"with sampling {(mean['step'] - mean['model']) / mean['step']:.1%}"
    )


if __name__ == "__main__":
    main()
