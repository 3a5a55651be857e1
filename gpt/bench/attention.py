"""`antiphon bench attention`: options, table and plot. The rows themselves are in `mixers`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gpt.bench.output import (
    COLORS,
    add_shared_options,
    at_least,
    exponent,
    machine_facts,
    machine_line,
    mark_powers,
    table,
    whole_numbers,
    write_plot,
    write_results,
)
from gpt.bench.rounds import Timing, interleave, waiter
from gpt.errors import ConfigError
from gpt.machine import GIB, device_memory, speed_limit
from gpt.patterns import parse_pattern, trust

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpt.bench.mixers import Shape
    from gpt.machine import Limit

KINDS = ("naive", "fused", "patterns", "lstm", "rnn")
DTYPES = ("float32", "bfloat16", "float16")
INTERRUPTED = 130
SHARE_OF_MEMORY = 0.6
"""Naive attention is left out where it needs more than this share of what is free."""

Result = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=whole_numbers, default=[512, 1024, 2048, 4096], metavar="N,N,…",
        help="tokens of a sequence (default: 512,1024,2048,4096)",
    )  # fmt: skip
    parser.add_argument("--heads", type=int, default=8, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--kv-heads", type=int, metavar="N", help="key and value heads (default: as many)"
    )
    parser.add_argument(
        "--width", type=int, default=64, metavar="N", help="of a head (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences (default: %(default)s)"
    )
    parser.add_argument(
        "--window", type=int, default=256, metavar="N",
        help="keys that a query of the usual patterns sees, about (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--patterns", nargs="+", metavar="PATTERN", help="these instead of the usual ones"
    )
    parser.add_argument(
        "--rows", default=",".join(KINDS), metavar="KIND,…", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--flex", action="store_true",
        help="also torch's compiled flex_attention, forward, for patterns of plain arithmetic; "
        "on a CPU it needs a C++ compiler and some minutes",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N",
        help="times that each row has its turn, after a warm-up (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--no-memory", action="store_true", help="measure time alone")
    add_shared_options(parser)


def run(args: argparse.Namespace) -> int:
    at_least(args, 1, "heads", "kv_heads", "width", "batch", "window", "rounds", "threads")
    at_least(args, 0, "seed")
    kv_heads = args.kv_heads or args.heads
    if args.heads % kv_heads:
        raise ConfigError(f"--heads {args.heads} is not divisible by --kv-heads {kv_heads}")
    rows = rows_of(args)
    compilers = [os.environ.get("CXX", "g++"), "g++", "clang++"]
    if args.flex and args.device == "cpu" and not any(map(shutil.which, compilers)):
        raise ConfigError("--flex compiles, and there is no C++ compiler; install g++, or leave it")

    import torch

    from gpt.device import check_device

    device = check_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    facts = machine_facts(args.device)
    limit = speed_limit(device, getattr(torch, args.dtype))
    print(machine_line(facts))
    of_keys = "" if kv_heads == args.heads else f" ({kv_heads} of keys)"
    print(
        f"{args.heads} heads of {args.width}{of_keys}, batch {args.batch}, {args.dtype}, "
        f"{args.rounds} rounds; {'no limit known' if limit is None else 'limit: ' + limit.what}"
    )
    results: list[Result] = []
    interrupted = False
    try:
        for length in args.lengths:
            found = measure(args, rows, length, limit)
            results += found
            print(f"\n{length:,} tokens")
            print("\n".join(lines_of(found)), flush=True)
    except KeyboardInterrupt:
        interrupted = True
    if len({each["length"] for each in results}) > 1:
        print("\nexponents, fitted over these lengths")
        print("\n".join(exponent_lines(results)))
    if args.json:
        write_results(args.json, "attention", args, facts, results, interrupted=interrupted)
    if args.plot and results:
        write_plot(args.plot, draw(results))
    if interrupted:
        print("interrupted: the lengths above are whole", file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def usual_patterns(window: int) -> list[str]:
    """One of each kind, at about as many keys a query."""
    return [
        f"window:{window}",
        f"window:{window}+sinks:4",
        f"dilated:{window}:4",
        f"fixed:{window}:{max(1, window // 32)}",
        f"bigbird:{max(1, window // 2)}:{window // 8}:2:0",
    ]


def rows_of(args: argparse.Namespace) -> list[str]:
    """The names of the rows (see `mixers.make`). Raises ConfigError."""
    kinds = args.rows.split(",")
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"--rows has {kind[:40]!r}, but can have {', '.join(KINDS)}")
    patterns = list(dict.fromkeys(args.patterns or usual_patterns(args.window)))
    trust(patterns)  # whoever types a class's name means it
    for text in patterns:
        parse_pattern(text)
    if args.patterns and "patterns" not in kinds:
        raise ConfigError(f"--patterns are given, but --rows is {args.rows} without patterns")
    rows: list[str] = []
    for kind in KINDS:
        if kind in kinds:
            rows += patterns if kind == "patterns" else [kind]
    return rows


# --- Measuring ------------------------------------------------------------------------------------


def measure(
    args: argparse.Namespace, rows: list[str], length: int, limit: Limit | None
) -> list[Result]:
    """All rows at one length: times in turn, then the memory of each."""
    import torch

    from gpt.bench import mixers

    device = torch.device(args.device)
    shape = mixers.Shape(
        args.batch, length, args.heads, args.kv_heads or args.heads, args.width, args.dtype,
        args.device,
    )  # fmt: skip
    results: list[Result] = []
    subjects: dict[tuple[str, str], Callable[[], object]] = {}
    flops: dict[tuple[str, str], float] = {}
    for row, phases in _with_flex(args, rows):
        skipped = _too_large(row, shape)
        if skipped:
            results += [_result(row, phase, length, skipped=skipped) for phase in phases]
            continue
        mixer = mixers.make(row, shape)
        mixer.ready()
        for phase in phases:
            subjects[row, phase] = mixers.phase_of(mixer, phase)
            flops[row, phase] = mixers.flops_of(mixer, phase)
    named = {f"{row}\n{phase}": subject for (row, phase), subject in subjects.items()}
    times = interleave(named, args.rounds, waiter(device))
    for row, phase in subjects:
        timing = times[f"{row}\n{phase}"]
        share = None if limit is None else flops[row, phase] / timing.median / limit.flops
        peak = None
        if not args.no_memory and not row.startswith("flex "):
            peak = _peak(mixers.Once(row, phase, shape), device)
        results.append(_result(row, phase, length, timing, share, peak, flops[row, phase]))
    return results


def _with_flex(args: argparse.Namespace, rows: list[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Rows and what of them is measured."""
    from gpt.bench.mixers import FORWARD, PHASES, flex_can

    for row in rows:
        yield row, PHASES
        if args.flex and row not in KINDS and flex_can(parse_pattern(row)):
            yield f"flex {row}", (FORWARD,)


