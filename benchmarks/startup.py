"""Seconds from the command `antiphon serve MODEL` to SERVING on its health service.

python -m benchmarks.startup runs/shakespeare-tiny/model [--rounds 5]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpt.bench.output import machine_facts, machine_line
from gpt.bench.rounds import Timing


def once(model: str) -> float:
    """Start a server, wait for SERVING, stop it."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "gpt", "serve", model, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # "serving NAME on HOST:PORT"
        target = line.split()[-1]
        with grpc.insecure_channel(target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING, reply
        return time.perf_counter() - began
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    once(args.model)  # fills the page cache
    print(machine_line(machine_facts()))
    print(f"  from command to SERVING  {Timing([once(args.model) for _ in range(args.rounds)])}")


if __name__ == "__main__":
    main()
