"""What the doctor finds, and how it is shown."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "broken"]

MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "32"),  # green
    "note": ("--", "33"),  # yellow
    "broken": ("!!", "31"),  # red
}
NAME_WIDTH = 14
WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: the heading it stands under.
        name: what was looked at.
        status: `ok`; `note`: worth knowing, nothing needed is missing; `broken`: something needed.
        found: what is there.
        advice: what to do; empty if nothing.
        facts: the same for programs: numbers in bytes, FLOP/s, counts.
    """

    topic: str
    name: str
    status: Status
    found: str
    advice: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


Probe = Callable[[], Iterable[Finding]]


def guarded(
    topic: str, name: str, probe: Probe, failing: Status = "note", advice: str = ""
) -> Iterator[Finding]:
    """What a probe finds; if it fails, that is a finding too and no traceback.

    Args:
        failing, advice: the status of that finding, and what to do.
    """
    try:
        yield from probe()
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the machine, the rest counts
        yield Finding(topic, name, failing, f"cannot be looked at ({reason(error)})", advice)


def reason(error: BaseException) -> str:
    """The first line of an error, under its type's name."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def as_text(finding: Finding, *, colour: bool) -> str:
    """A finding as one line, and its advice as others below."""
    mark, code = MARKS[finding.status]
    if colour:
        mark = f"\033[{code}m{mark}\033[0m"
    indent = " " * (2 + 2 + 2 + NAME_WIDTH + 1)
    lines = textwrap.wrap(
        finding.found, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False
    )
    head, *more = lines or [""]
    shown = [f"  {mark}  {finding.name:<{NAME_WIDTH}} {head}", *(indent + line for line in more)]
    if finding.advice:
        shown += textwrap.wrap(
            f"→ {finding.advice}",
            WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(shown)


def as_json(findings: list[Finding]) -> str:
    return json.dumps(
        {"healthy": healthy(findings), "findings": [asdict(finding) for finding in findings]},
        indent=2,
        ensure_ascii=False,
    )


def healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.status != "broken" for finding in findings)


def summary(findings: list[Finding]) -> str:
    """The last line."""
    broken = [finding.name for finding in findings if finding.status == "broken"]
    notes = sum(finding.status == "note" for finding in findings)
    if broken:
        return f"broken: {', '.join(broken)}"
    more = f"; {notes} {'note' if notes == 1 else 'notes'} above (--)" if notes else ""
    return f"all that is needed is here{more}"


def count(number: float, unit: str) -> str:
    """`1.5 GB`, `108 GFLOP/s`: three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or prefix == "T":
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    raise AssertionError("unreachable")
