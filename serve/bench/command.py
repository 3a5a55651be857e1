"""`antiphon bench serve`: options, rows, rounds."""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpt.bench.output import (
    add_shared_options,
    at_least,
    machine_facts,
    machine_line,
    write_plot,
    write_results,
)
from gpt.config import PRESETS, GPTConfig
from gpt.errors import CheckpointError, ConfigError, ServerError
from gpt.signals import ended_by_signals
from serve.bench.asking import FORMS, Lengths, Row, check_room, read_rows
from serve.bench.drive import Load, Seen
from serve.bench.figures import Limits, summary
from serve.bench.processes import Worker, random_model, worker
from serve.bench.show import draw, lines_of
from serve.child import serving
from serve.connection import NEAR, Connection
from serve.reaching import add_security_arguments, add_target_argument, connection

INTERRUPTED = 130
GRPC, ENGINE, SINGLE = "over gRPC", "engine only", "one at a time"
COLD, DISTURBED = "no shared prefix", "with long prompts"


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is loaded (one of these)")
    group.add_argument("model", nargs="?", type=Path, metavar="MODEL", help="a model to serve")
    group.add_argument(
        "--preset", metavar="NAME",
        help=f"serve random weights of this size: {', '.join(PRESETS)}",
    )  # fmt: skip
    add_target_argument(group, "--address", default=None, help="a server that is running")
    group.add_argument(
        "--server-options", default="", metavar="'…'",
        help="options of antiphon serve, in quotes after a =, as "
        "--server-options='--max-running 64'",
    )  # fmt: skip
    group = parser.add_argument_group("load")
    group.add_argument(
        "--streams", type=int, metavar="N",
        help="requests under way all the time: who has its text asks again (default: 32)",
    )  # fmt: skip
    group.add_argument(
        "--rate", type=float, metavar="R",
        help="instead, requests arrive at random, R a second on the average",
    )  # fmt: skip
    for name, default, what in (
        ("prompt", "uniform:32-96", "tokens of a prompt"),
        ("output", "uniform:32-96", "tokens of a text"),
    ):
        group.add_argument(
            f"--{name}-tokens", type=Lengths.parse, default=Lengths.parse(default),
            metavar="LENGTHS", help=f"{what}: {', '.join(FORMS)} (default: {default})",
        )  # fmt: skip
    group.add_argument(
        "--requests", metavar="FILE.jsonl",
        help="take requests from a file in turn; a line is an object with prompt (text or ids) or "
        "prompt_tokens, and output_tokens, and what it leaves out is drawn",
    )  # fmt: skip
    group.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N",
        help="tokens that all drawn prompts begin with, before their own",
    )  # fmt: skip
    for name, seconds, what in (
        ("seconds", 10.0, "what is measured of a row in a round"),
        ("warm-up", 2.0, "load before that, which is not counted"),
        ("drain", 5.0, "what texts under way get to end after that; then they are cut off"),
    ):
        group.add_argument(
            f"--{name}", type=float, default=seconds, metavar="S",
            help=f"{what} (default: {seconds:g})",
        )  # fmt: skip
    group.add_argument(
        "--rounds", type=int, default=3, metavar="N",
        help="times that the rows take turns (default: 3)",
    )  # fmt: skip
    group = parser.add_argument_group("more rows, to compare")
    group.add_argument(
        "--engine-only", action="store_true",
        help="the same load on scheduler and engine in one process, without gRPC",
    )  # fmt: skip
    group.add_argument(
        "--one-at-a-time", action="store_true", help="a single stream: nothing runs together"
    )
    group.add_argument(
        "--no-shared-prefix", action="store_true",
        help="the same lengths, but each prompt's first --shared-prefix tokens are its own",
    )  # fmt: skip
    group.add_argument(
        "--long-prompts", type=int, default=0, metavar="N",
        help="the same load while prompts of N tokens arrive, which are not counted",
    )  # fmt: skip
    group.add_argument(
        "--long-rate", type=float, default=0.5, metavar="R",
        help="of these a second (default: 0.5)",
    )  # fmt: skip
    group = parser.add_argument_group("goodput: which texts count as good (default: all)")
    group.add_argument("--first-token-ms", type=float, metavar="MS", help="first token within this")
    group.add_argument(
        "--token-ms", type=float, metavar="MS", help="the others within this each, on the average"
    )
    add_security_arguments(parser)
    add_shared_options(parser)


