"""`antiphon bench recall`: options, tables and plot. The task itself is in `recalling`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from gpt.bench.output import (
    COLORS,
    add_shared_options,
    at_least,
    machine_facts,
    machine_line,
    mark_powers,
    table,
    whole_numbers,
    write_plot,
    write_results,
)
from gpt.errors import ConfigError
from gpt.patterns import parse_pattern, trust

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ("gpt", "lstm", "rnn")
POSITIONS = ("none", "learned", "sinusoidal", "relative", "rotary", "alibi")
INTERRUPTED = 130
KEYS = 8
"""`recalling.KEYS`, known before torch is imported; a test compares them."""

Result = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--distances", type=whole_numbers, default=[16, 32, 64, 128, 256, 512, 1024],
        metavar="N,N,…", help="tokens from a question back to its pair (default: 16,32,…,1024)",
    )  # fmt: skip
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)"
    )
    parser.add_argument(
        "--position", nargs="+", choices=POSITIONS, default=["rotary"],
        help="position schemes of the GPT; each makes a model (default: rotary)",
    )  # fmt: skip
    parser.add_argument(
        "--pattern", nargs="+", default=["causal"], metavar="PATTERN",
        help="attention patterns of the GPT; each makes a model (default: causal)",
    )  # fmt: skip
    for name, default, what in (
        ("steps", 400, "of training"),
        ("pairs", 4, "of key and value in a text, 8 at most"),
        ("width", 64, "of the GPT; the others get as many parameters"),
        ("heads", 2, "of the GPT"),
        ("layers", 2, "of every model"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    parser.add_argument(
        "--rate", type=float, default=3e-3, help="learning rate (default: %(default)s)"
    )
    add_shared_options(parser)


def run(args: argparse.Namespace) -> int:
    at_least(args, 1, "steps", "pairs", "width", "heads", "layers", "threads")
    at_least(args, 0, "seed")
    if args.device != "cpu":
        raise ConfigError(
            f"--device is {args.device!r}, but recall runs on the cpu alone: its "
            "models are small; leave it out"
        )
    if args.pairs > KEYS:
        raise ConfigError(f"--pairs is {args.pairs}, but there are only {KEYS} keys")
    if min(args.distances) < args.pairs:
        raise ConfigError(
            f"--distances has {min(args.distances)}, but {args.pairs} pairs fill as "
            "many tokens; give longer ones or fewer --pairs"
        )
    if not 0 < args.rate < 1:
        raise ConfigError(f"--rate is {args.rate}, but must be above 0 and below 1")
    trust(args.pattern)
    for text in args.pattern:
        parse_pattern(text)

    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    facts = machine_facts()
    print(machine_line(facts))
    print(
        f"{args.pairs} pairs, {args.steps} steps, {args.layers} layers; chance "
        "is 1 in 8", flush=True,
    )  # fmt: skip
    results, interrupted = _all(args)
    print("\n".join(lines_of(results)))
    if args.json:
        write_results(args.json, "recall", args, facts, results, interrupted=interrupted)
    if args.plot and results:
        write_plot(args.plot, draw(results))
    if interrupted:
        print("interrupted: this is how far it got", file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def names_of(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """`(model, position, pattern)` of every model, the GPTs first."""
    gpts = [("gpt", position, pattern) for position in args.position for pattern in args.pattern]
    return [
        each
        for model in MODELS
        if model in args.models
        for each in (gpts if model == "gpt" else [(model, "", "")])
    ]


def _all(args: argparse.Namespace) -> tuple[list[Result], bool]:
    """Results of the models, as far as it got."""
    results: list[Result] = []
    try:
        for model, position, pattern in names_of(args):
            results.append(_one(args, model, position, pattern))
            if results[-1]["steps"] < args.steps:
                return results, True
    except KeyboardInterrupt:
        return results, True
    return results, False


def _one(args: argparse.Namespace, name: str, position: str, pattern: str) -> Result:
    """Train and test a model."""
    import torch
    from torch import nn

    from gpt.bench import recalling

    longest = recalling.text_length(max(args.distances), args.pairs)

    def gpt(position: str, pattern: str) -> recalling.Model:
        return recalling.make_gpt(position, pattern, longest, args.width, args.heads, args.layers)

    torch.manual_seed(args.seed)
    shown = f"GPT {pattern} {position}" if name == "gpt" else name.upper()
    if name == "gpt":
        model = gpt(position, pattern)
    else:
        parameters = recalling.count(gpt(args.position[0], args.pattern[0]))
        kind = nn.LSTM if name == "lstm" else nn.RNN
        torch.manual_seed(args.seed)
        model = recalling.make_recurrent(kind, args.layers, parameters)

    def say(step: int, loss: float, seconds: float) -> None:
        left = seconds / step * (args.steps - step)
        print(
            f"{shown}: step {step}/{args.steps}, loss {loss:.3f}, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )

    before = [recalling.test(model, d, args.pairs, args.seed) for d in args.distances]
    steps = recalling.train(
        model, args.distances, args.pairs, args.steps, args.rate, args.seed, say
    )
    after = [recalling.test(model, d, args.pairs, args.seed) for d in args.distances]
    return {
        "model": shown,
        "parameters": recalling.count(model),
        "steps": steps,
        "distances": [
            {
                "distance": d,
                "accuracy": late.accuracy,
                "loss": late.loss,
                "gradient_before": early.gradient,
                "gradient_after": late.gradient,
            }
            for d, early, late in zip(args.distances, before, after, strict=True)
        ],
    }


# --- Showing --------------------------------------------------------------------------------------


def lines_of(results: list[Result]) -> list[str]:
    if not results:
        return []
    lines: list[str] = []
    for what, title, form in (
        ("accuracy", "accuracy", "{:.0%}"),
        ("gradient_before", "gradient norm at the pair, before training", "{:.1e}"),
        ("gradient_after", "gradient norm at the pair, after training", "{:.1e}"),
    ):
        head = [title, "parameters", *(f"{d['distance']:,}" for d in results[0]["distances"])]
        rows = [
            [
                each["model"],
                f"{each['parameters']:,}",
                *(form.format(d[what]) for d in each["distances"]),
            ]
            for each in results
        ]
        lines += ["", *table(head, rows)]
    return lines


def draw(results: list[Result]) -> Figure:
    """Accuracy, and gradient before training, by distance."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5))
    left, right = figure.subplots(1, 2)
    for i, each in enumerate(results):
        at = [d["distance"] for d in each["distances"]]
        color = COLORS[i % len(COLORS)]
        left.plot(at, [d["accuracy"] for d in each["distances"]], "-o", color=color, markersize=4)
        norms = [d["gradient_before"] or float("nan") for d in each["distances"]]
        right.plot(at, norms, "-o", color=color, markersize=4, label=each["model"])
    left.set_ylim(0, 1.03)
    right.set_yscale("log")
    right.legend(fontsize=8, frameon=False)
    for axes, title in (
        (left, "accuracy"), (right, "gradient norm at the pair, before training")
    ):  # fmt: skip
        mark_powers(axes, [d["distance"] for d in results[0]["distances"]], "distance, tokens")
        axes.set_title(title, loc="left", fontsize=10)
    return figure
