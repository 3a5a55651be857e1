"""A Python that has imported everything, and becomes the commands that it is asked for.

Most of what a short command costs is importing: torch takes two seconds and more, Lightning twice
that, and the tests start some hundred commands. Here one process imports it all and forks for each
command. What a command does stays its own: it is a process with its own folder, environment,
streams, open files, process group and exit status, which signals reach and end as any other.

    Popen([sys.executable, ARG, …])      as of `subprocess`, but forked from the process that has
                                         everything; the command's own id, signals and status
    run([sys.executable, ARG, …])        likewise
    command(ARG, …)                      the words for who starts processes by other means

`-m MODULE`, `-c CODE` and `FILE` are known, options of Python itself are not; what is about the
start of Python, or about what is imported, has to start one. `sys.executable` of a command is a
script that starts `-m gpt…` and files in this way, too, so that runs which start others do.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
import types
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZE = 1 << 20  # of a request, at most
MANY = 64  # open files that a command inherits, at most
# What most commands import sooner or later.
HEAVY = (
    "gpt.generate", "gpt.sample", "gpt.batch", "gpt.training.train_cli", "gpt.training.command",
    "gpt.training.loggers", "gpt.training.sharding", "gpt.training.muon",
    "serve.service", "serve.server", "serve.life", "serve.client", "serve.generate", "serve.demo",
    "torch._dynamo",
)  # fmt: skip

EXECUTABLE = """\
#!/bin/sh
case "$1 $2" in
"-m gpt"*|"-m serve."*|"-m tests."*|*.py\\ *) exec {warm} "$@" ;;
esac
exec {python} "$@"
"""


# --- Who asks -------------------------------------------------------------------------------------


def _send(path: str, argv: list[str], cwd: str, env: dict[str, str], fds: dict[int, int],
          group: str) -> tuple[socket.socket, int]:  # fmt: skip
    """Have a command begun.

    Args:
        fds: the number that a file shall have there, and the one that it has here.
        group: "own" process group, that of "PID" or a new session on the "terminal".

    Returns:
        A line that says how it ended; and its process id. Closing the line kills the command.
    """
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(path)
    request = json.dumps([argv, cwd, env, list(fds), group]).encode()
    line.sendmsg(
        [len(request).to_bytes(4, "big")],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds.values()))],
    )
    line.sendall(request)
    return line, int.from_bytes(_exactly(line, 4), "big")


def _exactly(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = line.recv(size - len(found))
        if not part:
            raise EOFError("the process that runs the commands is gone")
        found += part
    return found


def _status(line: socket.socket) -> int:
    return int.from_bytes(_exactly(line, 4), "big", signed=True)


def _ask(path: str, argv: list[str]) -> int:
    """Stand for a command: what this process has is the command's, and its end is this one's."""
    fds = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the folder that was listed
            os.fstat(fd)
            fds[fd] = fd
    group = str(os.getpgrp())
    if os.isatty(0) and os.getsid(0) == os.getpid():
        # A terminal is of one session; it will be of the command's.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        fcntl.ioctl(0, termios.TIOCNOTTY)
        group = "terminal"
    line, pid = _send(path, argv, os.getcwd(), dict(os.environ), fds, group)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda received, _: os.kill(pid, received))
    status = _status(line)
    if status < 0:
        with suppress(OSError):  # of SIGKILL
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` of a command `[sys.executable, …]` that is forked and not started.

    Attributes:
        pid: the command's own.
    """

    _line: socket.socket | None = None

    def _execute_child(self, *args: Any) -> None:
        parent = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(parent).bind(*args).arguments
        python, *argv = map(os.fspath, given["args"])
        unknown = ("executable", "preexec_fn", "shell", "umask")
        assert python == sys.executable
        assert not any(given[name] not in (None, False, -1) for name in unknown), unknown
        pipes = given["p2cread"], given["c2pwrite"], given["errwrite"]
        fds = {i: i if fd == -1 else fd for i, fd in enumerate(pipes)}
        fds |= {fd: fd for fd in given["pass_fds"]}
        env = dict(os.environ if given["env"] is None else given["env"])
        cwd = os.path.abspath(given["cwd"] or ".")
        self._line, self.pid = _send(address(), argv, cwd, env, fds, "own")
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]

    def _end(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._line is not None:
            self._line.settimeout(timeout)
            try:
                self.returncode = _status(self._line)
            except (BlockingIOError, TimeoutError):
                return None
            except EOFError:
                self.returncode = -signal.SIGKILL
            self._line.close()
        return self.returncode

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._end(0)

    def _wait(self, timeout: float | None) -> int:
        if (status := self._end(timeout)) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status


def run(
    arguments: list[str], *, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run(arguments, capture_output=True, …)`."""
    options = {"stdin": subprocess.DEVNULL, **options}
    with Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def command(*argv: str) -> list[str]:
    """The words of a command that stands for `python ARG…`."""
    return [sys.executable, "-S", "-E", str(Path(__file__).resolve()), address(), *argv]


def executable() -> str:
    """The script that `sys.executable` is in a command."""
    return str(Path(address()).with_name("python"))


_running = ExitStack()
_address = ""


def address() -> str:
    """Of the process that has everything; the first who asks starts it."""
    global _address
    if not _address:
        # In the system's folder for such things: the address of a socket has 100 characters at
        # most.
        folder = _running.enter_context(tempfile.TemporaryDirectory())
        path = f"{folder}/warm"
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", path],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,  # it ends when nobody holds the other side
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        _running.enter_context(process)
        assert process.stdin is not None
        _running.callback(process.stdin.close)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        _address = path
    return _address


def end() -> None:
    """End the process that has everything, and with it what it has become."""
    global _address
    _running.close()
    _address = ""


# --- The process that has everything --------------------------------------------------------------


def _serve(path: str) -> None:
    for module in HEAVY:
        importlib.import_module(module)
    # So is how fast this CPU is, which each run of the trainer measures.
    machine = importlib.import_module("gpt.machine")
    machine.measured = functools.cache(machine.measured)  # type: ignore[attr-defined]
    machine.measured(importlib.import_module("torch").float32)
    assert len(os.listdir("/proc/self/task")) == 1, "threads are lost in a fork"
    assert "readline" not in sys.modules, "it looks at the terminal when it is imported"
    gc.collect()
    gc.freeze()
    script = Path(path).with_name("python")
    warm = f"{sys.executable} -S -E {Path(__file__).resolve()} {path}"
    script.write_text(EXECUTABLE.format(warm=warm, python=sys.executable))
    script.chmod(0o755)

    # A signal that something has ended makes `woken` readable.
    woken, wakeup = socket.socketpair()
    for each in (woken, wakeup):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup.fileno())
    lines: dict[socket.socket, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(path)
        door.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([0, door, woken, *lines], [], [])
            if 0 in ready:
                for pid in lines.values():
                    os.kill(pid, signal.SIGKILL)
                return
            if woken in ready:
                woken.recv(SIZE)
                _tell(lines)
            for line in lines.keys() & ready:  # nobody waits for it any more
                os.kill(lines[line], signal.SIGKILL)
                lines[_nobody()] = lines.pop(line)
                line.close()
            if door in ready:
                line, _ = door.accept()
                fds: list[int] = []
                try:
                    size, fds, _, _ = socket.recv_fds(line, 4, MANY)
                    request = json.loads(_exactly(line, int.from_bytes(size, "big")))
                except (EOFError, OSError, ValueError):  # who asked was killed meanwhile
                    line.close()
                    for fd in fds:
                        os.close(fd)
                    continue
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for each in (door, woken, wakeup, line, *lines):
                        each.close()
                    _become(*request, fds, str(script))
                lines[line] = pid
                for fd in fds:
                    os.close(fd)
                with suppress(OSError):
                    line.sendall(pid.to_bytes(4, "big"))


def _nobody() -> socket.socket:
    """A line that is never readable."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def _tell(lines: dict[socket.socket, int]) -> None:
    """Tell who waits for commands how those ended that have."""
    for line, pid in list(lines.items()):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            with suppress(OSError):
                code = os.waitstatus_to_exitcode(status)
                line.sendall(code.to_bytes(4, "big", signed=True))
            line.close()
            del lines[line]


def _become(argv: list[str], cwd: str, env: dict[str, str], numbers: list[int], group: str,
            fds: list[int], executable: str) -> None:  # fmt: skip
    """Be the command, from its first line to its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 256) for fd in fds]
    for fd in fds:
        os.close(fd)
    for number, fd in zip(numbers, high, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    if group == "terminal":
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    else:
        try:
            os.setpgid(0, 0 if group == "own" else int(group))
        except PermissionError:  # of another session, as one that was asked for is
            os.setpgid(0, 0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.executable = executable
    entries = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:1] = map(os.path.abspath, entries)
    os._exit(_finish(_play(argv)))


def _play(argv: list[str]) -> Any:
    """Run the program; with what it ended."""
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        elif argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            sys.path.insert(0, "")
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(argv[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = argv
            sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code
    except BaseException as error:  # noqa: BLE001 (it is shown, as Python would)
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _finish(ended: Any) -> int:
    """Leave as Python does, but for the parent's part of it, which a fork has too; the status."""
    if isinstance(ended, str):
        print(ended, file=sys.stderr)
        ended = 1
    status = int(ended or 0)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError:
            status = 120
            with suppress(OSError):
                traceback.print_exc()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status & 0xFF


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _serve(sys.argv[1])
    else:
        sys.exit(_ask(sys.argv[1], sys.argv[2:]))
