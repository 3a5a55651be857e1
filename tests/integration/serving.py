"""Server processes for the integration tests: started, waited for, and never left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
REAL = (sys.executable, "-m", "gpt", "serve")
SCRIPTED = (sys.executable, str(ROOT / "tests" / "integration" / "scripted_server.py"))
PATIENCE = 120.0


class ServerProcess:
    """A server; leaving the context kills it if it is still there.

    Args:
        start: what starts it: `subprocess.Popen` for a process whose memory is its own alone.

    Attributes:
        target: where it listens: told by its log as soon as the port is bound.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        model: Path,
        *flags: str,
        port: int = 0,
        environment: dict[str, str] | None = None,
        start: type[subprocess.Popen[str]] = warm.Popen,
    ) -> None:
        self.process = start(
            [*command, str(model), "--port", str(port), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**ENVIRONMENT, **(environment or {})},
            cwd=ROOT,
        )
        self.log: list[str] = []
        self.out: list[str] = []
        self._told = threading.Event()
        self._ready = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(self.process.stderr, self.log, self._told)),
            threading.Thread(target=self._read, args=(self.process.stdout, self.out, self._ready)),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Any, lines: list[str], told: threading.Event) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))
            if "listening on " in line:
                self.target = line.partition("listening on ")[2].partition(",")[0]
            if stream is self.process.stdout or "listening on " in line:
                told.set()
        told.set()  # the process has ended; whoever waits will find out

    def await_bound(self) -> str:
        """Wait until the port is bound; where."""
        assert self._told.wait(PATIENCE), "nothing came"
        assert hasattr(self, "target"), self.log
        return self.target

    def await_ready(self) -> str:
        """Wait for the line that says it is ready; returns it."""
        assert self._ready.wait(PATIENCE), self.log
        self.await_bound()
        assert self.out, self.log
        return self.out[0]

    def await_log(self, text: str) -> str:
        """Wait until a line of the log holds the text; returns the line."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if found := next((line for line in self.log if text in line), None):
                return found
            time.sleep(0.02)
        raise AssertionError(f"{text!r} never came: {self.log}")

    def wait(self) -> int:
        """Wait for its end; the exit status."""
        status = self.process.wait(PATIENCE)
        for thread in self._threads:
            thread.join(PATIENCE)
        return status

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.wait()
