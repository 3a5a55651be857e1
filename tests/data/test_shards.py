"""Token arrays read across shard borders, and a prepared folder that is checked before use."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.data.prepare import prepare
from gpt.data.shards import PreparedData, ShardWriter, TokenArray, dtype_for
from gpt.errors import DataError
from gpt.tokenizer import Tokenizer


def write(folder: Path, ids: list[int], *, limit: int, n_vocab: int = 257) -> TokenArray:
    writer = ShardWriter(folder, "train", n_vocab, limit)
    for start in range(0, len(ids), 5):
        writer.append(ids[start : start + 5])
    writer.close()
    assert writer.tokens == len(ids)
    assert writer.max_id == max(ids)
    shards = writer.shards
    return TokenArray(
        [folder / s["file"] for s in shards], [s["tokens"] for s in shards], writer.dtype
    )


@pytest.mark.parametrize("limit", [1, 3, 5, 7, 22, 23, 24])
def test_slices_cross_shard_borders(tmp_path: Path, limit: int) -> None:
    ids = list(range(100, 123))
    array = write(tmp_path, ids, limit=limit)
    assert len(array) == len(ids)
    assert len(list(tmp_path.iterdir())) == -(-len(ids) // limit)
    for start in range(-1, len(ids) + 1):
        for stop in range(-1, len(ids) + 2):
            part = array[start:stop]
            assert part.dtype == np.int64
            assert part.tolist() == ids[start:stop]
    assert [array[i] for i in range(-len(ids), len(ids))] == ids + ids
    for index in (len(ids), -len(ids) - 1):
        with pytest.raises(IndexError):
            array[index]
    with pytest.raises(ValueError, match="step of 2"):
        array[::2]


@settings(deadline=None)
@given(limit=st.integers(1, 9), ids=st.lists(st.integers(0, 70_000), min_size=1, max_size=30))
def test_large_ids_survive(
    tmp_path_factory: pytest.TempPathFactory, limit: int, ids: list[int]
) -> None:
    array = write(tmp_path_factory.mktemp("shards"), ids, limit=limit, n_vocab=70_001)
    assert array.dtype == np.dtype("<u4")
    assert array[:].tolist() == ids


def test_the_smallest_type_that_holds_all_ids_is_stored(tmp_path: Path) -> None:
    assert (dtype_for(65_536), dtype_for(65_537)) == ("<u2", "<u4")
    array = write(tmp_path, [65_535, 0], limit=9, n_vocab=65_536)
    assert array[:].tolist() == [65_535, 0]
    assert (tmp_path / "train-00000.bin").read_bytes() == b"\xff\xff\0\0"


@pytest.mark.parametrize("bad", [-1, 257, 1 << 20])
def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path, bad: int) -> None:
    writer = ShardWriter(tmp_path, "train", 257, 10)
    with pytest.raises(DataError, match=f"id {bad}, outside its own vocabulary of 257"):
        writer.append([1, bad])


def test_a_copy_can_be_changed_and_a_pickle_opens_its_own_maps(tmp_path: Path) -> None:
    array = write(tmp_path, list(range(50)), limit=20)
    array[:][0] = 9
    assert array[0] == 0
    packed = pickle.dumps(array)
    assert len(packed) < 2000
    assert pickle.loads(packed)[:].tolist() == list(range(50))


# The prepared folder


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("some text of the corpus, " * 20)
    data = prepare(
        str(tmp_path / "text.txt"),
        tokenizer="bytes", root=tmp_path / "data", progress=False, shard_tokens=200,
    )  # fmt: skip
    return data.folder


def test_an_open_folder_has_all_its_facts(prepared: Path) -> None:
    data = PreparedData.open(prepared)
    assert (data.train_bytes, data.val_bytes, data.val_chars) == (450, 50, 50)
    assert (len(data.train), len(data.val)) == (451, 51)
    assert data.tokenizer.fingerprint == Tokenizer.bytes().fingerprint
    assert data.max_id == data.tokenizer.eot == 256
    assert data.meta["splits"]["train"]["shards"] == [
        {"file": "train-00000.bin", "tokens": 200},
        {"file": "train-00001.bin", "tokens": 200},
        {"file": "train-00002.bin", "tokens": 51},
    ]


def edit_meta(change: Callable[[dict], object]) -> Callable[[Path], None]:  # type: ignore[type-arg]
    def damage(folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_bytes())
        change(meta)
        (folder / "meta.json").write_text(json.dumps(meta))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no meta": (lambda f: (f / "meta.json").unlink(), "holds no prepared data"),
    "half a meta": (lambda f: (f / "meta.json").write_text('{"format"'), "is not JSON"),
    "another meta": (lambda f: (f / "meta.json").write_text("[]"), "all of it is no object"),
    "a field gone": (
        edit_meta(lambda m: m["splits"]["val"].pop("bytes")),
        "the field splits.val.bytes is missing",
    ),
    "a wrong count": (
        edit_meta(lambda m: m["splits"]["train"].update(chars=449)),
        "the chars of all spans are not splits.train.chars",
    ),
    "another type": (
        edit_meta(lambda m: m.update(dtype="<u4")),
        "dtype is '<u4', but ids below 257",
    ),
    "an id too large": (
        edit_meta(lambda m: m["splits"]["train"].update(max_id=257)),
        "max_id is 257, but the vocabulary has 257 ids",
    ),
    "a shard elsewhere": (
        edit_meta(lambda m: m["splits"]["val"]["shards"][0].update(file="../p/val-00000.bin")),
        "not the name of a file",
    ),
    "a later format": (edit_meta(lambda m: m.update(format=99)), "of format 99, but this version"),
    "a shard gone": (lambda f: (f / "train-00001.bin").unlink(), "train-00001.bin cannot be read"),
    "a shard cut": (
        lambda f: (f / "val-00000.bin").write_bytes(b"ab"),
        "has 2 bytes instead of 102",
    ),
    "tokenizer gone": (lambda f: (f / "tokenizer.json").unlink(), "cannot read the tokenizer"),
    "tokenizer cut": (lambda f: (f / "tokenizer.json").write_text("{"), "is damaged"),
    "another tokenizer": (
        lambda f: Tokenizer.chars("ab").save(f / "tokenizer.json"),
        "is not the one",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_an_error_and_preparing_mends_it(prepared: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(prepared)
    with pytest.raises(DataError, match=message) as caught:
        PreparedData.open(prepared)
    assert "\n" not in str(caught.value)
    source = str(prepared.parent.parent / "text.txt")
    mended = prepare(source, tokenizer="bytes", root=prepared.parent, progress=False)
    assert mended.folder == prepared
    assert len(mended.train) == 451


def places(value: object, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Of all fields in a description, whatever they are nested in."""
    inside: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        inside = [*value.items()]
    elif isinstance(value, list):
        inside = [*enumerate(value)]
    return [(*at, key) for key, _ in inside] + [
        place for key, one in inside for place in places(one, (*at, key))
    ]


def test_no_field_of_a_description_is_trusted(prepared: Path, capsys: object) -> None:
    """Whichever is gone, null or of another type: it is damaged, or nobody needs it."""
    from gpt.data.inspection import print_summary, summary

    whole = (prepared / "meta.json").read_text()
    refused = set()
    for *holders, name in places(json.loads(whole)):
        for wrong in ("gone", None, "text", -2, 0.5, True, [], {}, [None], 10**30):
            meta = json.loads(whole)
            holder = meta
            for key in holders:
                holder = holder[key]
            if wrong == "gone":
                del holder[name]
            elif holder[name] == wrong and type(holder[name]) is type(wrong):
                continue
            else:
                holder[name] = wrong
            (prepared / "meta.json").write_text(json.dumps(meta))
            try:
                data = PreparedData.open(prepared)
            except DataError as error:
                assert "\n" not in str(error)  # noqa: PT017
                refused.add((*holders, name))
            else:
                json.dumps(summary(data))
                print_summary(data)
    for split in ("train", "val"):
        for count in ("tokens", "documents", "bytes", "chars", "max_id", "shards"):
            assert ("splits", split, count) in refused
    assert {("left_out",), ("empty_documents",), ("spans",), ("dtype",)} <= refused
