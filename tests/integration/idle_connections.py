"""Hold many idle connections to a server, and see that it still answers at once.

    python -m tests.integration.idle_connections [COUNT]

COUNT is 10,000 unless it is given. Server and client each take that many file descriptors; the
system may have to be told to allow them (`ulimit -n -H` shows the limit).
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from serve.client import Client
from tests.integration.http2 import Connection
from tests.integration.serving import SCRIPTED, ServerProcess

SPARE_FILES = 200


def allow(count: int) -> None:
    """Raise this process's limit of open files to that, which its children take over."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        sys.exit(f"{count} files are needed, the system allows {hard}; raise its limit")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def hold(target: str, count: int, held: contextlib.ExitStack) -> list[Connection]:
    """Open that many connections, each taken by the server."""
    connections = []
    for _ in range(count):
        connection = held.enter_context(Connection(target))
        connection.await_settings()
        connections.append(connection)
    return connections


def resident(pid: int) -> int:
    """Bytes of memory that a process takes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    allow(count + SPARE_FILES)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as held,
    ):
        (Path(folder) / "loaded").touch()
        server = held.enter_context(ServerProcess(SCRIPTED, Path(folder)))
        server.await_ready()
        before = resident(server.process.pid)
        started = time.monotonic()
        connections = hold(server.target, count, held)
        print(f"{count} connections in {time.monotonic() - started:.1f} s")
        grown = resident(server.process.pid) - before
        print(f"{grown / 2**20:.0f} MiB more, {grown / count / 1024:.1f} KiB each")
        with Client(server.target, timeout=60) as client:
            started = time.monotonic()
            assert client.generate("x", max_tokens=5).text == "a" * 5
            print(f"a new client's text of 5 tokens took {time.monotonic() - started:.2f} s")
        assert all(connection.ping() for connection in connections)
        print("all connections still answer")


if __name__ == "__main__":
    main()
