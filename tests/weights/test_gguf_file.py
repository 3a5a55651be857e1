"""Tensors of a GGUF file: every type as the gguf package dequantises it, one at a time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from gpt.errors import CheckpointError
from gpt.weights import gguf_file
from gpt.weights.gguf_file import GGUFFile
from tests.weights.gguf_files import write

BLOCKS = [
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS",
]  # fmt: skip


def write_blocks(path: Path, kind: str, rows: int, width: int) -> None:
    """A matrix of random blocks; the scales among their bytes are whatever comes."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = np.random.default_rng(0).integers(0, 60, (rows, width // block * size), dtype=np.uint8)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("w", data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_dequantised_as_the_package_does(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "SLICE", 512)  # several slices, the last not full
    path = tmp_path / "w.gguf"
    write_blocks(path, kind, 5, 768)
    file, theirs = GGUFFile(path), GGUFReader(path).tensors[0]
    found = file.read("w")
    assert found.dtype == torch.float32
    assert tuple(found.shape) == file.shape("w") == (5, 768)
    assert file.kind("w") == kind
    np.testing.assert_array_equal(found.numpy(), dequantize(theirs.data, theirs.tensor_type))
    assert len(found.unique()) > 8


def test_floats_stay_what_they_are(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    kinds = {"a": "F32", "b": "F16", "c": "BF16"}
    file = GGUFFile(write(tmp_path / "w.gguf", {}, dict.fromkeys(kinds, numbers), kinds=kinds))
    x = torch.from_numpy(numbers)
    assert torch.equal(file.read("a"), x)
    assert torch.equal(file.read("b"), x.half())
    assert torch.equal(file.read("c"), x.bfloat16())


def test_a_tensor_read_is_the_readers_own(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "w.gguf", {}, {"w": np.ones((2, 32), np.float32)}))
    file.read("w").zero_()
    assert file.read("w").eq(1).all()


def test_memory_is_that_of_the_result(tmp_path: Path) -> None:
    numbers = np.ones((512, 4096), np.float32)
    blocks = quantize(numbers, GGMLQuantizationType.Q8_0)
    assert blocks.nbytes < numbers.nbytes
    file = GGUFFile(write(tmp_path / "w.gguf", {}, {"w": numbers}, kinds="Q8_0"))
    tracemalloc.start()
    try:
        file.read("w")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.6 * numbers.nbytes


def test_a_type_that_holds_no_weights_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_tensor("indices", np.zeros(4, np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="'indices' is of type I32"):
        GGUFFile(tmp_path / "w.gguf")


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "w.gguf", {"split.count": 3}, {"w": np.ones(4, np.float32)})
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        GGUFFile(path)


def test_a_missing_file_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        GGUFFile(tmp_path / "none.gguf")
