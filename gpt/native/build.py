"""Compile the kernels: once a machine, kept on disk, by one process at a time.

`python -m gpt.native.build` keeps them beside the source, for an image that is to have no compiler:
they look for themselves what the processor has.

The file has no headers but C++'s own, so it takes a compiler and ten seconds; torch's loader of
extensions would also want ninja, setuptools, Python's headers and a minute, and waits for ever on
the lock of a process that was killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from gpt.data.wheels import cache_folder

log = logging.getLogger(__name__)

SOURCES = (
    "kernels.cpp",
    "all.inl",
    "products.inl",
    "attend.inl",
    "gradients.inl",
    "tiles.inl",
    "causal.inl",
    "orthogonal.inl",
)
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fopenmp")
COMPILERS = ("g++", "clang++", "c++")
SECONDS = 180
SWITCH = "ANTIPHON_NATIVE"


class NotBuiltError(Exception):
    """Why there are no kernels; never an error of the program, which runs without."""


def build(folder: Path | None = None) -> Path:
    """The shared library, compiled if no earlier call has done so.

    Args:
        folder: where it is kept; None: the program's cache (`gpt.data.wheels.cache_folder`), if it
            is not beside the source.

    Raises:
        NotBuiltError: it is switched off, there is no compiler, or it failed.
    """
    if os.environ.get(SWITCH, "").lower() in ("0", "off", "no", "false"):
        raise NotBuiltError(f"{SWITCH} switches them off")
    if folder is None and (shipped := beside(Path(__file__).parent)).exists():
        return shipped
    compiler = find_compiler()
    try:
        folder = folder or cache_folder()
        path = folder / f"kernels-{_key(compiler)}.so"
        if path.exists():
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "kernels.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the system if we are killed
            if not path.exists():
                log.warning("compiling kernels for this processor (once, some ten seconds)")
                _compile(compiler, path)
        return path
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        raise NotBuiltError(f"cannot keep them in {folder}: {error}") from None


def beside(folder: Path) -> Path:
    """Where kernels for these sources are that came with the program, whatever compiled them."""
    return folder / f"kernels-{_key([])}.so"


def find_compiler() -> list[str]:
    """`$CXX`, or the first that is there. Raises NotBuiltError."""
    given = shlex.split(os.environ.get("CXX", ""))
    for command in [given] if given else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    raise NotBuiltError(
        f"there is no C++ compiler ({' '.join(given) or ', '.join(COMPILERS)}); install one"
    )


def _key(compiler: list[str]) -> str:
    """Changes with all that the result depends on."""
    content = hashlib.sha256()
    for name in SOURCES:
        content.update((Path(__file__).parent / name).read_bytes())
    machine = (platform.system(), platform.machine(), *compiler, *FLAGS)
    content.update("\0".join(machine).encode())
    return content.hexdigest()[:16]


def _compile(compiler: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        made, object_file = Path(name) / "kernels.so", Path(name) / "kernels.o"
        source = Path(__file__).parent / SOURCES[0]
        # Linked without -fopenmp: its functions must be those of the library that torch has loaded,
        # as a second one would bring threads of its own.
        _run([*compiler, *FLAGS, "-c", str(source), "-o", str(object_file)])
        free = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
        _run([*compiler, "-shared", *free, str(object_file), "-o", str(made)])
        made.replace(path)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotBuiltError(f"{command[0]} took longer than {SECONDS} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise NotBuiltError(f"{command[0]} failed: {lines[0][:200]}")


if __name__ == "__main__":
    _compile(find_compiler(), beside(Path(__file__).parent))
