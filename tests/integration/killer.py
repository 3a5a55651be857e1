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
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpt.training import cli


def rows(metrics: Path) -> int:
    try:
        return metrics.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


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
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                if way == "renaming":
                    die(self.pick.randrange(14), ("replace", "link", "fsync"))
                elif way == "writing":
                    die_writing(self.pick.randrange(1, 3), self.pick.random())
                return
            status = self.kill(pid, metrics) if way == "anywhere" else os.waitpid(pid, 0)[1]
            # What a child draws, the parent draws too, or each would draw the same.
            self.pick.seed(self.pick.random())
            code = os.waitstatus_to_exitcode(status)
            print(f"child {way} ended with {code} after {rows(metrics)} rows", flush=True)
            if code == -signal.SIGKILL:
                killed += 1
            elif code or killed < self.kills:
                raise SystemExit(f"ended with {code} after {killed} of {self.kills} kills")
            else:
                print(f"{given.name}: killed {killed} times", flush=True)
                raise Over

    def kill(self, pid: int, metrics: Path) -> int:
        """Kill a child some rows of metrics later. Its wait status comes back."""
        seen, wanted = rows(metrics), self.pick.randrange(1, 14)
        delay = self.pick.random() * 0.02
        while abs(rows(metrics) - seen) < wanted:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1]


class Over(Exception):  # noqa: N818
    """The run is complete, in the parent."""


def main() -> None:
    at = sys.argv.index("--")
    seed, *runs = sys.argv[1:at]
    cli.TrainCLI = Restarted  # type: ignore[misc]
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
