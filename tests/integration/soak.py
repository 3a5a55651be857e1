"""The soak: thousands of short requests against one server process, and what must hold meanwhile.

    make soak
    python -m tests.integration.soak --requests 500 --no-bounds

Clients are processes of their own; of each five one is killed at work. A fifth of the requests is
cancelled at random times, a twentieth is invalid. The scripted model makes texts that follow from
their prompts (`soak_client.py`), in a cache so small that requests crowd each other out.

It fails if a text is wrong or mixed, a page is still held at the end, or the log has an error; and,
unless told not to look, if memory grows by more than 2 % after the first tenth of the requests, or
the 99th percentile of health checks reaches 100 ms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests import warm
from tests.integration.endurance import Endurance
from tests.integration.serving import ENVIRONMENT, PATIENCE, ROOT, ServerProcess

HERE = ROOT / "tests" / "integration"
SERVER = (sys.executable, str(HERE / "soak_server.py"))
HEALTH_SECONDS = 0.100
DOOMED = 5
"""Of so many clients one is killed."""


@dataclass(kw_only=True)
class Soak(Endurance):
    """One run of it.

    Attributes:
        health: seconds that each health check took.
        peak: most requests held at once, as far as was seen.
    """

    requests: int
    processes: int
    streams: int
    per_client: int
    health: list[float] = field(default_factory=list)
    peak: int = 0
    most_growth = 0.02

    def run(self) -> None:
        flags = ("--max-running", "32", "--max-waiting", str(max(0, self.streams - 40)))
        with ServerProcess(SERVER, self.folder, *flags, start=subprocess.Popen) as server:
            server.await_ready()
            self._lock, self._over = threading.Lock(), threading.Event()
            self._clients = enumerate(range(0, self.requests, self.per_client))
            watcher = threading.Thread(target=self._watch, args=(server.target,))
            workers = [
                threading.Thread(target=self._work, args=(server.target,))
                for _ in range(self.processes)
            ]
            begun = time.monotonic()
            for thread in (watcher, *workers):
                thread.start()
            for thread in workers:
                thread.join()
            self.seconds = time.monotonic() - begun
            self._over.set()
            watcher.join()
            self.settle()
            self.end(server)

    def _work(self, target: str) -> None:
        """Run one client after the other."""
        while True:
            with self._lock:
                client = next(self._clients, None)
            if client is None:
                return
            number, first = client
            count = min(self.per_client, self.requests - first)
            rng = random.Random(f"{self.seed} client {number}")
            lines = rng.randrange(1, count) if number % DOOMED == 1 and count > 1 else count
            self._client(target, first, count, lines)

    def _client(self, target: str, first: int, count: int, lines: int) -> None:
        """A client that is killed once so many of its requests are over."""
        streams = max(1, self.streams // self.processes)
        numbers = map(str, (self.seed, first, count, streams))
        process = warm.Popen(
            [sys.executable, str(HERE / "soak_client.py"), target, *numbers],
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            cwd=ROOT,
        )
        assert process.stdout is not None
        with process, process.stdout:
            told = 0
            for line in itertools.islice(process.stdout, lines):
                told += 1
                outcome = json.loads(line)
                with self._lock:
                    self.counts[outcome["kind"]] += 1
                    if outcome["wrong"]:
                        self.faults.append(outcome["wrong"])
            if lines < count:
                process.kill()
        with self._lock:
            self.counts["killed"] += count - told
            if told < lines:
                self.faults.append(f"a client ended by itself with {process.returncode}")

    def read(self) -> dict[str, int]:
        super().read()
        self.peak = max(self.peak, self.state["held"])
        return self.state

    def _watch(self, target: str) -> None:
        """Look at health and memory until it is over."""
        with grpc.insecure_channel(target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)  # has connected
            while not self._over.wait(0.05):
                begun = time.perf_counter()
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
                self.health.append(time.perf_counter() - begun)
                if answer.status != health_pb2.HealthCheckResponse.SERVING:
                    self.faults.append("it was not serving")
                taken = self.read().get("bytes")
                if not self.memory and taken and self.counts.total() >= self.requests // 10:
                    self.memory.append(taken)

    @property
    def health_p99(self) -> float:
        return sorted(self.health)[int(0.99 * len(self.health))] if self.health else 0.0

    def check_bounds(self) -> None:
        super().check_bounds()
        if self.health_p99 >= HEALTH_SECONDS:
            self.faults.append(f"health checks took {1e3 * self.health_p99:.0f} ms (99 %)")

    def figures(self) -> dict[str, object]:
        return {
            **super().figures(),
            "most_held": self.peak,
            "health_checks": len(self.health),
            "health_p99_ms": round(1e3 * self.health_p99, 1),
        }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000, metavar="N")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="at once, in all")
    parser.add_argument("--processes", type=int, default=4, metavar="N", help="clients at once")
    parser.add_argument("--per-client", type=int, default=200, metavar="N", help="requests of one")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--no-bounds", action="store_true", help="do not judge the time of health checks and memory"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(
            requests=options.requests,
            streams=options.streams,
            processes=options.processes,
            per_client=options.per_client,
            seed=options.seed,
            folder=Path(folder),
        )
        soak.run()
    return soak.report(bounds=not options.no_bounds)


if __name__ == "__main__":
    sys.exit(main())