@dataclass(frozen=True)
class Plan:
    """A row: who asks, and what differs from the first row's load."""

    name: str
    engine: bool = False
    streams: int | None = None
    own_prefix: bool = False
    long: bool = False


def run(args: argparse.Namespace) -> int:
    rows = _check(args)
    reached = connection(args, args.address or NEAR[0])  # a server of its own is on this machine
    if args.preset:
        _check_lengths(args, GPTConfig.preset(args.preset).block_size, rows)
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)  # those of the server, and of what is said of it
    facts = machine_facts(args.device)
    print(machine_line(facts), flush=True)
    plans = plans_of(args)
    seen: dict[str, list[Seen]] = {plan.name: [] for plan in plans}
    interrupted = False
    with ended_by_signals():
        try:
            with _workers(args, reached, plans) as workers:
                for found in workers.values():
                    _check_lengths(args, found.served["block_size"], rows)
                print(load_line(args), flush=True)
                for number in range(args.rounds):
                    for plan in plans:
                        job = job_of(args, plan, number, rows)
                        title = f"{plan.name}, round {number + 1}/{args.rounds}"
                        progress = _Progress(title, args.warm_up + args.seconds)
                        seen[plan.name].append(workers[plan.engine].run(job, progress))
        except KeyboardInterrupt:
            interrupted = True
    limits = Limits(*(ms and ms / 1e3 for ms in (args.first_token_ms, args.token_ms)))
    done = {name: rounds for name, rounds in seen.items() if rounds}
    results = [summary(name, rounds, limits) for name, rounds in done.items()]
    print("\n".join(lines_of(results)))
    if args.json:
        args.prompt_tokens, args.output_tokens = args.prompt_tokens.text, args.output_tokens.text
        args.model = args.model and str(args.model)
        write_results(args.json, "serve", args, facts, results, interrupted=interrupted)
    if args.plot and results:
        write_plot(args.plot, draw(results, done))
    if interrupted:
        print("interrupted: this is how far it got", file=sys.stderr)
        return INTERRUPTED
    for each in results:
        if each["errors"] and not each["tokens_per_s"]["median"]:
            raise ServerError(
                f"no text came {each['row']}; requests ended with {', '.join(each['errors'])}"
            )
    return 0


def plans_of(args: argparse.Namespace) -> list[Plan]:
    """The rows in the order in which they are shown."""
    found = [Plan(GRPC)]
    if args.engine_only:
        found.append(Plan(ENGINE, engine=True))
    if args.one_at_a_time:
        found.append(Plan(SINGLE, streams=1))
    if args.no_shared_prefix:
        found.append(Plan(COLD, own_prefix=True))
    if args.long_prompts:
        found.append(Plan(DISTURBED, long=True))
    return found


def job_of(args: argparse.Namespace, plan: Plan, number: int, rows: list[Row]) -> dict[str, Any]:
    """What a worker is told to do. Both workers get the same requests in a round; rows that share
    a server do not, or the second would find the first one's prompts in the cache."""
    seed = f"{args.seed}:{number}" if plan.engine else f"{args.seed}:{number}:{plan.name}"
    if plan.name == GRPC:
        seed = f"{args.seed}:{number}"
    closed = plan.streams or args.streams or (None if args.rate else 32)
    load = Load(
        closed,
        None if closed else args.rate,
        args.seconds,
        args.warm_up,
        args.drain,
        seed,
        args.long_rate if plan.long else 0.0,
    )
    return {
        "load": asdict(load),
        "seed": seed,
        "prefix_seed": f"{args.seed}:prefix",
        "prefix": args.shared_prefix,
        "own_prefix": plan.own_prefix,
        "prompts": args.prompt_tokens.text,
        "outputs": args.output_tokens.text,
        "rows": [asdict(row) for row in rows],
        "long_tokens": args.long_prompts,
    }


def load_line(args: argparse.Namespace) -> str:
    """The load in words."""
    how = (
        f"{args.rate:g} requests a second" if args.rate else f"{args.streams or 32} streams"
    )  # fmt: skip
    parts = [how]
    if args.requests:
        parts.append(f"requests of {args.requests}")
    prefix = f"{args.shared_prefix} shared + " if args.shared_prefix else ""
    parts.append(f"prompts {prefix}{args.prompt_tokens.text}, texts {args.output_tokens.text}")
    if args.long_prompts:
        parts.append(f"{args.long_rate:g} long prompts of {args.long_prompts} a second")
    parts.append(f"{args.rounds} rounds of {args.seconds:g} s after {args.warm_up:g} s")
    return "; ".join(parts)


