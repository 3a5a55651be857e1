"""The header of a GGUF file, read within bounds.

The layout is that of the GGUF specification, version 3 (`docs/gguf.md` of ggml):

    "GGUF"  version u32  tensors u64  settings u64
    setting:  key  type u32  value              text: length u64, UTF-8
    tensor:   name  dimensions u32  sizes u64…  type u32  offset u64
    padding to the alignment, then the tensors' data

The `gguf` package has a reader, which believes every number in it: it makes an array object for
each token of a vocabulary, twelve seconds for a small model, and goes on for as many tensors as the
file claims. Here a count is held against the bytes that are there before anything is made of it.
What numbers mean, sizes of blocks and how they are dequantised, is the package's to say.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gpt.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_TENSORS = MAX_SETTINGS = 1 << 16
MAX_NAME = 1 << 10
"""Bytes of a key or of a tensor's name; 65,535 and 64 in the specification."""
MAX_ELEMENTS = 1 << 22
"""Of all arrays together. A vocabulary of 262,144 tokens with its scores and merges has a third."""
MAX_TEXT = 1 << 26
"""Bytes of all texts together."""
MAX_DIMENSIONS = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
"""The specification's types as numpy's."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file.

    Attributes:
        shape: sizes, the slowest first, as in numpy (the file has them the other way round).
        kind: number of its type in GGML's list.
        start: first byte, from the beginning of the file.
        size: bytes.
    """

    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """What stands before a GGUF file's data: plain values by key, tensors by name."""

    settings: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Read and check the header: whatever it claims about its tensors is true of the file.

    Raises:
        CheckpointError: unreadable, no GGUF, another version or byte order, damaged, or larger
            than any model needs.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            return _Reader(path, file, size).header()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None


