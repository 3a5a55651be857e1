"""`antiphon report RUN`: curves, results, samples and settings of a run on one page.

The page needs nothing else: no network, no script, pictures and style inside. `fit` makes it at the
end of a run; the command makes it again at any time, while the run goes on as well, and lays
several runs over each other.
"""

from __future__ import annotations

import html
import math
import statistics
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpt.arguments import CommandParser, examples, hint
from gpt.errors import DataError
from gpt.files import write_atomically
from gpt.training.curves import METRICS_FILE, Run, Sample, curves_svg, loss_png, read_run

REPORT_FILE, PICTURE_FILE, COMPARISON_FILE = "report.html", "loss.png", "comparison.html"
MAX_SAMPLES = 40
OPEN_SAMPLES = 3

STYLE = """
:root { color-scheme: light dark; --soft: color-mix(in srgb, currentColor 65%, transparent);
  --line: color-mix(in srgb, currentColor 15%, transparent); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 0 auto; padding: 1rem; }
h1, td, pre { overflow-wrap: anywhere; } th { min-width: 5.5rem; }
h1 { font-size: 1.6rem; margin: .5rem 0 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p.under { margin: 0 0 1rem; color: var(--soft); }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0;
  border-bottom: 1px solid var(--line); }
th { font-weight: normal; color: var(--soft); }
thead th { font-weight: 600; } td.n { font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; } svg text { font-family: inherit !important; }
pre { white-space: pre-wrap; font: .85rem/1.5 ui-monospace, monospace; margin: .3rem 0 1rem;
  padding: .6rem .8rem; border: 1px solid var(--line); border-radius: .4rem;
  unicode-bidi: plaintext; }
summary { cursor: pointer; color: var(--soft); } .scroll { overflow-x: auto; }
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Samples are text from anywhere: had one got past the escaping, it could still do nothing."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Rows = list[tuple[str, str]]


def write_report(folder: Path) -> Path:
    """Write `loss.png` and `report.html` into a run's folder and return the page's path.

    Raises:
        DataError: not a run's folder, or nothing can be written there.
    """
    run = read_run(folder)
    try:
        write_atomically(folder / PICTURE_FILE, loss_png([run]))
        page = folder / REPORT_FILE
        write_atomically(page, one_run(run).encode("utf-8", "replace"))
    except OSError as error:
        raise DataError(f"cannot write to {folder}: {error.strerror or error}") from None
    return page


# --- Pages --------------------------------------------------------------------------------------


def one_run(run: Run) -> str:
    """The page of a run."""
    parts = [
        _heading(run.name, state(run)),
        _section("Result", _table(results(run))),
        _section("Curves", curves_svg([run])),
    ]
    if run.samples:
        parts.append(_section("Samples", _samples(run.samples)))
    validations = _validations(run)
    if validations:
        parts.append(_section("Validations", validations))
    facts: Rows = [(name, str(value)) for name, value in _environment(run).items()]
    if facts:
        parts.append(_section("Environment", _table(facts)))
    if run.config:
        parts.append(_section("Configuration", _pre(run.config)))
    return _page(run.name, parts)


def several_runs(runs: Sequence[Run]) -> str:
    """The page that compares runs: curves over each other, results and settings side by side."""
    columns = [dict(results(run)) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    settings = [_flat(yaml_or_nothing(run.config)) for run in runs]
    paths = list(dict.fromkeys(path for column in settings for path in column))
    differing = [
        path
        for path in paths
        if len({repr(column.get(path)) for column in settings}) > 1 and path != "name"
    ]
    head = ["", *(run.name for run in runs)]
    parts = [
        _heading("Comparison", ", ".join(run.name for run in runs)),
        _section("Curves", curves_svg(runs)),
        _section(
            "Result", _grid(head, [[n, *(column.get(n, "") for column in columns)] for n in names])
        ),
    ]
    if differing:
        rows = [[path, *(str(column.get(path, "")) for column in settings)] for path in differing]
        parts.append(_section("Settings that differ", _grid(head, rows)))
    return _page("Comparison", parts)


def state(run: Run) -> str:
    """How far the run is, in a line."""
    sittings = _sittings(run)
    last = max((int(row["step"]) for row in run.rows), default=0)
    of = run.record.get("max_steps")
    steps = f"step {last:,} of {of:,}" if isinstance(of, int) else f"step {last:,}"
    return f"{steps}, {sittings[-1].get('state', 'unknown')}" if sittings else steps


def results(run: Run) -> Rows:
    """What came out, as names and values for people."""
    rows: Rows = []
    steps, losses = run.series("val/loss")
    begun = run.record.get("init_from")
    if begun and steps[:1] == [0]:  # what the run began with is no result of it
        rows.append(("base model", f"{losses[0]:.4f} nats per token ({begun})"))
        steps, losses = steps[1:], losses[1:]
    if losses:
        best = min(range(len(losses)), key=losses.__getitem__)
        rows.append(("best validation loss", f"{losses[best]:.4f} nats per token"))
        rows.append(("at step", f"{steps[best]:,}"))
        rows.append(("perplexity", f"{math.exp(min(losses[best], 700)):.2f}"))
        bits = dict(zip(*run.series("val/bpb"), strict=True)).get(steps[best])
        if bits is not None:
            rows.append(("bits per byte", f"{bits:.4f}"))
    trained = run.series("train/loss")[1]
    if trained:
        rows.append(("last training loss", f"{trained[-1]:.4f}"))
    last = max((int(row["step"]) for row in run.rows), default=0)
    record = run.record
    batch, text = record.get("batch_tokens"), record.get("train_tokens")
    if isinstance(record.get("parameters"), int):
        rows.append(("parameters", f"{record['parameters']:,}"))
    if isinstance(batch, int):
        rows.append(("tokens seen", f"{last * batch:,}, {batch:,} a step"))
        if isinstance(text, int) and text > 0:
            rows.append(("times through the text", f"{last * batch / text:.2f}"))
    seconds = sum(
        value for each in _sittings(run) if isinstance(value := each.get("seconds"), int | float)
    )
    if seconds:
        many = f" in {len(_sittings(run))} sittings" if len(_sittings(run)) > 1 else ""
        rows.append(("time", f"{duration(seconds)}{many}"))
    speed = run.series("tokens_per_s")[1]
    if speed:
        rows.append(("tokens per second", f"{statistics.median(speed):,.0f} (median)"))
    share = run.series("mfu")[1]
    if share:
        of = f", the share of {limit}" if (limit := record.get("speed_limit")) else ""
        rows.append(("MFU", f"{statistics.median(share):.1%} (median){of}"))
    for name, label in (("source", "text"), ("tokenizer", "tokenizer")):
        if record.get(name):
            rows.append((label, str(record[name])))
    return rows


def duration(seconds: float) -> str:
    """950 ms are 1 s; then minutes, hours and days as they are said."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    if hours:
        return f"{hours} h {minute} min"
    return f"{minutes} min {second} s" if minutes else f"{second} s"


