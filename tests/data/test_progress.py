"""Progress of long work: a bar on a terminal, lines with rate and time left elsewhere."""

from __future__ import annotations

import sys

import pytest

from gpt.data import progress
from gpt.data.progress import Progress


def test_a_log_gets_a_line_now_and_then_with_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress("reading", 60_000_000) as bar:
        for _ in range(1000):
            now += 0.025
            bar.update(30_000)
    assert capsys.readouterr().err.splitlines() == [
        "reading 60.0 MB",
        "reading 12.0 MB of 60.0 MB, 1.2 MB/s, 00:40 left",
        "reading 24.0 MB of 60.0 MB, 1.2 MB/s, 00:30 left",
    ]
    assert bar.done == 30_000_000


def test_what_has_no_known_end_has_a_rate_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("reading", None) as bar:
        bar.update(5_000)
        assert bar.line(2) == "reading 5.0 kB, 2.5 kB/s"
    assert capsys.readouterr().err == "reading\n"


def test_a_terminal_gets_a_bar_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("reading", 1000) as bar:
        bar.update(500)
    err = capsys.readouterr().err
    assert "reading" in err
    assert "B/s" in err
    assert err.endswith("\r")


def test_nothing_is_said_when_nobody_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("reading", 1000, show=False) as bar:
        bar.update(500)
    assert capsys.readouterr().err == ""
