"""What share of a training step the optimizer takes, Muon beside AdamW.

    python -m benchmarks.muon [--tokens 768,1024 --rounds 15 --json FILE]

The step is forward and backward of the recipe's model (0.8 M parameters) on random characters, and
the optimizer with its AdamW part; no data loading, no logging. A share is of one round, whose parts
follow one another, so a slow spell hits them all. CPU time is that of all threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from gpt.bench.output import (
    check_outputs,
    machine_facts,
    machine_line,
    table,
    whole_numbers,
    write_results,
)
from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.native import gradients
from gpt.training.optim import OptimizerConfig, make_optimizer

KINDS = ("muon", "adamw")
CHARACTERS = 65


def measure(tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each part in each round."""
    config = GPTConfig(
        vocab_size=CHARACTERS, block_size=args.block_size, n_layer=args.layers,
        n_head=max(1, args.width // 32), d_model=args.width, mlp="relu2", qk_norm=True,
        tie_embeddings=False, conv_width=4, zero_init=True,
    )  # fmt: skip
    ids = torch.randint(CHARACTERS, (max(1, tokens // args.block_size), args.block_size + 1))
    model = GPT(config)

    def forward_backward() -> None:
        model.zero_grad()
        model(ids[:, :-1], targets=ids[:, 1:]).backward()

    parts: dict[str, Callable[[], object]] = {"forward and backward": forward_backward}
    for kind in KINDS:
        settings = OptimizerConfig(kind=kind, lr=1e-9, muon_lr=1e-9)
        parts[kind] = make_optimizer(model.named_parameters(), settings, config, fused=True).step
    for part in parts.values():
        part()
    found: dict[str, Any] = {"tokens": ids[:, 1:].numel(), "parameters": model.num_params()}
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"wall_s": [], "cpu_s": []} for name in parts
    }
    for _ in range(args.rounds):
        for name, part in parts.items():
            wall, cpu = time.perf_counter(), time.process_time()
            part()
            seconds[name]["wall_s"].append(time.perf_counter() - wall)
            seconds[name]["cpu_s"].append(time.process_time() - cpu)
    shares = {
        f"{kind}_{clock}": [
            own / (own + rest)
            for own, rest in zip(
                seconds[kind][clock], seconds["forward and backward"][clock], strict=True
            )
        ]
        for kind in KINDS
        for clock in ("wall_s", "cpu_s")
    }
    return {**found, "seconds": seconds, "shares": shares}


def lines(result: dict[str, Any]) -> list[str]:
    """A table: milliseconds, and of the optimizers the share of their step."""
    rows = []
    for name, clocks in result["seconds"].items():
        cells = [name]
        for clock, values in clocks.items():
            cells.append(f"{statistics.median(values) * 1e3:.1f} ({min(values) * 1e3:.1f})")
            shares = result["shares"].get(f"{name}_{clock}")
            cells.append(
                f"{statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"
                if shares
                else ""
            )
        rows.append(cells)
    head = ("median (least)", "wall ms", "share", "CPU ms", "share")
    return [f"{result['tokens']:,} tokens, {result['parameters']:,} parameters", *table(head, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=whole_numbers, default=[768, 1024], help="of a step")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="(default: as many as torch takes)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers into a file")
    args = parser.parse_args()
    args.plot = None
    check_outputs(args)
    gradients.get_ready()  # as the trainer does
    if args.threads:
        torch.set_num_threads(args.threads)
    machine = machine_facts()
    print(machine_line(machine))
    results = []
    for tokens in args.tokens:
        results.append(measure(tokens, args))
        print("\n".join(lines(results[-1])), flush=True)
    if args.json:
        write_results(args.json, "muon", args, machine, results, interrupted=False)


if __name__ == "__main__":
    main()
