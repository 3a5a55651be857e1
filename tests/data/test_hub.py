"""Hugging Face datasets through the real library: a folder of rows, and no network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PREPARE = """
import json, pathlib, sys
from gpt.data.prepare import prepare
from gpt.data.sources import Source
from gpt.errors import UserError

answers = []
for source, field, split, before in json.loads(sys.argv[1]):
    if before:
        pathlib.Path(before).write_text('{"body": "' + "changed" * 9 + '"}')
    try:
        data = prepare(
            Source(source, field=field, split=split),
            tokenizer="bytes", root=sys.argv[2], progress=False,
        )
    except UserError as error:
        answers.append({"error": str(error)})
    else:
        text = data.tokenizer.decode(data.train[:].tolist())
        answers.append({"text": text, "meta": data.meta, "folder": data.folder.name})
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "rows"
    folder.mkdir()
    for split, word in (("train", "learn"), ("test", "check")):
        rows = [{"id": i, "body": f"{word} {i} 文"} for i in range(30)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def prepared(root: Path, cases: list[tuple[str, str, str, str]], **env: str) -> list[Any]:
    """What prepare() gives for each (source, field, split, file to change before), in a process of
    its own: the library reads its settings when it is imported, and takes its time about it."""
    home = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "home")}
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, json.dumps(cases), str(root / "data")],
        env={**os.environ, **home, **env},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers


CASES = {
    "first": ("hf:{}", "body", "train", ""),
    "again": ("hf:{}", "body", "train", ""),
    "split": ("hf:{}", "body", "test", ""),
    "no field": ("hf:{}", "text", "train", ""),
    "no text": ("hf:{}", "id", "train", ""),
    "no split": ("hf:{}", "body", "dev", ""),
    "no config": ("hf:{}:other", "body", "train", ""),
    "no network": ("hf:no/such", "body", "train", ""),
    "changed": ("hf:{}", "body", "train", "{}/train.jsonl"),
}


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    cases = [(s.format(folder), f, split, c.format(folder)) for s, f, split, c in CASES.values()]
    return dict(zip(CASES, prepared(folder.parent, cases), strict=True))


def test_a_dataset_is_streamed_row_by_row(answers: dict[str, Any]) -> None:
    assert answers["first"]["text"] == "".join(
        f"learn {i} 文" for i in range(30) if i not in (5, 15, 25)
    )
    assert "check 0" in answers["split"]["text"]


def test_a_dataset_is_known_by_its_revision(answers: dict[str, Any], folder: Path) -> None:
    source = dict(answers["first"]["meta"]["sources"][0])
    revision = source.pop("revision")
    assert source == {"dataset": str(folder), "split": "train", "field": "body"}
    assert len(revision) >= 16
    assert answers["again"] == answers["first"]
    folders = {answers[name]["folder"] for name in ("first", "split", "changed")}
    assert len(folders) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no field", "has no field 'text'; it has 'id', 'body'"),
        ("no text", "the field 'id' is of type int64, not text"),
        ("no split", "cannot read hf:.*, split dev: .*dev"),
        ("no config", "cannot be used: .*other"),
        ("no network", r"hf:no/such cannot be looked up: .*where there is a network.*FOLDER"),
    ],
)
def test_what_cannot_be_had_is_an_error_of_one_line(
    answers: dict[str, Any], name: str, message: str
) -> None:
    assert re.search(message, answers[name]["error"])
    assert "\n" not in answers[name]["error"]


def test_without_the_library_the_error_says_how_to_install_it(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "datasets.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(Path.cwd())])
    [answer] = prepared(tmp_path, [CASES["first"]], PYTHONPATH=path)
    assert "pip install 'antiphon[datasets]'" in answer["error"]
    assert list((tmp_path).glob("data/*")) == []