class _Reader:
    """A place in the file, and what may still be read."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.elements, self.text = MAX_ELEMENTS, MAX_TEXT

    def header(self) -> Header:
        self.start()
        n_tensors, n_settings = self.number("<Q"), self.number("<Q")
        self.fits("tensors", n_tensors, MAX_TENSORS, 8 + 4 + 8 + 4 + 8)
        self.fits("settings", n_settings, MAX_SETTINGS, 8 + 4 + 1)
        settings: dict[str, Any] = {}
        for _ in range(n_settings):
            key = self.string("a key", MAX_NAME)
            if key in settings:
                raise self.damaged(f"the setting {key!r} stands there twice")
            settings[key] = self.value(key, self.number("<I"))
        alignment = settings.get("general.alignment", DEFAULT_ALIGNMENT)
        if not (type(alignment) is int and 8 <= alignment <= 1 << 20) or alignment.bit_count() != 1:
            raise self.damaged(f"general.alignment is {alignment!r}, no power of two from 8 on")
        found: dict[str, tuple[tuple[int, ...], int, int, int]] = {}
        for _ in range(n_tensors):
            name = self.string("a tensor's name", MAX_NAME)
            if name in found:
                raise self.damaged(f"the tensor {name!r} stands there twice")
            found[name] = self.tensor(name)
        data = -(-self.file.tell() // alignment) * alignment
        for name, (_, _, offset, _) in found.items():
            if offset % alignment:
                raise self.damaged(f"the tensor {name!r} is not aligned to {alignment} bytes")
        tensors = {
            name: TensorInfo(shape, kind, data + offset, size)
            for name, (shape, kind, offset, size) in found.items()
        }
        self.check_places(tensors)
        return Header(settings, tensors)

    def start(self) -> None:
        if self.file.read(4) != MAGIC:
            raise CheckpointError(f"{self.path} is no GGUF file: it does not begin with GGUF")
        version = self.number("<I")
        if version not in VERSIONS:
            swapped = int.from_bytes(struct.pack("<I", version), "big")
            if swapped in VERSIONS:
                raise CheckpointError(
                    f"{self.path} is a big-endian GGUF file; only little-endian ones are read"
                )
            raise CheckpointError(
                f"{self.path} is GGUF version {version}, but versions 2 and 3 are read; convert "
                "the model again with a current llama.cpp"
            )

    def check_places(self, tensors: dict[str, TensorInfo]) -> None:
        """Raises CheckpointError unless each tensor lies in the file, in a place of its own."""
        end, before = 0, ""
        for name, info in sorted(tensors.items(), key=lambda item: item[1].start):
            if info.start + info.size > self.size:
                raise self.damaged(
                    f"the tensor {name!r} ends at byte {info.start + info.size}, the file at "
                    f"{self.size}; it may be cut short"
                )
            if info.start < end:
                raise self.damaged(f"the tensors {before!r} and {name!r} overlap")
            end, before = info.start + info.size, name

    def tensor(self, name: str) -> tuple[tuple[int, ...], int, int, int]:
        """Shape, type, offset and bytes."""
        n_dimensions = self.number("<I")
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            raise self.damaged(
                f"the tensor {name!r} has {n_dimensions} dimensions, there may be 1 to "
                f"{MAX_DIMENSIONS}"
            )
        shape = tuple(self.number("<Q") for _ in range(n_dimensions))[::-1]
        kind, offset = self.number("<I"), self.number("<Q")
        block, block_bytes = self.block(name, kind)
        n = math.prod(shape)  # Python's own whole numbers: nothing overflows
        if n < 1 or shape[-1] % block or offset > self.size or n // block * block_bytes > self.size:
            raise self.damaged(
                f"the tensor {name!r} claims a shape of {shape} at byte {offset} of the data, which"
                f" does not fit a file of {self.size} bytes in blocks of {block}"
            )
        return shape, kind, offset, n // block * block_bytes

    def block(self, name: str, kind: int) -> tuple[int, int]:
        """Numbers and bytes of one block of the type."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            return GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise CheckpointError(
                f"{self.path}: the tensor {name!r} is of type {kind}, which is not known here; a "
                "newer gguf package may know it"
            ) from None

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.string(key, MAX_TEXT)
        if kind in _SCALARS:
            return self.numbers(key, kind, 1)[0]
        if kind != _ARRAY:
            raise self.damaged(f"the setting {key!r} is of type {kind}, which there is not")
        kind, length = self.number("<I"), self.number("<Q")
        if kind != _STRING and kind not in _SCALARS:
            raise self.damaged(f"the setting {key!r} is an array of type {kind}; it cannot be read")
        width = 8 if kind == _STRING else np.dtype(_SCALARS[kind]).itemsize
        self.fits(f"elements of {key}", length, self.elements, width)
        self.elements -= length
        if kind == _STRING:
            return [self.string(key, MAX_TEXT) for _ in range(length)]
        return self.numbers(key, kind, length)

    def numbers(self, key: str, kind: int, length: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        data = self.take(dtype.itemsize * length)
        if kind == 7 and set(data) - {0, 1}:
            raise self.damaged(f"the setting {key!r} is neither true nor false")
        found = np.frombuffer(data, dtype)
        # The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06.
        return [float(str(x)) for x in found] if kind == 6 else list(found.tolist())

    def string(self, what: str, limit: int) -> str:
        length = self.number("<Q")
        self.fits(f"bytes in {what}", length, min(limit, self.text), 1)
        self.text -= length
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} is not UTF-8") from None

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def fits(self, what: str, count: int, most: int, width: int) -> None:
        """Raises CheckpointError if there are more than allowed, or than the file has room for."""
        room = (self.size - self.file.tell()) // width
        if count > min(most, room):
            why = f"at most {most} are read" if count > most else f"it has room for {room}"
            raise self.damaged(f"it claims {count} {what}, but {why}")

    def take(self, length: int) -> bytes:
        data = self.file.read(length)
        if len(data) < length:
            raise self.damaged("it ends within its header; it may be cut short")
        return data

    def damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is no usable GGUF file: {reason}")
