"""The `antiphon bench` command: finds the benchmark, and imports what it needs when it runs.

A benchmark is a module with two functions: `configure(parser)` adds its options, `run(args)` does
the work and returns the exit status. Importing the module must not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpt.arguments import CommandParser, examples
from gpt.bench.output import check_outputs
from gpt.patterns.text import FORMS


@dataclass(frozen=True)
class Benchmark:
    """One subcommand.

    Attributes:
        module: where `configure` and `run` are.
        help: one line for the list.
        description: what is measured, against what, and how to read it.
        examples: without the leading `antiphon bench`.
    """

    module: str
    help: str
    description: str
    examples: tuple[str, ...]


BENCHMARKS: dict[str, Benchmark] = {
    "attention": Benchmark(
        "gpt.bench.attention",
        "time and memory of every attention pattern, against full attention, LSTM and RNN",
        f"""\
Measure what it takes to mix the tokens of a text, by its length: time, share of what the
machine can do, and peak memory, forward alone and forward with backward.

  naive       matmul, mask, softmax, matmul: every score is held
  fused       torch's scaled_dot_product_attention, causal: full attention at its best
  PATTERN     as training runs it (gpt.attention.attend); there are
              {", ".join(FORMS[1:4])},
              {", ".join(FORMS[4:])}
  lstm, rnn   nn.LSTM and nn.RNN of the heads' joint width; their own matrix products are in it,
              while attention's projections are not

Rows take turns, so a slow spell of the machine hits all of them; medians stand with the least
and the most. "x fused" is how many times faster a row's median is than that of fused. "limit"
is the share of the machine's measured matrix-product speed (of a GPU: the datasheet's) that the
useful FLOPs come to; of attention those are the products of (query, key) pairs that may be
seen, so a kernel that computes what it then hides has less.

Memory is what a process grows by while it makes the plan (or mask) and runs once: peak resident
memory on a CPU, each run in a fresh process; the allocator's peak on a GPU. In the end,
exponents are fitted to the medians: time ~ length^e, least squares of the logarithms.""",
        (
            "attention",
            "attention --lengths 1024,8192 --rows fused,patterns --patterns window:256",
            "attention --lengths 1024,2048,4096,8192 --json attention.json --plot attention.png",
            "attention --patterns window:256 fixed:64:4 'mine.patterns:Mine(16)' --no-memory",
            "attention --lengths 8192 --rows fused,patterns --patterns window:256 --flex",
        ),
    ),
    "recall": Benchmark(
        "gpt.bench.recall",
        "how far back a GPT, an LSTM and an RNN of equal size remember what they read",
        """\
Train small models to recall what they read at some distance, and see how far back they can.

A text begins with some pairs, tokens that say a key and its value, goes on with filler, and
ends with the keys in another order: after each the model must give its value. Keys and values
are drawn anew for every text, so nothing can be known by heart. Every model trains on the same
texts of all distances, and has as many parameters as the first GPT.

Two numbers by distance (in tokens, from the key in the question back to the pair): accuracy, and
how strongly the loss at the question depends on the pair's embedding (the norm of its gradient,
a mean over texts), before training and after. A loss that is solved has hardly a gradient, so
compare models by the norms before training: where a recurrent network's fall with distance,
attention's do not.

Runs some minutes with the defaults; Ctrl-C stops the model in training where it is and shows
what there is. The same seed and threads give the same numbers.""",
        (
            "recall",
            "recall --distances 16,64 --steps 100",
            "recall --position rotary alibi --pattern causal window:64 --models gpt",
            "recall --steps 1000 --json recall.json --plot recall.png",
        ),
    ),
    "decode": Benchmark(
        "gpt.bench.decode",
        "tokens per second of the engine, beside other programs on the same weights",
        """\
Make texts with the server's engine (scheduler, cache and all) and with other programs, on the same
weights, random ones or those of --model, and prompts of different lengths, greedily.

Each is a process of its own that opens the model once; rounds go around all of them, and before
each the memory's speed is measured, so a slow spell of the machine hits all. Tokens per second are
counted while all texts run; medians stand with the least and the most. "limit" is the share of the
memory's speed that reading the weights once a step takes; "x" is ours over theirs.

Nobody is fast by being wrong: "same" counts the texts that are those of the first row, and "off" is
how far below the best logit, by our own float32 model, the tokens of some texts lie (those that
differ first). Random weights give many tokens nearly the same chance, so rounding parts texts early
in bfloat16; what lies further off than rounding can explain is named, and the status is 1.

