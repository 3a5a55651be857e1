"""TextDataModule: what is asked for reaches the preparing, and weights reach the batches."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from gpt.data.sources import Source
from gpt.errors import ConfigError, DataError
from gpt.training.data import TextDataModule
from gpt.training.parser import Parser


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    words = random.Random(1)
    lines = [{"body": "ab" * words.randint(1, 9), "text": "x"} for _ in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "more.txt").write_text("cd\r\n" * 300)
    return tmp_path


def ready(folder: Path, source: object, **options: object) -> TextDataModule:
    settings = {"tokenizer": "bytes", "workers": 1, "block_size": 8, **options}
    data = TextDataModule(source, root=str(folder / "data"), **settings)  # type: ignore[arg-type]
    data.prepare_data()
    data.setup("fit")
    return data


def test_settings_reach_the_text(rows: Path) -> None:
    data = ready(
        rows, [str(rows / "rows.jsonl"), str(rows / "more.txt")],
        field="body", newlines="lf", special_tokens=["bab"],
    )  # fmt: skip
    text = data.tokenizer.decode(data.prepared.train[:].tolist())
    assert set(text) == set("abcd\n")
    assert data.tokenizer.special["bab"] in data.prepared.train[:]
    assert data.source_name == f"{rows}/rows.jsonl, {rows}/more.txt"


def test_a_source_keeps_a_field_of_its_own(rows: Path) -> None:
    data = ready(rows, Source(str(rows / "rows.jsonl"), field="body"), field="title")
    assert set(data.tokenizer.decode(data.prepared.train[:].tolist())) == set("ab")


def test_weights_reach_the_batches_and_not_the_evaluation(rows: Path) -> None:
    sources = [
        Source(str(rows / "rows.jsonl"), field="body", weight=0),
        Source(str(rows / "more.txt")),
    ]
    data = ready(rows, sources)
    for ids, _, _ in itertools.islice(data.train_dataloader(), 5):
        assert set(data.tokenizer.decode(ids.flatten().tolist())) == set("cd\r\n")
    val = [
        t for _, targets, _ in data.val_dataloader() for t in targets.flatten().tolist() if t >= 0
    ]
    assert val == data.prepared.val[:].tolist()
    assert set(data.tokenizer.decode(val)) == set("abcd\r\n")
    assert "more.txt (weight 1)" in data.source_name


def test_other_weights_find_the_same_folder(rows: Path) -> None:
    folders = set()
    for weight in (1, 2.5):
        data = ready(
            rows, [Source(str(rows / "more.txt"), weight=weight), str(rows / "rows.jsonl")]
        )
        assert [span.weight for span in data.prepared.sources] == [weight, 1]
        folders.add(data.prepared.folder)
    assert len(folders) == 1


def test_a_text_shorter_than_a_block_says_what_there_is_and_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abcd!")  # 4 characters and end-of-text train
    data = ready(tmp_path, str(tmp_path / "t.txt"))
    with pytest.raises(DataError, match=r"has 5 tokens, but one block needs 8; .*block_size"):
        data.train_dataloader()


def test_bad_settings_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the weight of x is -1"):
        TextDataModule(Source("x", weight=-1))


def test_sources_in_a_config_are_texts_or_mappings() -> None:
    parser = Parser()
    parser.add_lightning_class_args(TextDataModule, "data")
    for text in (
        "[a.txt, {source: b.jsonl, field: body, weight: 2}]",
        "{source: b.jsonl}",
        "c.txt",
    ):
        found = parser.parse_args([f"--data.source={text}"])
        data = parser.instantiate_classes(found).data
        if text.startswith("["):
            assert data.sources == [Source("a.txt"), Source("b.jsonl", "body", 2)]
        else:
            assert [one.source for one in data.sources] == [text.strip("{}").split()[-1]]
