"""Runs the trainer in child processes and kills them: at random moments, and inside a save.

    python tests/integration/killer.py SEED NAME=KILLS… -- fit --config …

Each child is forked from this process when it has read the command line, so that a kill costs what
the run costs and not a start of Python. The same run is started again after each kill, as a restart
loop would, and at last left alone. Prints how each child ended.
"""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpt.training import cli, throughput
from gpt.training.loggers import MetricsCSV


def rows(metrics: Path) -> int:
    try:
        return metrics.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def die_anywhere(after: int, share: float) -> None:
    """Kill this process some milliseconds of its own computing after so many rows of metrics.

    The kernel does it, wherever the process is then: nothing handles that signal.
    """
    left, real = after, MetricsCSV.log_metrics

    def log(self: MetricsCSV, *args: Any, **kwargs: Any) -> None:
        nonlocal left
        real(self, *args, **kwargs)
        left -= 1
        if left == 0:
            signal.setitimer(signal.ITIMER_PROF, 0.001 + 0.015 * share)

    MetricsCSV.log_metrics = log  # type: ignore[method-assign]


def die(after: int, names: tuple[str, ...]) -> None:
    """Kill this process when it has called these functions of `os` so many times: before the call,
    so that what it would have done is not done."""

    left = after
    fsync = os.fsync

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if "checkpoints" in str(args) or real is fsync:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in names:
        setattr(os, name, counting(getattr(os, name)))


def die_writing(after: int, share: float) -> None:
    """Kill this process when a share of the checkpoint number `after` is in its file."""
    left, real = after, torch.save

    def save(obj: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            real(obj, file, *args, **kwargs)
            return
        whole = io.BytesIO()
        real(obj, whole)
        file.write(whole.getvalue()[: int(len(whole.getvalue()) * share)])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save


class Restarted(cli.TrainCLI):
    """Goes on in a child, as often as it takes; the parent ends when the run has."""

    kills = 0
    pick = random.Random()

    def parse_arguments(self, parser: Any, args: Any) -> None:
        super().parse_arguments(parser, args)
        given = self.config[self.config.subcommand]
        metrics = Path(given.runs_dir, given.name, "metrics.csv")
        killed = 0
        while True:
            way = self.pick.choice(["anywhere", "anywhere", "renaming", "writing"])
            if killed == self.kills:
                way = "none"
            after, share = self.pick.randrange(14), self.pick.random()
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                if way == "anywhere":
                    die_anywhere(after + 1, share)
                elif way == "renaming":
                    die(after, ("replace", "link", "fsync"))
                elif way == "writing":
                    die_writing(after % 2 + 1, share)
                return
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            print(f"child {way} ended with {code} after {rows(metrics)} rows", flush=True)
            if code in (-signal.SIGKILL, -signal.SIGPROF):
                killed += 1
            elif code or killed < self.kills:
                raise SystemExit(f"ended with {code} after {killed} of {self.kills} kills")
            else:
                print(f"{given.name}: killed {killed} times", flush=True)
                raise Over


class Over(Exception):  # noqa: N818
    """The run is complete, in the parent."""


def main() -> None:
    at = sys.argv.index("--")
    seed, *runs = sys.argv[1:at]
    cli.TrainCLI = Restarted  # type: ignore[misc]
    throughput.speed_limit = lambda *_: (
        None
    )  # measured once in each child, for a column unused here
    parent = os.getpid()
    for run in runs:
        name, _, kills = run.partition("=")
        Restarted.kills, Restarted.pick = int(kills), random.Random(int(seed))
        try:
            status = cli.main([*sys.argv[at + 1 :], "--name", name])
        except Over:
            continue
        except BaseException:
            if os.getpid() == parent:
                raise
            traceback.print_exc()
            status = 70
        sys.stdout.flush()
        os._exit(status)  # of a child, or of a command line that was refused


if __name__ == "__main__":
    main()
