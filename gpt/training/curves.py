"""What a run left behind, read back, and its curves drawn.

No torch and no Lightning here: a report can be made while the run goes on, and of runs that ended
long ago.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS_FILE, SAMPLES_FILE, CONFIG_FILE = "metrics.csv", "samples.txt", "config.yaml"
RECORD_FILE = "run.json"
"""Facts that stand in no other file: environment, sizes, times (`gpt.training.record`)."""

INK = "#010203"
"""Colour of axes and text while drawing; a page replaces it by its own."""
COLORS = ("#3b82f6", "#e8710a", "#12a37f", "#d6409f", "#8e6cef", "#a07a00")
MAX_POINTS = 1500
SMOOTHING = 40
"""The smoothed curve is a running mean over about 1/40 of the run."""

Series = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Sample:
    """What the model wrote at a step: prompt and continuation."""

    step: int
    text: str


@dataclass(frozen=True)
class Run:
    """A run's folder, as far as it got.

    Attributes:
        rows: one per line of `metrics.csv`: the numbers logged at a step, `step` among them.
        config: the text of `config.yaml`.
        record: `run.json`.
    """

    path: Path
    rows: list[dict[str, float]]
    samples: list[Sample] = field(default_factory=list)
    config: str = ""
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def series(self, metric: str) -> Series:
        """Steps and values of a metric, finite ones only."""
        found = [
            (int(row["step"]), row[metric])
            for row in self.rows
            if math.isfinite(row.get(metric, math.nan))
        ]
        return [step for step, _ in found], [value for _, value in found]


def read_run(path: Path) -> Run:
    """Read what there is; a run that was killed may lack a part.

    Raises:
        DataError: the folder holds no metrics of a run.
    """
    try:
        rows = _read_rows(path / METRICS_FILE)
    except OSError as error:
        raise DataError(
            f"{path} is not a run's folder: {METRICS_FILE} cannot be read "
            f"({error.strerror or error}); give one that fit has made, as runs/NAME"
        ) from None
    return Run(
        path,
        rows,
        _read_samples(path / SAMPLES_FILE),
        _read_text(path / CONFIG_FILE),
        read_record(path / RECORD_FILE),
    )


def _read_rows(path: Path) -> list[dict[str, float]]:
    rows = []
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        # A line cut short by a crash lacks columns or holds half a number.
        for found in csv.DictReader(line.replace("\0", "") for line in file):
            row = {}
            for name, text in found.items():
                try:
                    row[name] = float(text or "")
                except (TypeError, ValueError):
                    continue
            if math.isfinite(row.get("step", math.nan)):
                rows.append(row)
    return rows


def _read_samples(path: Path) -> list[Sample]:
    parts = re.split(r"^--- step (\d+)$\n?", _read_text(path), flags=re.MULTILINE)
    steps, texts = parts[1::2], parts[2::2]
    return [
        Sample(int(step), text.removesuffix("\n").removesuffix("\n"))
        for step, text in zip(steps, texts, strict=True)
        if len(step) < 16
    ]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_record(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# --- Drawing ------------------------------------------------------------------------------------


def smooth(values: Sequence[float], span: float) -> list[float]:
    """Exponential running mean over about `span` values, without the pull of a first guess."""
    keep = 1 - 2 / (max(1.0, span) + 1)
    mean, weight, found = 0.0, 0.0, []
    for value in values:
        mean = keep * mean + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        found.append(mean / weight)
    return found


def thin(series: Series, most: int = MAX_POINTS) -> Series:
    """At most about `most` points, evenly picked, the last one kept."""
    steps, values = series
    every = -(-len(steps) // most) if steps else 1
    first = (len(steps) - 1) % every if steps else 0
    return steps[first::every], values[first::every]


def loss_png(runs: Sequence[Run]) -> bytes:
    """The curves as a picture on white."""
    file = io.BytesIO()
    _draw(runs).savefig(file, format="png", dpi=150, facecolor="white")
    return file.getvalue()


def curves_svg(runs: Sequence[Run]) -> str:
    """The curves as an SVG element to stand in a page, in the page's own ink."""
    import matplotlib as mpl

    file = io.StringIO()
    # Text stays text: it is small, can be searched and takes the page's font.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "antiphon"}):
        _draw(runs).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The page gives the size; the view box keeps the shape.
    tag, rest = svg.split(">", 1)
    return re.sub(r' (width|height)="[^"]*"', "", tag) + ' role="img" aria-label="curves">' + rest


def _draw(runs: Sequence[Run]) -> Figure:
    import logging

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # where it keeps its cache, mostly
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(5.6, 7.2))
    figure.subplots_adjust(left=0.12, right=0.98, top=0.96, bottom=0.07, hspace=0.25)
    tall, rates, speeds = figure.subplots(3, 1, sharex=True, height_ratios=[2.6, 1, 1])
    many = len(runs) > 1
    for i, run in enumerate(runs):
        color = COLORS[i % len(COLORS)]
        _loss(tall, run, color, label=run.name if many else None, faint=not many)
        _line(rates, thin(run.series("lr")), color)
        steps, speed = run.series("tokens_per_s")
        if not many:
            _line(speeds, thin((steps, speed)), color, alpha=0.3)
        _line(speeds, thin((steps, smooth(speed, len(speed) / SMOOTHING))), color)
    lines = "; dashed: validation" if many else ""
    _label(tall, f"loss, nats per token{lines}")
    _label(rates, "learning rate")
    _label(speeds, "tokens per second")
    for axes, low in ((rates, 0.0), (speeds, 0.0)):
        axes.set_ylim(bottom=low)
    rates.yaxis.set_major_formatter("{x:.3g}")  # no factor of ten in a corner
    speeds.yaxis.set_major_formatter(EngFormatter(sep=" "))
    speeds.xaxis.set_major_formatter(EngFormatter(sep=" "))
    speeds.set_xlabel("step", color=INK, fontsize=11)
    if tall.get_legend_handles_labels()[0]:
        tall.legend(frameon=False, labelcolor=INK, fontsize=11)
    return figure


def _loss(axes: Axes, run: Run, color: str, *, label: str | None, faint: bool) -> None:
    steps, losses = run.series("train/loss")
    if faint:
        _line(axes, thin((steps, losses)), color, alpha=0.3)
    smoothed = thin((steps, smooth(losses, len(losses) / SMOOTHING)))
    _line(axes, smoothed, color, label=label or "training, smoothed")
    steps, losses = thin(run.series("val/loss"))
    if steps:
        own = color if label else COLORS[1]
        axes.plot(
            steps, losses, color=own, linewidth=1.2, marker="o", markersize=4,
            linestyle="--" if label else "-", label=None if label else "validation",
        )  # fmt: skip


def _line(axes: Axes, series: Series, color: str, **options: Any) -> None:
    steps, values = series
    marker = "o" if len(steps) == 1 else None  # a line of one point cannot be seen
    axes.plot(steps, values, color=color, marker=marker, linewidth=1.5, **options)


def _label(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.tick_params(colors=INK, labelsize=10)
    axes.grid(color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
        spine.set_alpha(0.4)