def _too_large(row: str, shape: Shape) -> str | None:
    from gpt.bench.mixers import naive_bytes

    if row != "naive":
        return None
    needed = naive_bytes(shape)
    kind, _, index = shape.device.partition(":")
    free = device_memory(kind, int(index) if index else None).free
    if needed <= SHARE_OF_MEMORY * free:
        return None
    return f"would need about {needed / GIB:.1f} GiB; {free / GIB:.1f} are free"


def _peak(work: Any, device: Any) -> int | None:
    import torch

    from gpt.bench.memory import peak_on_cpu, peak_on_gpu

    if device.type == "cuda":
        return peak_on_gpu(work, device)
    if device.type == "cpu":
        return peak_on_cpu(work, torch.get_num_threads())
    return None


def _result(
    row: str,
    phase: str,
    length: int,
    timing: Timing | None = None,
    share: float | None = None,
    peak: int | None = None,
    flops: float | None = None,
    skipped: str | None = None,
) -> Result:
    return {
        "row": row, "phase": phase, "length": length,
        "time": None if timing is None else timing.to_dict(),
        "flops": flops, "share_of_limit": share, "peak_bytes": peak, "skipped": skipped,
    }  # fmt: skip


# --- Showing --------------------------------------------------------------------------------------


def lines_of(results: list[Result]) -> list[str]:
    """The tables of one length: forward, and forward with backward."""
    from gpt.bench.mixers import BOTH, FORWARD

    of = {(each["row"], each["phase"]): each for each in results}
    lines: list[str] = []
    for phase, title in ((FORWARD, "forward"), (BOTH, "forward and backward")):
        fused = of.get(("fused", phase))
        rows = [[row, *_cells(each, fused)] for (row, at), each in of.items() if at == phase]
        lines += table([title, "median ms", "min", "max", "x fused", "limit", "MiB"], rows)
    skipped = {each["row"]: each["skipped"] for each in results if each["skipped"]}
    return lines + [f"{row} left out: {why}" for row, why in skipped.items()]


