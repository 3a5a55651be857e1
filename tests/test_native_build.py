"""How the kernels come to be: compiled once, or not at all, and the program runs without."""

from __future__ import annotations

import logging
import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpt.native import build as building
from gpt.native import kernels as native
from gpt.native.build import NotBuiltError, build
from gpt.native.kernels import Kernels

NO_COMPILER = not any(shutil.which(name) for name in building.COMPILERS)
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    native.use(None)
    native._refused = None


def test_without_a_compiler_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NotBuiltError, match=r"no C\+\+ compiler .*; install one"):
        build(tmp_path)
    with caplog.at_level(logging.INFO):
        assert native.load() is None
        assert native.load() is None
    assert caplog.text.count("all runs through torch") == 1


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(building.SWITCH, "off")
    with pytest.raises(NotBuiltError, match="ANTIPHON_NATIVE"):
        build()


def test_a_compiler_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    folder = tmp_path / "cache"
    with pytest.raises(NotBuiltError, match=r"failed: x\.cpp:1: error: no such luck"):
        build(folder)
    assert [path.name for path in folder.iterdir()] == ["kernels.lock"]
    folder.chmod(0o555)
    monkeypatch.setenv("CXX", f"{compiler} -O1")
    (tmp_path / "file").touch()
    with pytest.raises(NotBuiltError, match="cannot keep them"):
        build(tmp_path / "file" / "below")


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_bytes(b"no library")
    with pytest.raises(NotBuiltError, match="do not load"):
        Kernels(path)


def _build(folder: Path) -> None:
    build(folder)


def test_several_processes_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that only counts its calls stands for the real one, which takes ten seconds."""
    compiler, calls = tmp_path / "counts", tmp_path / "calls"
    compiler.write_text(
        "#!/bin/sh\n"
        f"echo call >> {calls}\n"
        "sleep 0.2\n"
        'while [ $# -gt 1 ]; do shift; done\ntouch "$1"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_build, args=(tmp_path / "cache",)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert calls.read_text().split() == ["call", "call"], "compiled and linked"
