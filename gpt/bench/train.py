"""`antiphon bench train`: the training step, what each switch gives, and nanoGPT beside it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.bench.output import (
    COLORS,
    add_shared_options,
    at_least,
    machine_facts,
    machine_line,
    names_of,
    table,
    write_plot,
    write_results,
)
from gpt.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpt.bench.training import Shape, Subject

SHAPES = {
    # layers, heads, width, block, vocabulary, batch
    "cpu": (4, 4, 128, 64, 65, 12),
    "10m": (6, 6, 384, 256, 65, 16),
    "gpt2-124m": (12, 12, 768, 1024, 50257, 1),
}
PEERS = ("nanogpt",)
SAME_LOSS = {"float32": 1e-5, "bf16": 1e-2}
"""How far apart first losses may be, of their size, to be those of one function."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", choices=SHAPES, default="10m",
        help="nanoGPT's settings: for a CPU, of 10.7 M parameters, or GPT-2 (default: %(default)s)",
    )  # fmt: skip
    for name, what in (
        ("layers", "of the model"), ("heads", "of attention"), ("width", "of the stream"),
        ("block", "tokens of a block"), ("vocabulary", "tokens there are"),
        ("batch", "blocks in a step"),
    ):  # fmt: skip
        parser.add_argument(
            f"--{name}", type=int, metavar="N", help=f"{what} (default: the shape's)"
        )
    parser.add_argument(
        "--precisions", type=names_of(*SAME_LOSS), default=list(SAME_LOSS), metavar="NAME,NAME",
        help=f"of the matrix products, of {', '.join(SAME_LOSS)} (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--no-switches", action="store_true", help="only the step as training takes it"
    )
    parser.add_argument("--compile", action="store_true", help="compiled steps, too")
    parser.add_argument(
        "--peers", type=names_of(*PEERS, "none"), default=list(PEERS), metavar="NAME,NAME",
        help=f"run them beside, of {', '.join(PEERS)}; none for none (default: all that can be)",
    )  # fmt: skip
    parser.add_argument("--nanogpt", metavar="PATH", help="nanoGPT's folder, or its model.py")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="(default: %(default)s)")
    add_shared_options(parser)


def run(args: argparse.Namespace) -> int:
    sizes = ("layers", "heads", "width", "block", "vocabulary", "batch")
    at_least(args, 1, *sizes, "rounds", "threads")
    at_least(args, 0, "seed")
    if args.device != "cpu":
        raise ConfigError(f"--device is {args.device!r}, but this runs on the cpu; leave it out")
    preset = dict(zip(sizes, SHAPES[args.shape], strict=True))
    given = {name: getattr(args, name) or preset[name] for name in sizes}
    if given["width"] % given["heads"]:
        raise ConfigError(
            f"--width {given['width']} is not divisible by --heads {given['heads']}; change one"
        )

    import torch

    from gpt.bench.training import PRECISIONS, NanoGPT, Ours, Shape
    from gpt.flops import flops_per_token
    from gpt.machine import measured

    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    shape = Shape(**given)
    facts = machine_facts()
    ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.block + 1))
    nano = None
    if "nanogpt" in args.peers:
        if args.nanogpt is None:
            print("nanogpt is left out: --nanogpt PATH says where its model.py is", file=sys.stderr)
        else:
            nano = NanoGPT(Path(args.nanogpt), shape, ids)
    ours = Ours(shape, ids, None if nano is None else dict(nano.model.state_dict()))
    subjects: list[Subject] = []
    for precision in args.precisions:
        subjects += ours.subjects(precision, switches=not args.no_switches, compiled=args.compile)
        if nano is not None:
            subjects += nano.subjects(precision, compiled=args.compile)
    losses = [subject.loss() for subject in subjects]
    limits = {name: measured(PRECISIONS[name]).flops for name in args.precisions}
    flops = flops_per_token(shape.config).training
    print(machine_line(facts))
    print(
        f"{ours.model.num_params():,} parameters, {shape.batch} blocks of {shape.block} tokens, "
        f"vocabulary {shape.vocabulary:,}, {flops / 1e6:.1f} MFLOP a token; matrix products: "
        + ", ".join(f"{name} {limit / 1e9:.0f} GFLOP/s" for name, limit in limits.items()),
        flush=True,
    )
    results, interrupted = _measure(subjects, losses, shape, flops, limits, args.rounds)
    print("\n".join(lines_of(results)))
    if args.json:
        write_results(args.json, "train", args, facts, results, interrupted=interrupted)
    if args.plot and results:
        write_plot(args.plot, draw(results))
    unlike = [each for each in results if not each["same_loss"]]
    for each in unlike:
        print(
            f"{each['name'].strip()} in {each['precision']} loses {each['first_loss']:.6f} on the "
            "first batch, the first row another number: they do not compute the same",
            file=sys.stderr,
        )
    return 130 if interrupted else int(bool(unlike))


