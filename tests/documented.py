"""Runs the commands and programs that a page of documentation shows, in its order.

A `console` block holds commands after `$ ` and what they print; a `python` block is a program. They
run as they stand, in a scratch folder, with five changes: Python has imported torch already
(`tests.warm`), training stops after a few steps and samples little, text comes from a small file
unless the command names its own, the server's port is a free one, and `antiphon doctor` only looks.
A block with a title is a file of that name, which later commands find. A command that is added to a
page is thereby tested; a block of another kind is told of.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import warm

ROOT = Path(__file__).resolve().parents[1]
RUN = {"console", "python"}
SHOWN = {"text", "yaml", "json", "proto"}
PORT = "50051"
STEPS, RESUMED_STEPS = 10, 15

SHORTENED = """\
#!/bin/sh
# `{name}`, with what takes long made short.
case "$1" in
{train})
    steps={steps}
    source="--data.source {corpus}"
    samples=
    case "$2" in fit) samples="--samples.max_tokens 8" ;; esac
    case "$*" in *--ckpt_path*|*--resume*) steps={resumed_steps} ;; esac
    case "$*" in *--data.source*|*/config.yaml*) source= ;; esac
    exec {real} "$@" $source $samples --trainer.max_steps $steps --trainer.val_check_interval 5 \\
        --data.vocab_size 320 --data.batch_size 4 --model.config.block_size 64
    ;;
doctor)
    exec {real} "$@" --fast
    ;;
esac
exec {real} "$@"
"""

HIDDEN = re.compile(r"^\s*(\$ |antiphon |make |python |pip )", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        kind: the word after the fence.
        title: the name of the file that it is, or empty.
        where: page and line.
    """

    kind: str
    title: str
    where: str
    text: str

    @property
    def commands(self) -> list[str]:
        joined = self.text.replace("\\\n", " ")
        return [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fence = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?[^\n]*\n(.*?)^```$", re.M | re.S)
    name = page.relative_to(ROOT)
    return [
        Block(
            match[1],
            match[2] or "",
            f"{name}:{text.count(chr(10), 0, match.start()) + 1}",
            match[3],
        )
        for match in fence.finditer(text)
    ]


def complaints(page: Path) -> list[str]:
    """What is wrong with the blocks of a page: of no known kind, or with commands out of reach."""
    found = []
    for block in blocks(page):
        if block.kind not in RUN | SHOWN:
            found.append(f"{block.where}: a block of the unknown kind {block.kind!r}")
        if block.kind == "console" and not block.commands:
            found.append(f"{block.where}: a console block without a command")
        if block.kind in SHOWN and not block.title and HIDDEN.search(block.text):
            found.append(f"{block.where}: a command hides in a {block.kind} block")
    return found


def free_port() -> int:
    """One that is still free some minutes later: outside the range from which systems give out
    those of outgoing connections and of tests that ask for any."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def furnish(folder: Path) -> None:
    """A place as a reader has it: some notes of their own, and `antiphon` on the path."""
    corpus = folder / "corpus.txt"
    lines = [
        f"ROMEO: the night is {word} and long, and I am here.\n" for word in ("dark", "cold", "old")
    ]
    corpus.write_text("".join(lines) * 80, encoding="utf-8")
    (folder / "notes").mkdir()
    for name in ("monday", "tuesday"):
        (folder / "notes" / f"{name}.txt").write_text("Dear diary, it rained.\n" * 120)
    for name in ("train.py", "configs"):  # what a checkout has at its top
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    python = shlex.join(warm.command())
    for name, train, real in [
        ("antiphon", "train", f"{python} -m gpt"),
        ("python", "train.py", python),
    ]:
        script = folder / "bin" / name
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


def run_pages(pages: Iterable[Path], folder: Path, elsewhere: set[str]) -> int:
    """Do what the pages say, one after another; servers run until the end.

    Args:
        elsewhere: commands that are left out, because other tests run them.

    Returns:
        How many commands and programs ran.
    """
    furnish(folder)
    path = [folder / "bin", Path(sys.executable).parent, os.environ["PATH"]]
    env = {
        **os.environ,
        "PATH": os.pathsep.join(map(str, path)),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
    }
    port = str(free_port())
    ran = 0
    with ExitStack() as servers:
        for block in (each for page in pages for each in blocks(page)):
            text = block.text.replace(PORT, port)
            if block.title:
                (folder / block.title).write_text(text, encoding="utf-8")
                if block.kind != "python":
                    continue
            steps = [text]
            if block.kind == "console":
                steps = Block(block.kind, "", block.where, text).commands
            elif block.kind != "python":
                continue
            for step in steps:
                if step in elsewhere:
                    continue
                ran += 1
                if step.startswith("antiphon serve "):
                    servers.enter_context(_served(step, folder, env))
                else:
                    _run(step, block, folder, env)
    return ran


def _run(step: str, block: Block, folder: Path, env: dict[str, str]) -> None:
    words = ["bash", "-o", "pipefail", "-c", step]
    if block.kind == "python":
        words = warm.command("-c", step)
    done = subprocess.run(
        words,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    where = f"{block.where}: {step}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, where
    assert (done.stdout + done.stderr).strip() or " > " in step, where


@contextmanager
def _served(command: str, cwd: Path, env: dict[str, str]) -> Iterator[None]:
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
