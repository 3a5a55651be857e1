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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests import warm
from tests.integration.serving import ENVIRONMENT, PATIENCE, ROOT, ServerProcess

HERE = ROOT / "tests" / "integration"
SERVER = (sys.executable, str(HERE / "soak_server.py"))
HEALTH_SECONDS, MEMORY_GROWTH = 0.100, 0.02
DOOMED = 5
"""Of so many clients one is killed."""


@dataclass
class Soak:
    """One run of it.

    Attributes:
        counts: how many requests of each kind are over.
        faults: what was wrong.
        health: seconds that each health check took.
        memory: bytes the server's process took, after the first tenth and at the end.
        peak: most requests held at once, as far as was seen.
    """

    requests: int
    processes: int
    streams: int
    per_client: int
    seed: int
    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    peak: int = 0
    state: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

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
            self._settle()
            server.process.terminate()
            if status := server.wait():
                self.faults.append(f"the server ended with {status}")
            bad = [line for line in server.log if "ERROR" in line or "CRITICAL" in line]
            self.faults += [f"in the log: {line}" for line in bad]
            if any("Traceback" in line for line in server.log):
                self.faults.append("a traceback in the log")

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

    def _read(self) -> dict[str, int]:
        self.state = json.loads((self.folder / "state.json").read_text())
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
                taken = self._read().get("bytes")
                if not self.memory and taken and self.counts.total() >= self.requests // 10:
                    self.memory.append(taken)

    def _settle(self) -> None:
        """Wait until nothing is held; then no page may be."""
        end = time.monotonic() + PATIENCE
        while self._read()["held"] and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.3)  # the figures come ten times a second, and not all at one instant
        state = self._read()
        if state["held"] or state["pages"]:
            self.faults.append(f"{state['held']} requests, {state['pages']} pages are still held")
        if self.memory:
            self.memory.append(state["bytes"])

    @property
    def health_p99(self) -> float:
        return sorted(self.health)[int(0.99 * len(self.health))] if self.health else 0.0

    @property
    def growth(self) -> float:
        """Of the memory, as a share; 0 where the system does not tell."""
        return self.memory[-1] / self.memory[0] - 1 if self.memory else 0.0

    def check_bounds(self) -> None:
        if self.health_p99 >= HEALTH_SECONDS:
            self.faults.append(f"health checks took {1e3 * self.health_p99:.0f} ms (99 %)")
        if self.growth > MEMORY_GROWTH:
            self.faults.append(f"memory grew by {self.growth:.1%}")

    def figures(self) -> dict[str, object]:
        return {
            "requests": dict(self.counts),
            "seconds": round(self.seconds, 1),
            "most_held": self.peak,
            "preemptions": self.state.get("preempted"),
            "pages_held_at_the_end": self.state.get("pages"),
            "health_checks": len(self.health),
            "health_p99_ms": round(1e3 * self.health_p99, 1),
            "memory_mib": [round(b / 2**20, 1) for b in self.memory],
            "memory_growth": round(self.growth, 4),
            "faults": len(self.faults),
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
            options.requests,
            options.processes,
            options.streams,
            options.per_client,
            options.seed,
            Path(folder),
        )
        soak.run()
    if not options.no_bounds:
        soak.check_bounds()
    print(json.dumps(soak.figures(), indent=2))
    for fault in soak.faults[:20]:
        print(fault, file=sys.stderr)
    return 1 if soak.faults else 0


if __name__ == "__main__":
    sys.exit(main())