# --- Parts --------------------------------------------------------------------------------------


def _samples(samples: Sequence[Sample]) -> str:
    """By step, the newest first; of many steps, some from all of the run."""
    by_step: dict[int, list[str]] = {}
    for sample in samples:
        by_step.setdefault(sample.step, []).append(sample.text)
    steps = sorted(by_step, reverse=True)
    note = ""
    if len(steps) > MAX_SAMPLES:
        every = (len(steps) - 1) / (MAX_SAMPLES - 1)
        note = f"<p class=under>from {MAX_SAMPLES} of {len(steps)} steps, the newest first</p>"
        steps = [steps[round(i * every)] for i in range(MAX_SAMPLES)]
    parts = [
        f"<details{' open' if i < OPEN_SAMPLES else ''}><summary>step {step:,}</summary>"
        f"{''.join(_pre(text) for text in by_step[step])}</details>"
        for i, step in enumerate(steps)
    ]
    return note + "".join(parts)


def _validations(run: Run) -> str:
    rows = [row for row in run.rows if "val/loss" in row]
    names = list(dict.fromkeys(name for row in rows for name in row if name.startswith("val/")))
    if not names:
        return ""
    head = ["step", *(name.removeprefix("val/") for name in names)]
    cells = [
        [f"{row['step']:,.0f}", *(f"{row[n]:.4f}" if n in row else "" for n in names)]
        for row in rows
    ]
    return f"<details><summary>{len(rows)} validations</summary>{_grid(head, cells)}</details>"


