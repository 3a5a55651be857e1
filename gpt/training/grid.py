"""A sweep: which runs it is made of, what each came to, and the table of them.

No torch and no Lightning: the runs are processes of their own.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.errors import ConfigError, DataError
from gpt.training.curves import RECORD_FILE, read_record, read_run
from gpt.training.run import RunFolder

OWN = ("name", "runs_dir", "resume", "ckpt_path", "config", "seed_everything")
"""Settings of `fit` that a sweep gives itself."""

Settings = tuple[tuple[str, str], ...]


def parse_setting(text: str) -> tuple[str, list[str]]:
    """`model.optimizer.lr=1e-3,3e-3` as the setting's name and its values. Commas inside brackets
    belong to a value.

    Raises:
        ConfigError: it is none, names a value twice, or one that the sweep gives itself.
    """
    name, equals, values = text.partition("=")
    name = name.strip().removeprefix("--")
    found = [value.strip() for value in re.split(r",(?![^\[\{]*[\]\}])", values)]
    if not (name and equals and all(found)):
        raise ConfigError(
            f"--set {text!r} is no setting with values; give one as model.optimizer.lr=1e-3,3e-3"
        )
    if name in OWN:
        hint = "; --seeds says how many" if name == "seed_everything" else ""
        raise ConfigError(f"--set {name} is given by the sweep itself to each run{hint}")
    if len(set(found)) < len(found):
        raise ConfigError(f"--set {text!r} gives a value twice; give each once")
    return name, found


@dataclass(frozen=True)
class Member:
    """One run of a sweep.

    Attributes:
        settings: names and values that differ from the config's.
    """

    settings: Settings
    seed: int

    @property
    def name(self) -> str:
        """Readable, and the same for the same settings whatever else is in the sweep."""
        parts = [f"{name.rpartition('.')[2]}={value}" for name, value in self.settings]
        label = re.sub(r"[^\w.+=-]+", "_", "-".join([*parts, f"seed={self.seed}"]))[:80]
        digest = hashlib.sha256(json.dumps([self.settings, self.seed]).encode()).hexdigest()
        return f"{label}-{digest[:6]}"

    @property
    def flags(self) -> list[str]:
        """What `fit` is given beside the config."""
        given = [f"--{name}={value}" for name, value in self.settings]
        return [*given, f"--seed_everything={self.seed}"]


def members(settings: Sequence[tuple[str, Sequence[str]]], seeds: Sequence[int]) -> list[Member]:
    """Every combination of the values with every seed; all settings of a seed first, so that a
    sweep that is cut has compared something.

    Raises:
        ConfigError: a setting is named twice.
    """
    names = [name for name, _ in settings]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--set {name} is given twice; give all its values in one")
    combined = list(itertools.product(*(values for _, values in settings)))
    return [
        Member(tuple(zip(names, values, strict=True)), seed)
        for seed in seeds
        for values in combined
    ]


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        state: `finished`, `stopped early: …`, `interrupted`, `failed: …`, or `not begun`.
        val_loss: the lowest of its validations, in nats per token; NaN if there is none.
        bits_per_byte: at that validation.
        seconds: of all sittings.
    """

    member: Member
    state: str
    steps: int = 0
    val_loss: float = math.nan
    bits_per_byte: float = math.nan
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        return self.state == "finished" or self.state.startswith("stopped early")


def result_of(folder: Path, member: Member) -> Result:
    """Read back from the run's folder, as far as it got."""
    run = RunFolder(folder, member.name)
    sittings = read_record(run.path / RECORD_FILE).get("sittings") or []
    if not sittings:
        return Result(member, "not begun")
    last: dict[str, Any] = sittings[-1]
    try:
        rows = read_run(run.path).rows
    except DataError:
        rows = []
    validated = [row for row in rows if math.isfinite(row.get("val/loss", math.nan))]
    best = min(validated, key=lambda row: row["val/loss"], default={})
    return Result(
        member,
        str(last.get("state", "interrupted")),
        int(last.get("to_step") or 0),
        best.get("val/loss", math.nan),
        best.get("val/bpb", math.nan),
        sum(float(each.get("seconds") or 0) for each in sittings),
    )


# --- The table ----------------------------------------------------------------------------------


def as_csv(results: Sequence[Result]) -> bytes:
    """One row a run."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    names = [name for name, _ in results[0].member.settings] if results else []
    writer.writerow([*names, "seed", "state", "steps", "val_loss", "bits_per_byte", "seconds",
                     "run"])  # fmt: skip
    for each in results:
        values = [value for _, value in each.member.settings]
        numbers = ("" if math.isnan(x) else f"{x:.6g}" for x in (each.val_loss, each.bits_per_byte))
        writer.writerow([*values, each.member.seed, each.state, each.steps, *numbers,
                         f"{each.seconds:.1f}", each.member.name])  # fmt: skip
    return file.getvalue().encode()


def as_table(results: Sequence[Result]) -> str:
    """One line a combination of settings, the best first: mean and spread over its seeds."""
    by_settings: dict[Settings, list[Result]] = {}
    for each in results:
        by_settings.setdefault(each.member.settings, []).append(each)
    names = [name for name, _ in results[0].member.settings] if results else []
    header = [*names, "seeds", "nats/token", "spread", "bits/byte", "seconds"]
    lines = []
    for settings, group in by_settings.items():
        done = [each for each in group if each.done and math.isfinite(each.val_loss)]
        losses = [each.val_loss for each in done]
        bits = [each.bits_per_byte for each in done if math.isfinite(each.bits_per_byte)]
        mean = statistics.fmean(losses) if losses else math.nan
        cells = [
            *(value for _, value in settings),
            f"{len(done)}/{len(group)}",
            f"{mean:.4f}" if losses else "-",
            f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "-",
            f"{statistics.fmean(bits):.4f}" if bits else "-",
            f"{statistics.fmean(each.seconds for each in done):.0f}" if done else "-",
        ]
        lines.append((mean if losses else math.inf, cells))
    rows = [header, *(cells for _, cells in sorted(lines, key=lambda line: line[0]))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