A peer runs in the environment that has it, this one or another: --peer-python says which. One that
is not installed, or refuses, is left out with the reason.""",
        (
            "decode",
            "decode --batch 1,8,32 --peers transformers,llama.cpp",
            "decode --peers llama.cpp,vllm --peer-python llama.cpp=/opt/llama/bin/python",
            "decode --model smollm2 --batch 1 --dtypes bfloat16",
            "decode --dtypes float32 --peers none --json decode.json --plot decode.png",
        ),
    ),
    "prefill": Benchmark(
        "gpt.bench.prefill",
        "the same for reading prompts",
        "Like decode, with longer prompts and texts of one token: how fast prompts are read.",
        ("prefill", "prefill --prompt 256 --batch 1,8 --json prefill.json"),
    ),
    "serve": Benchmark(
        "serve.bench.command",
        "what callers of a server see under load, and how much it carries",
        """\
Put load on a server and measure what its callers see: time to the first token, from token to
token, and to the end of a text (the time that 50, 90, 95 and 99 of a hundred stay within), tokens
a second of texts and of prompts, texts a second that keep the limits given, and errors by status.

The server is a process of its own (or one that runs already, --address), and so is what loads it.
With --streams, so many requests are under way all the time; with --rate they arrive at random, and
times count from when a request was due. Prompts are random tokens; texts have exactly the length
drawn, as end-of-text does not end them. What is due in the warm-up is not counted.

More rows are other ways to carry the load, or other loads; all take turns, round by round, so
that a slow spell of the machine hits all of them. Rates are medians of the rounds, with the least
and the most; times are those of all rounds together. Ctrl-C shows what there is.""",
        (
            "serve --preset nano --streams 8 --seconds 3",
            "serve runs/notes/model --engine-only --one-at-a-time",
            "serve --preset gpt2-124m --rate 2 --first-token-ms 500 --token-ms 100",
            "serve --preset gpt2-124m --long-prompts 900 --json serve.json --plot serve.png",
            "serve --address localhost:50051 --prompt-tokens lognormal:64:0.8:400",
            "serve --address models.example.org:50051 --tls --api-key-file key",
            "serve model --shared-prefix 512 --no-shared-prefix --prompt-tokens fixed:16",
        ),
    ),
    "train": Benchmark(
        "gpt.bench.train",
        "the training step: tokens/s, what each switch gives, and nanoGPT beside it",
        """\
Take training steps on random tokens, in nanoGPT's architecture, by turns: ours as training takes
them, with one switch changed at a time, and nanoGPT's own model, loss and optimizer where
--nanogpt says where they are (its folder, or its model.py, which is run).

All begin with the same weights, and what they lose on the first batch is compared. A step is
forward, backward, clipping and AdamW; loading data and logging are not in it (benchmarks.loop).

"limit" is the share of the machine's measured matrix-product speed in that precision that the
model's FLOPs come to; "x nanogpt" is how many times faster the median is than nanoGPT's in the
same precision, not compiled. A last table says how many times faster each switch makes the step
than it is without: fused AdamW; the loss in shares of the tokens, which large vocabularies get by
default; compiling, with --compile; bf16 over float32.""",
        (
            "train --shape cpu",
            "train --nanogpt nanoGPT/model.py --compile",
            "train --shape gpt2-124m --precisions bf16 --rounds 3 --json train.json",
            "train --shape cpu --vocabulary 50257 --no-switches --plot train.png",
        ),
    ),
}


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Measure what the project claims, on this machine.",
        epilog=_examples(prog, *(each.examples[0] for each in BENCHMARKS.values())),
    )
    actions = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, benchmark in BENCHMARKS.items():
        below = actions.add_parser(
            name,
            help=benchmark.help,
            description=benchmark.description,
            epilog=_examples(prog, *benchmark.examples),
        )
        _module(benchmark).configure(below)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "antiphon bench") -> int:
    args = build_parser(prog).parse_args(argv)
    check_outputs(args)
    status: int = _module(BENCHMARKS[args.benchmark]).run(args)
    return status


def _module(benchmark: Benchmark) -> Any:
    return importlib.import_module(benchmark.module)


def _examples(prog: str, *lines: str) -> str:
    return examples(*(f"{prog} {line}" for line in lines))
