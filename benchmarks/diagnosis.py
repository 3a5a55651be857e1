"""What looking inside the model costs: one probe beside one training step, interleaved.

    python -m benchmarks.diagnosis [--preset tiny --block 128 --batch 8 --rounds 15]

The probe is what `gpt.training.diagnosis` does every `diagnosis.every_n_steps`: the norms of the
step's gradients, and one watched forward over two sequences of the batch.
"""

from __future__ import annotations

import argparse
import inspect

import torch

from benchmarks.train_step import make_step
from gpt.bench.output import machine_facts, machine_line
from gpt.bench.rounds import interleave
from gpt.config import PRESETS, GPTConfig
from gpt.diagnosis import gradient_norms, measure
from gpt.model import GPT
from gpt.training.diagnosis import Diagnosis


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="tiny", choices=PRESETS)
    parser.add_argument("--block", type=int, default=128, help="context length")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    defaults = inspect.signature(Diagnosis).parameters
    every, sequences = defaults["every_n_steps"].default, defaults["sequences"].default
    config = GPTConfig.preset(args.preset).replace(vocab_size=args.vocab, block_size=args.block)
    torch.manual_seed(0)
    model = GPT(config)
    ids = torch.randint(0, args.vocab, (args.batch, args.block + 1))
    trained = make_step(GPT(config), ids, bf16=False)
    model(ids[:, :-1]).logsumexp(-1).mean().backward()

    def probe() -> None:
        gradient_norms(model)
        measure(model, lambda: model(ids[:sequences, :-1]))

    times = interleave({"training step": trained, "probe": probe}, args.rounds)
    print(machine_line(machine_facts()))
    print(
        f"{args.preset}, {model.num_params() / 1e6:.2f} M parameters, context {args.block}, "
        f"batch {args.batch}, probe of {sequences}"
    )
    for name, timing in times.items():
        print(f"  {name:14} {timing}")
    share = times["probe"].median / times["training step"].median / every
    print(f"  every {every} steps: {share:.2%} of training")


if __name__ == "__main__":
    main()
