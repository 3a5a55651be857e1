"""Where a model lies, and how it is told that something else lies there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpt.checkpoint import CHAT_TEMPLATE_FILE, CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE
from gpt.training.run import RunFolder
from serve.folders import BEST, FILES, Found, ModelSource


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Looks like a model folder."""
    for name in FILES[:3]:
        (tmp_path / name).write_text(name)
    return tmp_path


def test_the_files_are_those_that_others_write() -> None:
    assert FILES == (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, CHAT_TEMPLATE_FILE)
    run = RunFolder(Path("runs"), "a")
    assert run.best == run.path / BEST


def test_what_is_given_is_a_folder_or_a_name_and_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ModelSource.parse("runs/a") == ModelSource(Path("runs/a"))
    assert ModelSource.parse("a=runs/b=c") == ModelSource(Path("runs/b=c"), "a")
    assert ModelSource.parse("runs/lr=3") == ModelSource(Path("runs/lr=3"))
    assert ModelSource.parse("=a") == ModelSource(Path("=a"))
    there = tmp_path / "lr=3"
    there.mkdir()
    monkeypatch.chdir(tmp_path)
    assert ModelSource.parse("lr=3") == ModelSource(Path("lr=3"))
    for text in ("runs/a", "a=runs/b"):
        assert str(ModelSource.parse(text)) == text


def test_a_run_that_is_followed_is_its_best_checkpoint_once_there_is_one(tmp_path: Path) -> None:
    plain, watched = ModelSource(tmp_path), ModelSource(tmp_path, watched=True)
    assert not watched.expected, "no run"
    (tmp_path / BEST).parent.mkdir()
    assert watched.expected
    assert not plain.expected
    (tmp_path / BEST).touch()
    assert not watched.expected
    assert (plain.place, watched.place) == (tmp_path, tmp_path / BEST)
    (tmp_path / "config.json").touch()
    assert watched.place == tmp_path, "a model folder"


def test_any_change_of_the_files_is_seen_and_what_is_alike_has_one_version(folder: Path) -> None:
    source = ModelSource(folder)
    before = Found.at(source)
    assert before.marks
    assert Found.at(source) == before
    version = before.version()
    assert len(version) == 16
    weights = folder / FILES[1]
    stat = weights.stat()
    weights.write_text(weights.read_text()[::-1])  # as long, in place, with the times of before
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = Found.at(source)
    assert changed != before
    assert changed.version() != version
    weights.write_text(weights.read_text()[::-1])
    assert Found.at(source).version() == version
    (folder / FILES[3]).write_text("{{ messages }}")
    assert Found.at(source).version() != version


def test_a_model_in_a_run_is_the_same_as_a_copy_of_it(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    for name in FILES[:3]:
        (run / "model" / name).write_text(name)
    assert Found.at(ModelSource(run)).version() == Found.at(ModelSource(folder)).version()


def test_where_nothing_is_there_is_nothing(tmp_path: Path) -> None:
    found = Found.at(ModelSource(tmp_path / "none", watched=True))
    assert (found.marks, found.version()) == ((), "")
