"""The tensors of a GGUF file, dequantised one at a time.

A tensor of quantised blocks is turned into float32 by the `gguf` package a slice at a time, so that
what is held is the result and little besides. The file is not mapped: pages of it would count as
the process's memory until the system takes them back, and a file that is cut short meanwhile would
end the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gpt.errors import CheckpointError
from gpt.weights.gguf_header import TensorInfo, read_header

Numbers: TypeAlias = "np.ndarray[Any, Any]"

SLICE = 1 << 18
"""Numbers dequantised at once: a multiple of every block, and small enough for a cache."""

_PLAIN: dict[str, tuple[np.dtype[Any], torch.dtype]] = {
    "F32": (np.dtype("<f4"), torch.float32),
    "F16": (np.dtype("<f2"), torch.float16),
    "BF16": (np.dtype("<i2"), torch.bfloat16),
}
"""Types that torch has: they are copied, not converted."""


class GGUFFile:
    """A GGUF file: settings, and the tensors as `gpt.weights.source.Tensors` gives them out.

    Attributes:
        path: the file.
        settings: its metadata as plain values, by key. A float32 is the shortest decimal number
            that rounds to it.
    """

    def __init__(self, path: Path | str) -> None:
        """Read the header.

        Raises:
            CheckpointError: no GGUF file, a damaged one, a part of a split one, or a tensor of a
                type that cannot be dequantised.
        """
        self.path = Path(path)
        header = read_header(self.path)
        self.settings = header.settings
        self._tensors = header.tensors
        parts = self.settings.get("split.count", 1)
        if parts not in (0, 1):
            raise CheckpointError(
                f"{self.path} is one of {parts} parts of a model (split.count); put them together "
                "first with llama.cpp's `llama-gguf-split --merge`"
            )
        for kind in {info.kind for info in self._tensors.values()}:
            self._check_kind(kind)

    def names(self) -> list[str]:
        """All tensors, in the file's order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes, the slowest first: a matrix is (out, in), as torch has it."""
        return self._tensors[name].shape

    def kind(self, name: str) -> str:
        """What GGML calls its type: F32, Q4_1, …"""
        return str(_kind(self._tensors[name].kind).name)

    def read(self, name: str) -> Tensor:
        """A fresh tensor: float32, float16 and bfloat16 as they are, quantised ones as float32.

        Raises:
            CheckpointError: the file is not what it was when its header was read.
        """
        info, kind = self._tensors[name], self.kind(name)
        try:
            with open(self.path, "rb") as file:
                file.seek(info.start)
                if kind in _PLAIN:
                    stored, dtype = _PLAIN[kind]
                    raw = self._take(file, stored, info.size)
                    numbers = torch.from_numpy(raw.astype(stored.newbyteorder("="), copy=False))
                    return (numbers.view(dtype) if kind == "BF16" else numbers).view(info.shape)
                return torch.from_numpy(self._dequantised(file, info).reshape(info.shape))
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror or error}") from None

    def _dequantised(self, file: BinaryIO, info: TensorInfo) -> Numbers:
        from gguf.constants import GGML_QUANT_SIZES
        from gguf.quants import dequantize

        block, block_bytes = GGML_QUANT_SIZES[_kind(info.kind)]
        n_blocks, step = info.size // block_bytes, SLICE // block
        out = np.empty(n_blocks * block, np.float32)
        # A scale that is infinite or no number is the file's own; it shows in the numbers.
        with np.errstate(all="ignore"):
            for first in range(0, n_blocks, step):
                n = min(step, n_blocks - first)
                blocks = self._take(file, np.dtype(np.uint8), n * block_bytes)
                found = dequantize(blocks[None], _kind(info.kind))[0]
                out[first * block : (first + n) * block] = found
        return out

    def _take(self, file: BinaryIO, dtype: np.dtype[Any], size: int) -> Numbers:
        found: Numbers = np.fromfile(file, dtype, size // dtype.itemsize)
        if found.nbytes < size:
            raise CheckpointError(f"{self.path} has become shorter since it was opened")
        return found

    def _check_kind(self, kind: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES
        from gguf.quants import dequantize

        known = _kind(kind)
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[known][1]), np.uint8), known)
        except NotImplementedError:
            name = next(name for name, info in self._tensors.items() if info.kind == kind)
            raise CheckpointError(
                f"{self.path}: the tensor {name!r} is of type {known.name}, which cannot be turned "
                "into numbers here; take another quantisation of the model, such as Q8_0"
            ) from None


def _kind(number: int) -> Any:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(number)
