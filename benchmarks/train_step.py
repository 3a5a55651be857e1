"""Tokens/s of a training step, by precision and compilation, against the machine's limit.

    python -m benchmarks.train_step [--preset tiny --batch 16 --rounds 15]

The step is forward, backward and fused AdamW on random tokens: no data loading, no logging. FLOPs
are counted by `gpt.flops`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

from gpt.bench.output import machine_facts, machine_line
from gpt.bench.rounds import interleave
from gpt.config import PRESETS, GPTConfig
from gpt.flops import flops_per_token
from gpt.machine import measured
from gpt.model import GPT
from gpt.native import gradients


def make_step(model: GPT, ids: torch.Tensor, bf16: bool) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny", choices=PRESETS)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="also time compiled steps")
    args = parser.parse_args()

    gradients.get_ready()  # as the trainer does
    config = GPTConfig.preset(args.preset).replace(vocab_size=args.vocab)
    ids = torch.randint(0, args.vocab, (args.batch, config.block_size + 1))
    tokens = args.batch * config.block_size
    subjects: dict[str, Callable[[], None]] = {}
    for compiled in [False, True][: 1 + args.compile]:
        for bf16 in (False, True):
            torch.manual_seed(0)
            model = GPT(config)
            if compiled:
                model.compile()
            name = ("bf16" if bf16 else "float32") + (" compiled" if compiled else "")
            subjects[name] = make_step(model, ids, bf16)
    times = interleave(subjects, args.rounds)
    flops = flops_per_token(config).training
    limits = {"float32": measured(torch.float32).flops, "bf16": measured(torch.bfloat16).flops}
    print(machine_line(machine_facts()))
    print(
        f"{args.preset}, {model.num_params() / 1e6:.2f} M parameters, context {config.block_size}, "
        f"batch {args.batch}, {flops / 1e6:.1f} MFLOP a token; matrix products: "
        + ", ".join(f"{name} {limit / 1e9:.0f} GFLOP/s" for name, limit in limits.items())
    )
    for name, timing in times.items():
        rate = tokens / timing.median
        share = rate * flops / limits[name.split()[0]]
        print(f"  {name:17} {timing}   {rate:8.0f} tokens/s   {share:4.0%} of the limit")


if __name__ == "__main__":
    main()
