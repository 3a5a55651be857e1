"""The output of a batch: whole lines, one run, one writer."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from gpt.errors import DataError
from gpt.journal import Done, Journal, dumps, output_file

RUN: dict[str, Any] = {"input": "abc", "temperature": 1.0, "seed": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "out.jsonl"


def write(path: Path, *records: dict[str, Any], identity: dict[str, Any] = RUN) -> None:
    with Journal(path, identity, 5) as journal:
        for record in records:
            journal.add(dumps(record))


def test_a_later_run_sees_what_is_there_and_takes_its_seed(path: Path) -> None:
    write(path, {"index": 0}, {"error": "no", "index": 1}, {"index": 2, "text": "文"})
    with Journal(path, RUN, 99) as journal:
        assert journal.done == Done(2, 1, {"index": 2, "text": "文"}, path.stat().st_size)
        assert journal.identity["seed"] == 5
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3


@pytest.mark.parametrize("torn", [b"{", b'{"index": 2, "te', b'{"index": 2}'])
def test_a_torn_line_is_dropped(path: Path, torn: bytes) -> None:
    write(path, {"index": 0}, {"index": 1})
    with open(path, "ab") as file:
        file.write(torn)
    write(path, {"index": 2})
    assert [json.loads(line)["index"] for line in path.read_bytes().splitlines()] == [0, 1, 2]


def test_another_run_is_refused_and_told_what_differs(path: Path) -> None:
    write(path, {"index": 0})
    before = path.read_bytes()
    for change, message in [
        ({"temperature": 0.5}, r"temperature \(1.0, now 0.5\)"),
        ({"input": "xyz"}, "another input"),
        ({"seed": 6}, r"seed \(5, now 6\)"),
    ]:
        with pytest.raises(DataError, match=f"{message}.*--overwrite"):
            write(path, identity=RUN | change)
    assert path.read_bytes() == before
    write(path, identity=RUN | {"seed": 5})


def test_overwriting_begins_again(path: Path) -> None:
    write(path, {"index": 0})
    with Journal(path, RUN | {"temperature": 0.5}, 6, overwrite=True) as journal:
        assert journal.done == Done()
        assert journal.identity["seed"] == 6
    assert path.read_bytes() == b""
    write(path, {"index": 0}, identity=RUN | {"temperature": 0.5})


def test_an_output_without_results_binds_nobody(path: Path) -> None:
    write(path)
    write(path, identity=RUN | {"temperature": 0.5})


@pytest.mark.parametrize("content", [b"precious\n", b'{"a": 1}\n'])
def test_what_others_wrote_is_left_alone(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(DataError, match="did not write"):
        write(path)
    assert path.read_bytes() == content


def test_two_runs_do_not_write_the_same_output(path: Path) -> None:
    with Journal(path, RUN, 5), pytest.raises(DataError, match="another run is writing"):
        Journal(path, RUN, 5)
    write(path)


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    for place in (tmp_path, Path("/dev/null"), tmp_path / "a\0b"):
        with pytest.raises(DataError, match=r"cannot write|is no file"):
            Journal(place, RUN, 5)


def test_a_full_disk_says_how_to_go_on(path: Path) -> None:
    with Journal(path, RUN, 5) as journal:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, journal._descriptor)
        os.close(full)
        with pytest.raises(DataError, match=r"No space left.*same command"):
            journal.add(b"{}\n")


def test_halves_of_surrogate_pairs_are_escaped() -> None:
    assert json.loads(dumps({"id": "\ud800", "text": "文"})) == {"id": "\ud800", "text": "文"}
    assert "文".encode() in dumps({"text": "文"})


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("text", ["文", "\ud800"])
def test_what_is_no_json_is_not_written(number: float, text: str) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps({"text": text, "id": [number]})


@pytest.mark.parametrize("name", ["", ".", "..", "./", "/", "new/", "folder", "folder/"])
def test_a_folder_is_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises(DataError, match=r"is a folder; give a file in it|is empty; give a file"):
        output_file(name)
    assert os.listdir() == ["folder"]
    if name != "new/":  # which a path does not tell from a file
        with pytest.raises(DataError, match="Is a directory"):
            Journal(Path(name), RUN, 5)
    assert output_file("new/out") == Path("new/out")