# --- Checks ---------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> list[Row]:
    """All that can be wrong before anything is started; the rows of the file, if there is one."""
    given = [x for x in (args.model, args.preset, args.address) if x is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{'nothing' if not given else ' and '.join(map(str, given))} to load given; give one "
            "of a model, --preset or --address"
        )
    if args.model is not None and not args.model.exists():
        raise CheckpointError(f"no model at {args.model}: give a model folder or a checkpoint")
    if args.preset:
        GPTConfig.preset(args.preset)
    if args.address:
        for name in ("engine_only", "server_options", "threads"):
            if getattr(args, name):
                option = name.replace("_", "-")
                raise ConfigError(
                    f"--{option} needs the model itself; give that instead of --address"
                )
    if args.streams is not None and args.rate is not None:
        raise ConfigError("--streams and --rate are both given; a load has one of them")
    at_least(args, 1, "streams", "rounds", "threads")
    at_least(args, 0, "shared_prefix", "long_prompts", "seed")
    for name, low in (
        ("rate", 0), ("seconds", 0), ("long_rate", 0), ("first_token_ms", 0), ("token_ms", 0),
    ):  # fmt: skip
        _finite(args, name, low, above=True)
    for name in ("warm_up", "drain"):
        _finite(args, name, 0, above=False)
    if args.no_shared_prefix and not args.shared_prefix:
        raise ConfigError("--no-shared-prefix compares with --shared-prefix N; give that, too")
    if not args.address:
        from serve.server import parse

        try:
            parse(["model", *_options(args)], "antiphon bench serve: --server-options")
        except ValueError as error:  # of shlex
            raise ConfigError(f"--server-options cannot be read: {error}") from None
    return read_rows(args.requests) if args.requests else []


def _finite(args: argparse.Namespace, name: str, low: float, *, above: bool) -> None:
    value = getattr(args, name)
    if value is None:
        return
    if not (math.isfinite(value) and (value > low if above else value >= low)):
        option, bound = name.replace("_", "-"), "above" if above else "at least"
        raise ConfigError(f"--{option} is {value:g}, but must be {bound} {low:g}")


def _check_lengths(args: argparse.Namespace, block_size: int, rows: list[Row]) -> None:
    check_room(block_size, args.prompt_tokens, args.output_tokens, args.shared_prefix, rows)
    if args.long_prompts > block_size - 1:
        raise ConfigError(
            f"--long-prompts is {args.long_prompts}, but the context of {block_size} holds prompts "
            f"of {block_size - 1} at most, and a token"
        )


def _options(args: argparse.Namespace) -> list[str]:
    """Of `antiphon serve`."""
    threads = ["--threads", str(args.threads)] if args.threads else []
    return [*shlex.split(args.server_options), "--device", args.device, *threads]


# --- Running --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _workers(
    args: argparse.Namespace, reached: Connection, plans: list[Plan]
) -> Iterator[dict[bool, Worker]]:
    """Who loads the server (False) and who loads an engine (True), ready."""
    with contextlib.ExitStack() as stack:
        address = args.address
        workers = {}
        if address is None:
            model = args.model
            if args.preset:
                model = stack.enter_context(random_model(args.preset, args.seed))
            # Not shlex.split again: a path may have spaces.
            arguments = [str(model), *_options(args)]
            _, address = stack.enter_context(serving(*arguments))
            if any(plan.engine for plan in plans):
                workers[True] = stack.enter_context(worker("engine", *arguments))
        reached = replace(reached, target=address)
        workers[False] = stack.enter_context(worker("grpc", told=reached.told()))
        yield workers


class _Progress:
    """A line about the row that runs: over and over on a terminal, else every five seconds."""

    def __init__(self, title: str, seconds: float) -> None:
        self._title, self._seconds = title, seconds
        self._said = time.monotonic()

    def __call__(self, seen: dict[str, Any]) -> None:
        terminal = sys.stderr.isatty()
        if not terminal and time.monotonic() - self._said < 5:
            return
        self._said = time.monotonic()
        errors = f", {seen['errors']} errors" if seen["errors"] else ""
        text = f"{self._title}: {seen['seconds']:.0f}/{self._seconds:g} s, {seen['tokens']} tokens"
        begin, end = ("\r\x1b[K", "") if terminal else ("", "\n")
        last = seen["seconds"] >= self._seconds - 1
        print(f"{begin}{text}{errors}", end="\n" if last else end, file=sys.stderr, flush=True)
