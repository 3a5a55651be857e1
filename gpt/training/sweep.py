"""The `antiphon sweep` command: one config, several values of some settings, several seeds.

Every run is a process of its own and a folder of its own, made by `fit --resume`: the sweep can be
stopped at any time, and the same command goes on where it was. More values or more seeds are added
by asking for them.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from gpt.arguments import CommandParser, examples
from gpt.errors import ConfigError
from gpt.files import write_atomically
from gpt.training.grid import (
    Member,
    Result,
    as_csv,
    as_table,
    members,
    parse_setting,
    result_of,
)
from gpt.training.run import RunFolder, find_config

FIRST_SEED = 1337
USAGE = 2
STOPPING = (signal.SIGINT, signal.SIGTERM)

DESCRIPTION = """\
Train one config with several values of some settings, each with several seeds, and compare.

Each run is a process of its own, in RUNS_DIR/NAME/. Stopped with Ctrl-C, the run at work is saved,
and the same command goes on with it; runs that are finished are not repeated. The table is printed
and written to RUNS_DIR/NAME/sweep.csv."""


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=examples(
            f"{prog} shakespeare-tiny --set model.optimizer.lr=1e-3,3e-3 --seeds 3",
            f"{prog} mine.yaml --set model.optimizer.kind=adamw,muon --set trainer.max_steps=500",
            f"{prog} mine.yaml --set model.config.dropout=0,0.1,0.2 --dry-run",
        ),
    )
    parser.add_argument("config", metavar="YAML", help="a config, or the name of a shipped one")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=A,B",
        help="a setting of fit and its values; given several times: all combinations",
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds (default: 1)")
    parser.add_argument(
        "--name", metavar="NAME", help="the sweep's folder (default: the config's name and -sweep)"
    )
    parser.add_argument(
        "--runs_dir", default="runs", metavar="DIR", help="folder of all runs (default: runs)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the runs, and how far each is, and do nothing"
    )
    return parser


def main(argv: Sequence[str], prog: str) -> int:
    """Run what is missing of a sweep and show the table.

    Returns:
        0 if every run is done, 1 if some failed.

    Raises:
        ConfigError: settings that are none, another sweep in the folder, or flags that no run can
            be made of.
        KeyboardInterrupt: after the run at work was saved.
    """
    args = build_parser(prog).parse_args(argv)
    if args.seeds < 1:
        raise ConfigError(f"--seeds is {args.seeds}, but must be at least 1")
    config = find_config(args.config)
    seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
    runs = members([parse_setting(text) for text in args.settings], seeds)
    folder = RunFolder(Path(args.runs_dir), args.name or f"{config.stem}-sweep").path
    if args.dry_run:
        for run in runs:
            print(f"{run.name}: {result_of(folder, run).state}")
        return 0
    with _alone(folder) as lock:
        _same_config(folder, config)
        failed = _run_all(folder, config, runs, lock)
    print(as_table([result_of(folder, run) for run in runs]))
    print(f"one row a run: {folder / 'sweep.csv'}")
    for name, reason in failed.items():
        print(f"{prog}: {name} failed: {reason}", file=sys.stderr)
    return 1 if failed else 0


@contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """Keep others out of the folder: this process, and a run of it that outlives it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ConfigError(
            f"cannot write to the sweep's folder {folder}: {error.strerror}; give another "
            "--runs_dir or --name"
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{folder} is at work already; wait for it, or give another --name"
            ) from None
        yield lock
    finally:
        os.close(lock)


def _same_config(folder: Path, config: Path) -> None:
    """Raises ConfigError where the folder's runs were made from other settings."""
    path = folder / "sweep.json"
    digest = hashlib.sha256(config.read_bytes()).hexdigest()
    try:
        before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    if before and before.get("sha256") != digest:
        raise ConfigError(
            f"the runs in {folder} were made from {before.get('config')} as it was then; give "
            "another --name for another sweep"
        )
    text = json.dumps({"config": str(config), "sha256": digest}, indent=2) + "\n"
    write_atomically(path, text.encode())


def _run_all(folder: Path, config: Path, runs: list[Member], lock: int) -> dict[str, str]:
    """Do what is not done, one after the other. Returns the names of those that failed, and why."""
    failed: dict[str, str] = {}
    results = {run: result_of(folder, run) for run in runs}
    try:
        for i, run in enumerate(runs, 1):
            if not results[run].done:
                status = _fit(folder, config, run, lock)
                results[run] = result_of(folder, run)
                if status:
                    failed[run.name] = _reason(folder, run, status)
                if status == USAGE:  # so would all others be
                    raise ConfigError(failed[run.name])
            write_atomically(folder / "sweep.csv", as_csv(list(results.values())))
            print(f"[{i}/{len(runs)}] {_line(results[run])}", flush=True)
    finally:  # the run that was interrupted has got somewhere, too
        write_atomically(folder / "sweep.csv", as_csv([result_of(folder, run) for run in runs]))
    return failed


def _line(result: Result) -> str:
    said = f"{result.member.name}: {result.state}"
    return f"{said}, {result.val_loss:.4f} nats/token" if result.done else said


def _log(folder: Path, run: Member) -> Path:
    return folder / "logs" / f"{run.name}.txt"


def _reason(folder: Path, run: Member, status: int) -> str:
    lines = _log(folder, run).read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line for line in lines if "error: " in line]
    found = said[-1].partition("error: ")[2] if said else f"it ended with status {status}"
    return f"{found} ({_log(folder, run)})"


def _fit(folder: Path, config: Path, run: Member, lock: int) -> int:
    """Train one run to its end. Its status.

    It is told of a Ctrl-C by this process and in no other way, so that it hears of it once: then
    it finishes its step and saves.
    """
    log = _log(folder, run)
    log.parent.mkdir(exist_ok=True)
    command = [
        sys.executable, "-m", "gpt", "train", "fit", "--config", str(config),
        "--runs_dir", str(folder), "--name", run.name, "--resume", *run.flags,
    ]  # fmt: skip
    # SIGINT, too: a shell starts what runs in the background with it ignored.
    previous = {number: signal.signal(number, _interrupt) for number in STOPPING}
    try:
        with open(log, "ab") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
            )
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            child.wait()
            raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
