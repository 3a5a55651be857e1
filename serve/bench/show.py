"""The tables and the plot of `antiphon bench serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpt.bench.output import COLORS, table
from serve.bench.drive import Seen
from serve.bench.figures import PERCENTS, ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMES = (
    ("first_token_s", "first token, ms"),
    ("between_tokens_s", "between tokens, ms"),
    ("whole_s", "whole text, ms"),
)


def lines_of(results: Sequence[dict[str, Any]]) -> list[str]:
    """The tables, and below them how the rows compare."""
    if not results:
        return []
    head = ["", "tokens/s", "prompt tokens/s", "texts/s", "good/s", "errors", "cut off"]
    lines = table(
        head,
        [
            [
                each["row"],
                _rate(each["tokens_per_s"]),
                f"{each['prompt_tokens_per_s']['median']:,.0f}",
                f"{each['texts_per_s']['median']:.2f}",
                f"{each['good_texts_per_s']['median']:.2f}",
                str(sum(each["errors"].values())),
                str(each["cut_off"]),
            ]
            for each in results
        ],
    )
    for name, title in TIMES:
        head = [title, *(f"p{percent}" for percent in PERCENTS), "of"]
        rows = [
            [
                each["row"],
                *(_milliseconds(each[name][f"p{percent}"]) for percent in PERCENTS),
                str(each[name]["count"]),
            ]
            for each in results
        ]
        lines += ["", *table(head, rows)]
    return [*lines, "", *comparison(results), *_errors(results)]


def comparison(results: Sequence[dict[str, Any]]) -> list[str]:
    """The first row against each of the others."""
    first, *others = results
    lines = []
    for other in others:
        parts = []
        if found := ratio(first, other):
            middle, low, high = found
            parts.append(f"{middle:.3g} times its tokens/s ({low:.3g} to {high:.3g})")
        for name, title, percent in (
            ("between_tokens_s", "between tokens", "p99"), ("first_token_s", "first token", "p50"),
        ):  # fmt: skip
            mine, its = first[name][percent], other[name][percent]
            if mine and its:
                parts.append(f"{title} {percent} {mine / its:.3g} times")
        if parts:
            lines.append(f"{first['row']} against {other['row']}: {', '.join(parts)}")
    return lines


def _errors(results: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"{each['row']}: {count} ended with {status}"
        for each in results
        for status, count in sorted(each["errors"].items())
    ]


def _rate(found: Mapping[str, Any]) -> str:
    low, high = min(found["rounds"]), max(found["rounds"])
    return f"{found['median']:,.1f} ({low:,.1f} to {high:,.1f})"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def draw(results: Sequence[dict[str, Any]], seen: Mapping[str, Sequence[Seen]]) -> Figure:
    """Tokens/s of the rows, and which share of first tokens and gaps came within which time."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(13, 4.2))
    bars, first, gaps = figure.subplots(1, 3)
    for i, each in enumerate(results):
        color, name = COLORS[i % len(COLORS)], each["row"]
        bars.barh(i, each["tokens_per_s"]["median"], color=color)
        rounds = seen[name]
        for axes, values in (
            (first, [value for one in rounds for value in one.first]),
            (gaps, [value for one in rounds for value in one.gaps]),
        ):
            ranked = sorted(value * 1e3 for value in values)
            if ranked:
                shares = [(n + 1) / len(ranked) for n in range(len(ranked))]
                axes.step(ranked, shares, where="post", color=color, label=name)
    bars.set_yticks(range(len(results)), [each["row"] for each in results])
    bars.invert_yaxis()
    for axes, title in (
        (bars, "tokens/s"), (first, "share with the first token within … ms"),
        (gaps, "share of tokens within … ms of the last"),
    ):  # fmt: skip
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(True, alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (first, gaps):
        axes.set_ylim(0, 1.03)
        if axes.lines:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
    if gaps.lines:
        gaps.legend(fontsize=8, frameon=False)
    return figure
