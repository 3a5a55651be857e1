"""`antiphon bench decode` and `prefill`: real processes on a model of a few thousand weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpt.bench.command import main
from gpt.errors import ConfigError

SMALL = ["--preset", "nano", "--prompt", "8", "--tokens", "4", "--rounds", "1", "--threads", "1"]


@pytest.mark.integration
def test_the_engine_is_measured_beside_who_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    peers = ["--peers", "llama.cpp", "--peer-python", "llama.cpp=/nowhere/python"]
    plot = ["--plot", str(tmp_path / "found.png")]
    options = ["--batch", "1,3", "--dtypes", "float32", "--json", str(found)]
    assert main(["decode", *SMALL, *options, *peers, *plot]) == 0
    shown = capsys.readouterr().out
    assert "left out: llama.cpp" in shown
    rows = json.loads(found.read_text())["results"]
    assert [(row["subject"], row["batch"], row["same"]) for row in rows] == [
        ("antiphon", 1, 1),
        ("antiphon", 3, 3),
    ]
    assert all(
        len(row[name]) == 1 and row[name][0] > 0
        for row in rows
        for name in ("decode", "prefill", "share")
    )
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peers", "vllama"], "unknown peer 'vllama'"),
        (["--peer-python", "llama.cpp"], "NAME=PYTHON"),
        (["--prompt", "128"], "do not fit into the context of 128"),
        (["--tokens", "1"], "at least 2"),
    ],
)
def test_mistakes_are_told_before_any_work(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["decode", *SMALL, *options])
