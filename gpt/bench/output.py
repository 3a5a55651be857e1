"""What benchmarks share around the measuring: options, facts of the machine, tables, files."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.arguments import hint
from gpt.errors import ConfigError, DataError
from gpt.files import write_atomically
from gpt.machine import cpu_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = (
    "#3b82f6", "#e8710a", "#12a37f", "#d6409f", "#8e6cef", "#a07a00", "#64748b", "#c62828",
    "#0e7490",
)  # fmt: skip


# --- Options --------------------------------------------------------------------------------------


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """`--device`, `--threads`, `--seed`, `--json`, `--plot`."""
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N, mps (default: cpu)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of the CPU (default: as many as torch takes)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--json", metavar="FILE", help="write settings, machine and all numbers into a file"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw them")


def whole_numbers(text: str) -> list[int]:
    """`512,1024,2048`, ascending and each once; an argparse type."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} must be whole numbers with commas, as 512,1024"
        ) from None
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} has a number below 1")
    return found


def names_of(*choices: str) -> Callable[[str], list[str]]:
    """An argparse type: `float32,bfloat16`, each of the choices, in the order given and once."""

    def names(text: str) -> list[str]:
        found = list(dict.fromkeys(part.strip() for part in text.split(",")))
        for name in found:
            if name not in choices:
                raise argparse.ArgumentTypeError(
                    f"{name[:60]!r} is none of {', '.join(choices)} (with commas between them)"
                    + hint(name, choices)
                )
        return found

    return names


def at_least(args: argparse.Namespace, low: int, *names: str) -> None:
    """Raises ConfigError unless each of these options, if given, is at least `low`."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < low:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is {value}, but must be at least {low}")


def check_outputs(args: argparse.Namespace) -> None:
    """Complain before minutes of work, not after. Raises DataError."""
    for option, name in (("--json", args.json), ("--plot", args.plot)):
        if name is None:
            continue
        path = Path(name)
        if not name or path.is_dir():
            raise DataError(f"{option} is {name!r}, but must be the name of a file")
        if option == "--plot" and path.suffix != ".png":
            raise DataError(f"--plot is {name!r}, but must end in .png")
        folder = path.absolute().parent
        while not folder.exists():
            folder = folder.parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise DataError(f"{option} is {name!r}, but {folder} cannot be written to")


# --- Machine --------------------------------------------------------------------------------------


def machine_facts(device: str = "cpu") -> dict[str, Any]:
    """Plain data: processor, cores, threads, load, GPU, versions."""
    import torch

    try:
        load: float | None = round(os.getloadavg()[0], 2)
    except OSError:
        load = None
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load,
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def machine_line(facts: dict[str, Any]) -> str:
    """The same for the head of a table. A load above the threads warns of other programs."""
    where = f"{facts['gpu']}, " if facts["gpu"] else ""
    load = "" if facts["load"] is None else f", load {facts['load']:.1f} before"
    return (
        f"{where}{facts['cpu']}, {facts['threads']} of {facts['cores']} threads{load}, "
        f"torch {facts['torch']}, Python {facts['python']}"
    )


# --- Tables and files -----------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the first column to the left and all others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]


def exponent(sizes: Sequence[float], values: Sequence[float | None]) -> float | None:
    """e of `value ~ size^e`, least squares of the logarithms; None with fewer than two points."""
    points = [
        (math.log(x), math.log(y))
        for x, y in zip(sizes, values, strict=True)
        if y is not None and y > 0
    ]
    if len(points) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def write_results(
    path: str,
    benchmark: str,
    args: argparse.Namespace,
    machine: dict[str, Any],
    results: list[dict[str, Any]],
    *,
    interrupted: bool,
    left_out: dict[str, str] | None = None,
) -> None:
    """All numbers of a run as one JSON object. Raises DataError if it cannot be written.

    Args:
        left_out: what has no numbers, and why.
    """
    settings = {k: v for k, v in vars(args).items() if k not in ("benchmark", "json", "plot")}
    content = {
        "benchmark": benchmark,
        "settings": settings,
        "machine": machine,
        "interrupted": interrupted,
        **({} if left_out is None else {"left_out": left_out}),
        "results": results,
    }
    _write(path, json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")


def mark_powers(axes: Axes, at: Sequence[int], label: str) -> None:
    """A logarithmic axis below, with the numbers that were measured; and a quiet look."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [f"{x:,}" for x in at])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.grid(True, alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def write_plot(path: str, figure: Figure) -> None:
    """A figure as PNG. Raises DataError if it cannot be written."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=140, bbox_inches="tight")
    _write(path, data.getvalue())


def _write(path: str, data: bytes) -> None:
    try:
        write_atomically(Path(path), data)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}; give another") from None