def _measure(
    subjects: list[Subject],
    losses: list[float],
    shape: Shape,
    flops: float,
    limits: dict[str, float],
    rounds: int,
) -> tuple[list[dict[str, Any]], bool]:
    from gpt.bench.rounds import interleave

    named = {f"{each.precision} {each.name}": each.step for each in subjects}
    try:
        times = interleave(named, rounds)
    except KeyboardInterrupt:
        return [], True
    results: list[dict[str, Any]] = []
    peers = {s.precision: times[f"{s.precision} nanogpt"].median for s in subjects
             if s.name == "nanogpt"}  # fmt: skip
    for subject, loss in zip(subjects, losses, strict=True):
        timing = times[f"{subject.precision} {subject.name}"]
        rate = shape.tokens / timing.median
        peer = peers.get(subject.precision)
        base, first = next(
            (each, other) for each, other in zip(subjects, losses, strict=True)
            if each.precision == subject.precision
        )  # fmt: skip
        ours = times[f"{base.precision} {base.name}"].median
        results.append(
            {
                "name": subject.name,
                "precision": subject.precision,
                "tokens_per_s": rate,
                "limit_share": rate * flops / limits[subject.precision],
                "times_nanogpt": None if peer is None else peer / timing.median,
                "switch": subject.switch or None,
                "switched_on": subject.on if subject.switch else None,
                "switch_gives": _gives(subject, timing.median, ours),
                "first_loss": loss,
                "same_loss": abs(loss - first) <= SAME_LOSS[subject.precision] * abs(first),
                **timing.to_dict(),
            }
        )
    return results, False


def _gives(subject: Subject, seconds: float, ours: float) -> float | None:
    """How many times faster a step is with the switch than without it."""
    if not subject.switch:
        return None
    return ours / seconds if subject.on else seconds / ours


# --- Showing --------------------------------------------------------------------------------------


def lines_of(results: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for precision in dict.fromkeys(each["precision"] for each in results):
        rows = [
            [
                each["name"],
                f"{each['median_s'] * 1e3:.1f}",
                f"{each['min_s'] * 1e3:.1f} to {each['max_s'] * 1e3:.1f}",
                f"{each['tokens_per_s']:,.0f}",
                f"{each['limit_share']:.0%}",
                "" if each["times_nanogpt"] is None else f"{each['times_nanogpt']:.2f}",
            ]
            for each in results
            if each["precision"] == precision
        ]
        head = [precision, "ms a step", "spread", "tokens/s", "limit", "x nanogpt"]
        lines += ["", *table(head, rows)]
    return [*lines, *switches(results)]


def switches(results: list[dict[str, Any]]) -> list[str]:
    """A table of what each switch gives, in each precision, and what bf16 gives over float32."""
    precisions = list(dict.fromkeys(each["precision"] for each in results))
    names = list(dict.fromkeys(each["switch"] for each in results if each["switch"]))
    rows = []
    for name in names:
        found = {each["precision"]: each for each in results if each["switch"] == name}
        default = "" if any(each["switched_on"] for each in found.values()) else "yes"
        cells = [f"{found[p]['switch_gives']:.2f}" if p in found else "" for p in precisions]
        rows.append([name, default, *cells])
    plain = {each["precision"]: each["median_s"] for each in results if each["name"] == "antiphon"}
    if len(plain) > 1:
        gives = f"{plain['float32'] / plain['bf16']:.2f}"
        rows.append(["bf16", "", *(gives if p == "bf16" else "" for p in precisions)])
    if not rows:
        return []
    head = ["what a switch gives", "default", *(f"x, {p}" for p in precisions)]
    return ["", *table(head, rows)]


def draw(results: list[dict[str, Any]]) -> Figure:
    """Tokens a second, with the spread of the rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.4 * len(results) + 1))
    axes = figure.subplots()
    colors = dict(zip(dict.fromkeys(each["precision"] for each in results), COLORS, strict=False))
    for i, each in enumerate(results):
        rate, tokens = each["tokens_per_s"], each["tokens_per_s"] * each["median_s"]
        spread = [[rate - tokens / each["max_s"]], [tokens / each["min_s"] - rate]]
        axes.barh(i, rate, xerr=spread, color=colors[each["precision"]], height=0.7, capsize=2)
    axes.set_yticks(range(len(results)), [f"{e['precision']} {e['name'].strip()}" for e in results])
    axes.invert_yaxis()
    axes.set_xlabel("tokens a second")
    axes.grid(True, axis="x", alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
