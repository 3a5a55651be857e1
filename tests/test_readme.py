"""Every command and every piece of code in the README runs, in the README's order.

A `console` block holds commands after `$ ` and what they print; a `python` block is a program. They
run as they stand, in a scratch folder, with three changes: training stops after a few steps, text
comes from a small file unless the command names its own, and the server's port is a free one.
A command that is added to the README is thereby tested; one in a block of another kind fails here.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RUN = {"console", "python"}
SHOWN = {"text", "yaml"}
# The demo and the tests themselves; tests/integration/test_demo.py runs the former, shortened.
ELSEWHERE = {"make demo", "make test"}
PORT = "50051"
STEPS, RESUMED_STEPS = 20, 30

SHORTENED = """\
#!/bin/sh
# `{name}`, with training made short.
case "$1" in
{train})
    steps={steps}
    source="--data.source {corpus}"
    case "$*" in *--ckpt_path*) steps={resumed_steps} ;; esac
    case "$*" in *--data.source*) source= ;; esac
    exec {real} "$@" $source --trainer.max_steps $steps --trainer.val_check_interval 10 \\
        --data.vocab_size 320 --data.batch_size 4 --model.config.block_size 64
    ;;
esac
exec {real} "$@"
"""


@dataclass(frozen=True)
class Block:
    kind: str
    line: int
    text: str

    @property
    def commands(self) -> list[str]:
        joined = self.text.replace("\\\n", " ")
        return [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]


def blocks() -> list[Block]:
    text = README.read_text(encoding="utf-8")
    return [
        Block(match[1], text.count("\n", 0, match.start()) + 1, match[2])
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A place as a reader has it: some notes of their own, and `antiphon` on the path."""
    corpus = tmp_path / "corpus.txt"
    lines = [
        f"ROMEO: the night is {word} and long, and I am here.\n" for word in ("dark", "cold", "old")
    ]
    corpus.write_text("".join(lines) * 80, encoding="utf-8")
    (tmp_path / "notes").mkdir()
    for name in ("monday", "tuesday"):
        (tmp_path / "notes" / f"{name}.txt").write_text("Dear diary, it rained.\n" * 120)
    for name in ("train.py", "configs"):  # what a checkout has at its top
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    for name, train, real in [
        ("antiphon", "train", f"{sys.executable} -m gpt"),
        ("python", "train.py", sys.executable),
    ]:
        script = tmp_path / "bin" / name
        script.write_text(
            SHORTENED.format(
                name=name,
                train=train,
                real=real,
                corpus=corpus,
                steps=STEPS,
                resumed_steps=RESUMED_STEPS,
            )
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return tmp_path


@contextmanager
def served(command: str, cwd: Path, env: dict[str, str]) -> Iterator[None]:
    """Run a server, from its ready line to a clean end."""
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving "), line
            yield
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_every_block_says_what_it_is() -> None:
    found = blocks()
    assert {block.kind for block in found} <= RUN | SHOWN
    assert all(block.commands for block in found if block.kind == "console")
    for block in found:
        if block.kind in SHOWN:
            hidden = re.search(r"^\s*(\$ |antiphon |make |python |pip )", block.text, re.MULTILINE)
            assert hidden is None, f"README.md:{block.line} hides a command in a {block.kind} block"


def test_the_two_commands_of_the_first_page_are_there() -> None:
    commands = [command for block in blocks() for command in block.commands]
    assert set(commands) >= ELSEWHERE


@pytest.mark.integration
def test_every_command_runs(folder: Path) -> None:
    env = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}"
        + os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
    }
    port = str(free_port())
    ran = 0
    with ExitStack() as servers:
        for block in blocks():
            text = block.text.replace(PORT, port)
            steps: list[tuple[str, list[str]]] = []
            if block.kind == "python":
                steps = [(text, [sys.executable, "-c", text])]
            elif block.kind == "console":
                commands = Block(block.kind, block.line, text).commands
                steps = [(c, ["bash", "-c", c]) for c in commands if c not in ELSEWHERE]
            for shown, argv in steps:
                ran += 1
                if shown.startswith("antiphon serve "):
                    servers.enter_context(served(shown, folder, env))
                    continue
                done = subprocess.run(
                    argv,
                    cwd=folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                where = f"README.md:{block.line}: {shown}\n{done.stdout}{done.stderr}"
                assert done.returncode == 0, where
                assert done.stdout.strip(), where
    assert ran >= 5