def _cells(result: Result, fused: Result | None) -> list[str]:
    time, share, peak = result["time"], result["share_of_limit"], result["peak_bytes"]
    if time is None:
        return ["-"] * 6
    ratio = None if fused is None else fused["time"]["median_s"] / time["median_s"]
    return [
        *(f"{time[name] * 1e3:,.2f}" for name in ("median_s", "min_s", "max_s")),
        "-" if ratio is None else f"{ratio:.2f}",
        "-" if share is None else f"{share:.0%}",
        "-" if peak is None else f"{peak / 2**20:.1f}",
    ]


def series(results: list[Result], row: str, phase: str) -> tuple[list[int], dict[str, list[Any]]]:
    """Lengths, and seconds and bytes at each."""
    found = [each for each in results if (each["row"], each["phase"]) == (row, phase)]
    seconds = [None if each["time"] is None else each["time"]["median_s"] for each in found]
    return [each["length"] for each in found], {
        "seconds": seconds,
        "bytes": [each["peak_bytes"] for each in found],
    }


def exponents(results: list[Result]) -> dict[str, dict[tuple[str, str], float | None]]:
    """Of each row, by phase and by `seconds` or `bytes`."""
    found: dict[str, dict[tuple[str, str], float | None]] = {}
    for row, phase in dict.fromkeys((each["row"], each["phase"]) for each in results):
        lengths, values = series(results, row, phase)
        for what, numbers in values.items():
            found.setdefault(row, {})[phase, what] = exponent(lengths, numbers)
    return found


def exponent_lines(results: list[Result]) -> list[str]:
    from gpt.bench.mixers import BOTH, FORWARD

    columns = [(FORWARD, "seconds"), (BOTH, "seconds"), (FORWARD, "bytes"), (BOTH, "bytes")]
    head = ["row", "time forward", "with backward", "memory forward", "with backward"]
    rows = []
    for row, fitted in exponents(results).items():
        values = [fitted.get(column) for column in columns]
        rows.append([row, *("-" if e is None else f"{e:.2f}" for e in values)])
    return table(head, rows)


def draw(results: list[Result]) -> Figure:
    """Time and memory of forward with backward by length; straight lines are powers."""
    from matplotlib.figure import Figure

    from gpt.bench.mixers import BOTH, FORWARD

    figure = Figure(figsize=(11, 5))
    times, memory = figure.subplots(1, 2)
    fitted = exponents(results)
    for i, row in enumerate(dict.fromkeys(each["row"] for each in results)):
        flex = row.startswith("flex ")
        phase = FORWARD if flex else BOTH
        lengths, values = series(results, row, phase)
        for axes, what, scale in ((times, "seconds", 1e3), (memory, "bytes", 2**-20)):
            points = [(x, y * scale) for x, y in zip(lengths, values[what], strict=True) if y]
            if not points:
                continue
            e = fitted[row][phase, what]
            power = "" if e is None else f"   ~ T^{e:.2f}"
            axes.plot(
                *zip(*points, strict=True), "--o" if flex else "-o", markersize=4,
                color=COLORS[i % len(COLORS)],
                label=f"{row}{' (forward)' if flex else ''}{power}",
            )  # fmt: skip
    for axes, title in ((times, "forward and backward, ms"), (memory, "peak memory, MiB")):
        axes.set_yscale("log")
        mark_powers(axes, sorted({each["length"] for each in results}), "tokens")
        axes.set_title(title, loc="left", fontsize=10)
        if axes.lines:
            axes.legend(fontsize=7, frameon=False)
    return figure
