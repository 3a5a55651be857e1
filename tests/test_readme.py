"""Every command and every piece of code in the README runs, in the README's order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documented import ROOT, blocks, complaints, run_pages

README = ROOT / "README.md"
# The demo and the tests themselves; tests/integration/test_demo.py runs the former, shortened.
ELSEWHERE = {"make demo", "make test"}


def test_every_block_says_what_it_is() -> None:
    assert complaints(README) == []


def test_the_two_commands_of_the_first_page_are_there() -> None:
    commands = [command for block in blocks(README) for command in block.commands]
    assert set(commands) >= ELSEWHERE


@pytest.mark.integration
def test_every_command_runs(tmp_path: Path) -> None:
    assert run_pages([README], tmp_path, ELSEWHERE) >= 5