def _environment(run: Run) -> dict[str, Any]:
    found = run.record.get("environment")
    facts = dict(found) if isinstance(found, dict) else {}
    sittings = _sittings(run)
    if sittings:
        facts |= {"started": sittings[0].get("began", ""), "command": sittings[-1].get("command")}
    return {name: value for name, value in facts.items() if value}


def _sittings(run: Run) -> list[dict[str, Any]]:
    found = run.record.get("sittings")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def yaml_or_nothing(text: str) -> dict[str, Any]:
    """The mapping in a YAML text; empty if it is none."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


# --- HTML ---------------------------------------------------------------------------------------


def _text(text: str) -> str:
    """As it can stand in a page: escaped, and what no screen can show made visible."""
    shown = "".join(
        char if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs") else REPLACEMENT
        for char in text.replace("\r\n", "\n")
    )
    return html.escape(shown)


def _page(title: str, parts: Iterable[str]) -> str:
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
            *parts,
            "</body></html>\n",
        ]
    )


def _heading(title: str, under: str) -> str:
    return f"<h1>{_text(title)}</h1><p class=under>{_text(under)}</p>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def _pre(text: str) -> str:
    return f'<pre dir="auto">{_text(text)}</pre>'


def _table(rows: Rows) -> str:
    cells = (f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows)
    return f"<table>{''.join(cells)}</table>"


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th>{_text(first)}</th>{''.join(f'<td class=n>{_text(c)}</td>' for c in rest)}</tr>"
        for first, *rest in rows
    )
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


# --- Command ------------------------------------------------------------------------------------


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Make the page of a run (curves, results, samples, settings), also while it "
        "goes on;\nof several runs, a page that compares them.",
        epilog=examples(
            f"{prog} runs/shakespeare-tiny",
            f"{prog} runs/first runs/second --out comparison.html",
        ),
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, as runs/NAME")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"where to write the page (default: {REPORT_FILE} in the run's folder; "
        f"of several, {COMPARISON_FILE} beside the first)",
    )
    return parser


def main(argv: list[str], prog: str = "antiphon report") -> int:
    """Write the page and print where it is.

    Raises:
        DataError: a folder that is no run's, or a place that cannot be written to.
    """
    given = build_parser(prog).parse_args(argv)
    folders = [find_run(run) for run in given.runs]
    if len(folders) == 1 and given.out is None:
        print(write_report(folders[0]))
        return 0
    runs = [read_run(folder) for folder in folders]
    out = given.out or folders[0].resolve().parent / COMPARISON_FILE
    page = one_run(runs[0]) if len(runs) == 1 else several_runs(runs)
    try:
        write_atomically(out, page.encode("utf-8", "replace"))
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror or error}") from None
    print(out)
    return 0


def find_run(given: str, runs_dir: Path = Path("runs")) -> Path:
    """The folder meant by a path, or by the name of a run under `runs/`.

    Raises:
        DataError: neither; a name that is near is suggested.
    """
    for path in (Path(given), runs_dir / given):
        if (path / METRICS_FILE).is_file():
            return path
    names = [file.parent.name for file in sorted(runs_dir.glob(f"*/{METRICS_FILE}"))]
    told = hint(Path(given).name, names)
    if not told and names:
        told = f"; there are: {', '.join(names[:10])}"
    raise DataError(f"no run at {given}: there is no {METRICS_FILE} in it{told}")
