"""The `antiphon doctor` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from gpt.arguments import CommandParser, examples
from gpt.doctor import hardware, places, software
from gpt.doctor.report import Finding, as_json, as_text, guarded, healthy, reason, summary
from gpt.doctor.trial import MEASURE, Tried, run_trial
from gpt.terminal import shows_colour

DESCRIPTION = """\
Look at this machine: what is there, what is missing, what to do about it.

ok is well, -- is worth knowing, !! is something needed that is broken. Nothing is changed, nothing
is downloaded, nobody is asked over the network, and no secret is shown."""

HEAVY = ("lightning", "wandb", "matplotlib", "datasets")
"""Imported last: they take the longest."""


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=examples(
            "antiphon doctor", "antiphon doctor --fast", "antiphon doctor --json > machine.json"
        )
        + "\n\nThe exit status is 0 if all that is needed is fine, and 1 if something is broken.",
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="look only: measure nothing and import no packages (otherwise about 10 seconds)",
    )
    parser.add_argument("--json", action="store_true", help="the report for programs, as JSON")
    return parser


def main(argv: list[str], prog: str = "antiphon doctor") -> int:
    """Print the report. Returns 0 if nothing needed is broken, else 1."""
    args = build_parser(prog).parse_args(argv)
    findings: list[Finding] = []
    colour = shows_colour(sys.stdout)
    topic = ""
    for finding in examine(fast=args.fast):
        findings.append(finding)
        if args.json:
            continue
        if finding.topic != topic:
            topic = finding.topic
            print(f"\n\033[1m{topic}\033[0m" if colour else f"\n{topic}")
        print(as_text(finding, colour=colour), flush=True)
    print(as_json(findings) if args.json else f"\n{summary(findings)}")
    return 0 if healthy(findings) else 1


def examine(*, fast: bool) -> Iterator[Finding]:
    """Everything, the quick parts first, while another process tries the slow ones."""
    with ThreadPoolExecutor(1) as pool:
        trial = None if fast else pool.submit(run_trial, steps())
        for topic, name, probe in (
            (hardware.TOPIC, "processor", hardware.processor),
            (hardware.TOPIC, "memory", hardware.memory),
            (hardware.TOPIC, "compiler", hardware.compiler),
        ):
            yield from guarded(topic, name, probe)
        tried = {} if trial is None else _awaited(trial)
    with_trial: list[tuple[str, str, Callable[[Mapping[str, Tried]], Iterator[Finding]]]] = [
        (hardware.TOPIC, "threads", hardware.threads),
        (hardware.TOPIC, "speed", hardware.speed),
        (hardware.TOPIC, "GPU", hardware.gpu),
    ]
    for topic, name, asked in with_trial:
        yield from guarded(topic, name, lambda asked=asked: asked(tried))  # type: ignore[misc]
    yield from guarded(
        software.VERSIONS,
        "packages",
        lambda: software.versions(tried),
        failing="broken",
        advice="install Antiphon and what it needs: pip install -e . in its checkout",
    )
    yield from guarded(software.AROUND, "wandb", software.wandb)
    yield from guarded(software.AROUND, "tensorboard", software.tensorboard)
    yield from guarded(software.AROUND, "tiktoken cache", software.encodings)
    for name, probe in (
        ("corpora", places.corpora),
        ("disk", places.room),
        ("port", places.port),
        ("terminal", places.terminal),
    ):
        yield from guarded(places.TOPIC, name, probe)


def steps() -> list[str]:
    """What the trial does: torch and what it is asked first, while nothing else is loaded."""
    try:
        modules = [software.module_of(each.name) for each in software.requirements()]
    except Exception:  # noqa: BLE001 - the report on versions says it
        modules = []
    light = [module for module in modules if module not in HEAVY and module != "torch"]
    return ["torch", MEASURE, *light, *(m for m in HEAVY if m in modules)]


def _awaited(trial: Future[dict[str, Tried]]) -> dict[str, Tried]:
    if sys.stderr.isatty():
        print("  …   importing packages and measuring …", end="\r", file=sys.stderr, flush=True)
    try:
        return trial.result()
    except OSError as error:
        return {MEASURE: Tried(reason(error))}
    finally:
        if sys.stderr.isatty():
            print("\033[2K", end="\r", file=sys.stderr, flush=True)
