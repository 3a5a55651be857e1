"""Commands that are forked and not started: what tests rely on is as if they had been started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest

from tests import warm

pytestmark = pytest.mark.integration


def test_a_command_has_its_own_words_folder_environment_streams_and_status(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "print(sys.argv, os.getcwd(), os.environ['A'], 'HOME' in os.environ, input())\n"
        "sys.exit('no')"
    )
    with warm.Popen(
        [sys.executable, "-c", code, "x"], cwd=tmp_path, env={"A": "b"}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        out, err = process.communicate("hello\n", timeout=60)
    assert out == f"['-c', 'x'] {tmp_path} b False hello\n"
    assert (process.returncode, err) == (1, "no\n")
    (tmp_path / "mine.py").write_text("import sys; sys.exit(len(sys.argv) + 5)")
    for words in (["mine.py", "x"], ["-m", "mine", "x"]):
        assert warm.run([sys.executable, *words], cwd=tmp_path).returncode == 7


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_it_as_they_end_any_other(signum: signal.Signals) -> None:
    code = "import time; print('up', flush=True); time.sleep(100)"
    with warm.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        os.kill(process.pid, signum)
        assert process.wait(60) == -signum
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_whoever_stands_for_a_command_takes_it_along() -> None:
    """A run that others start by `sys.executable` is such a one."""
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with subprocess.Popen(warm.command("-c", code), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.kill()
    end = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_has_the_terminal_of_who_stands_for_it() -> None:
    code = (
        "import sys\n"
        "try:\n    input('> ')\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
        "sys.exit(len(input('again> ')))"
    )
    python, *words = warm.command("-c", code)
    child = pexpect.spawn(python, words, encoding="utf-8", timeout=60)
    child.expect_exact("> ")
    for _ in range(20):  # Python misses one between the prompt and its waiting for a key
        child.sendintr()
        if child.expect_exact(["interrupted", pexpect.TIMEOUT], timeout=5) == 0:
            break
    child.expect_exact("again> ")
    child.sendline("four")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 4
