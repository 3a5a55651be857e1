"""Tokens/s of a training step, by precision, kernels and compilation, against the machine's limit.

    python -m benchmarks.train_step [--preset tiny --batch 16 --rounds 15]
    python -m benchmarks.train_step --config configs/tinyshakespeare-fast.yaml --vocab 65

The step is forward, backward, clipping and the optimizer on random tokens: no data loading, no
logging. Without our own kernels memory is still kept for the next step, as a process does that or
does not. FLOPs are counted by `gpt.flops`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from gpt.bench.output import machine_facts, machine_line
from gpt.bench.rounds import interleave
from gpt.config import PRESETS, GPTConfig
from gpt.flops import flops_per_token
from gpt.machine import measured
from gpt.model import GPT
from gpt.native import gradients
from gpt.native import kernels as native
from gpt.training.optim import OptimizerConfig, make_optimizer


def make_step(
    model: GPT, ids: torch.Tensor, bf16: bool, optimizer: OptimizerConfig | None = None
) -> Callable[[], None]:
    settings = optimizer or OptimizerConfig()
    moved = make_optimizer(model.named_parameters(), settings, model.config, fused=True)
    weights = list(model.parameters())
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            nats = model(inputs, targets=targets)
        (nats / targets.numel()).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        moved.step()
        moved.zero_grad()

    return step


def without_kernels(step: Callable[[], None]) -> Callable[[], None]:
    def alone() -> None:
        kernels = native.current()
        native.use(None)
        step()
        native.use(kernels)

    return alone


def chosen(args: argparse.Namespace) -> tuple[GPTConfig, OptimizerConfig, int]:
    """Architecture, optimizer and sequences in a step."""
    if args.config is None:
        config = GPTConfig.preset(args.preset).replace(vocab_size=args.vocab)
        return config, OptimizerConfig(), args.batch or 16
    given: dict[str, Any] = yaml.safe_load(args.config.read_text())
    config = GPTConfig(vocab_size=args.vocab, **given["model"]["config"])
    batch = args.batch or given["data"]["batch_size"]
    return config, OptimizerConfig(**given["model"].get("optimizer", {})), batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny", choices=PRESETS)
    parser.add_argument("--config", type=Path, help="a training config, instead of a preset")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--batch", type=int, help="(default: the config's, or 16)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="also time compiled steps")
    parser.add_argument("--no-bf16", action="store_true", help="float32 only")
    parser.add_argument("--threads", type=int, help="(default: as many as torch takes)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    kernels = gradients.get_ready()  # as the trainer does
    config, optimizer, batch = chosen(args)
    ids = torch.randint(0, args.vocab, (batch, config.block_size + 1))
    tokens = batch * config.block_size
    subjects: dict[str, Callable[[], None]] = {}
    for compiled in [False, True][: 1 + args.compile]:
        for bf16 in [False, True][: 1 + (not args.no_bf16)]:
            torch.manual_seed(0)
            model = GPT(config)
            if compiled:
                model.compile()
            name = ("bf16" if bf16 else "float32") + (" compiled" if compiled else "")
            subjects[name] = make_step(model, ids, bf16, optimizer)
            if kernels is not None and name == "float32":
                subjects["float32 by torch"] = without_kernels(subjects[name])
    times = interleave(subjects, args.rounds)
    flops = flops_per_token(config).training
    limits = {"float32": measured(torch.float32).flops, "bf16": measured(torch.bfloat16).flops}
    print(machine_line(machine_facts()))
    print(
        f"{args.config or args.preset}, {model.num_params() / 1e6:.2f} M parameters, context "
        f"{config.block_size}, batch {batch}, {flops / 1e6:.1f} MFLOP a token; matrix products: "
        + ", ".join(f"{name} {limit / 1e9:.0f} GFLOP/s" for name, limit in limits.items())
    )
    for name, timing in times.items():
        rate = tokens / timing.median
        share = rate * flops / limits[name.split()[0]]
        print(f"  {name:17} {timing}   {rate:8.0f} tokens/s   {share:4.0%} of the limit")


if __name__ == "__main__":
    main()
