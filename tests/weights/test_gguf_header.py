"""Files that lie: refused by name, at once, and without believing a number in them."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt.errors import CheckpointError, UserError
from gpt.weights.gguf_header import MAX_ELEMENTS, read_header
from gpt.weights.gguf_model import open_gguf
from tests.weights.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    LLAMA,
    STRING,
    U8,
    U32,
    U64,
    info,
    llama_tensors,
    raw,
    setting,
    text,
    write,
)

MANY = 1 << 60


def number(key: str, value: int) -> bytes:
    return setting(key, U32, struct.pack("<I", value))


def array(key: str, kind: int, length: int, data: bytes = b"") -> bytes:
    return setting(key, ARRAY, struct.pack("<IQ", kind, length) + data)


HOSTILE = {
    "empty": (b"", "does not begin with GGUF"),
    "magic": (raw(magic=b"GGML"), "does not begin with GGUF"),
    "version 1": (raw(version=1), "version 1, but"),
    "version 4": (raw(version=4), "version 4, but"),
    "big-endian": (raw(version=3 << 24), "big-endian"),
    "only magic": (b"GGUF", "ends within its header"),
    "tensors": (raw(n_tensors=MANY), f"claims {MANY} tensors"),
    "more tensors than entries": (raw(n_tensors=3), "claims 3 tensors"),
    "settings": (raw(n_settings=MANY), f"claims {MANY} settings"),
    "key": (raw([struct.pack("<Q", MANY) + bytes(9)]), f"claims {MANY} bytes"),
    "text": (raw([setting("a", STRING, struct.pack("<Q", MANY))]), f"{MANY} bytes in a,"),
    "array": (raw([array("a", U8, MANY)]), f"{MANY} elements of a,"),
    "array of texts": (raw([array("a", STRING, 5, text("b"))]), "claims 5 elements of a,"),
    "array of arrays": (raw([array("a", ARRAY, 1, bytes(12))]), "an array of type 9"),
    "kind of setting": (raw([setting("a", 77, b"")]), "is of type 77"),
    "neither true nor false": (raw([setting("a", BOOL, b"\2")]), "neither true nor false"),
    "not UTF-8": (raw([setting("a", STRING, text(b"\xff"))]), "a is not UTF-8"),
    "twice": (raw([number("a", 1), number("a", 2)]), "'a' stands there twice"),
    "alignment 0": (raw([number("general.alignment", 0)]), "no power of two"),
    "alignment 48": (raw([number("general.alignment", 48)]), "no power of two"),
    "alignment text": (
        raw([setting("general.alignment", STRING, text("32"))]),
        "no power of two",
    ),
    "no dimensions": (raw([], [info("w", [])]), "has 0 dimensions"),
    "dimensions": (
        raw([], [text("w") + struct.pack("<I", 1 << 31) + bytes(64)]),
        f"has {1 << 31} dimensions",
    ),
    "size 0": (raw([], [info("w", [4, 0])], bytes(64)), "claims a shape of (0, 4)"),
    "sizes": (raw([], [info("w", [1 << 40, 1 << 40])], bytes(64)), "does not fit a file"),
    "sizes that wrap to 0": (raw([], [info("w", [1 << 32, 1 << 32])]), "does not fit a file"),
    "offset": (raw([], [info("w", [4], offset=MANY)], bytes(64)), "does not fit a file"),
    "beyond the end": (
        raw([], [info("w", [16], offset=32)], bytes(64)),
        "it may be cut short",
    ),
    "unaligned": (raw([], [info("w", [1], offset=4)], bytes(64)), "not aligned"),
    "overlap": (
        raw([], [info("v", [12]), info("w", [4], offset=32)], bytes(64)),
        "'v' and 'w' overlap",
    ),
    "same name": (raw([], [info("w", [4]), info("w", [4], offset=32)], bytes(64)), "twice"),
    "no kind": (raw([], [info("w", [32], kind=99)], bytes(64)), "'w' is of type 99"),
    "no whole blocks": (raw([], [info("w", [33], kind=8)], bytes(64)), "blocks of 32"),
    "no settings": (raw([], [info("w", [4])], bytes(64)), "general.architecture is"),
    "no model": (raw(), "general.architecture is"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    data, reason = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert peak < 1 << 20


def test_more_elements_than_any_vocabulary_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with open(path, "wb") as file:
        file.write(raw([array("a", U64, MAX_ELEMENTS + 1)], n_tensors=0))
        file.truncate(1 << 40)  # the room is there, at no price
    with pytest.raises(CheckpointError, match=f"at most {MAX_ELEMENTS} are read"):
        read_header(path)


def test_all_arrays_share_one_limit(tmp_path: Path) -> None:
    path, half = tmp_path / "model.gguf", MAX_ELEMENTS // 2 + 1
    path.write_bytes(raw([array("a", U8, half, bytes(half)), array("b", U8, half, bytes(half))]))
    with pytest.raises(CheckpointError, match="elements of b"):
        read_header(path)


def test_values_are_plain_and_a_float32_is_its_shortest_decimal(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(
        raw([
            setting("eps", F32, struct.pack("<f", 1e-5)),
            setting("yes", BOOL, b"\1"),
            array("texts", STRING, 2, text("a") + text("日")),
            array("numbers", U32, 2, struct.pack("<II", 7, 8)),
        ])
    )  # fmt: skip
    found = read_header(path).settings
    assert found == {"eps": 1e-5, "yes": True, "texts": ["a", "日"], "numbers": [7, 8]}
    assert [type(value) for value in found.values()] == [float, bool, list, list]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write(path, LLAMA, llama_tensors(), kinds="Q8_0").read_bytes()


@given(data=st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_anywhere_is_refused(honest: bytes, tmp_path: Path, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(honest) - 32))
    path = tmp_path / "cut.gguf"
    path.write_bytes(honest[:end])
    with pytest.raises(CheckpointError):
        open_gguf(path)


@given(data=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_is_refused_or_harmless(honest: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Wherever a byte is another one: a model of a size that the file has, or a message."""
    damaged = bytearray(honest)
    end = honest.index(b"output_norm") + 40
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, end))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(UserError):
        found = open_gguf(path, vocabulary=False)
        assert sum(read().numel() for read in found.weights.values()) < 100_000
