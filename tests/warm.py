"""A Python that has imported everything, and becomes the commands that it is asked for.

Most of what `antiphon sample` costs is importing torch: two seconds and more, for each of the many
commands of the documentation. Here one process imports it and forks for each command. What a
command does stays its own: it has its own process, folder, environment, streams and exit status,
and is reached by signals.

    with running() as socket:            the process that has everything
    python -S warm.py SOCKET ARG …       stands for `python ARG …`, in it

`python -m MODULE` and `python FILE` are known, options of Python itself are not.
"""

from __future__ import annotations

import array
import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

SIZE = 1 << 20  # of a request, at most


# --- The command in the shell: this part imports nothing heavy -------------------------------


def ask(path: str, argv: list[str]) -> int:
    """Have `argv` run with this process's folder, environment and streams; its exit status."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(path)
        request = json.dumps([argv, os.getcwd(), dict(os.environ)]).encode()
        line.sendmsg(
            [len(request).to_bytes(4, "big") + request],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))],
        )
        pid = int.from_bytes(_exactly(line, 4), "big")
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda received, _: os.kill(pid, received))
        return int.from_bytes(_exactly(line, 4), "big", signed=True)


def _exactly(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = line.recv(size - len(found))
        if not part:
            raise EOFError("the process that runs the commands is gone")
        found += part
    return found


# --- The process that has everything ---------------------------------------------------------


@contextmanager
def running() -> Iterator[str]:
    """The process that commands are forked from; they end with the block. Yields its address."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # In the system's folder for such things: the address of a socket has 100 characters at most.
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-m", "tests.warm", path := f"{folder}/warm"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield path
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def serve(path: str) -> None:
    for module in ("gpt.generate", "gpt.training.train_cli", "serve.service", "serve.client"):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who waits for commands is in between
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(path)
        door.listen(16)
        print("ready", flush=True)
        while True:
            line, _ = door.accept()
            if os.fork() == 0:
                door.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _wait_for_command(line)
            line.close()


def _wait_for_command(line: socket.socket) -> None:
    """Run one command in a child, and tell the caller how it ended."""
    data, ancillary, _, _ = line.recvmsg(SIZE, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    fds = array.array("i")
    for _, _, carried in ancillary:
        fds.frombytes(carried)
    request = data[4:] + _exactly(line, int.from_bytes(data[:4], "big") - len(data) + 4)
    pid = os.fork()
    if pid == 0:
        line.close()
        _become(*json.loads(request), list(fds))
    for fd in fds:
        os.close(fd)
    line.sendall(pid.to_bytes(4, "big"))
    _, status = os.waitpid(pid, 0)
    line.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
    os._exit(0)


def _become(argv: list[str], cwd: str, env: dict[str, str], fds: list[int]) -> None:
    """Be the command, from its first line to its end."""
    for i, fd in enumerate(fds):
        os.dup2(fd, i)
        os.close(fd)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for entry in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
        if entry:
            sys.path.insert(0, os.path.abspath(entry))
    status: Any = 0
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as ended:
        status = ended.code
    except BaseException:  # noqa: BLE001 (it is shown, as Python would)
        sys.excepthook(*sys.exc_info())
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    # As at any end of Python, which a fork must not leave by: that would be the parent's end, too.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(int(status or 0))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        status = ask(sys.argv[1], sys.argv[2:])
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        sys.exit(status)
