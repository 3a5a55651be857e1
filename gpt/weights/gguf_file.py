"""The tensors of a GGUF file, dequantised one at a time.

The file is mapped, not read. A tensor of quantised blocks is turned into float32 by the `gguf`
package a slice at a time, so that what is held is the result and little besides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.errors import CheckpointError
from gpt.weights.gguf_header import read_header

SLICE = 1 << 18
"""Numbers dequantised at once: a multiple of every block, and small enough for a cache."""

_PLAIN = {
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
        self._map = np.memmap(self.path, mode="r", dtype=np.uint8) if self._tensors else None

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
        """A fresh tensor: float32, float16 and bfloat16 as they are, quantised ones as float32."""
        info = self._tensors[name]
        assert self._map is not None, "there is a tensor"
        data = self._map[info.start : info.start + info.size]
        kind = self.kind(name)
        if kind in _PLAIN:
            stored, dtype = _PLAIN[kind]
            numbers = torch.from_numpy(np.array(data).view(stored).astype(stored.newbyteorder("=")))
            return (numbers.view(dtype) if kind == "BF16" else numbers).view(info.shape)
        from gguf.constants import GGML_QUANT_SIZES
        from gguf.quants import dequantize

        block, block_bytes = GGML_QUANT_SIZES[_kind(info.kind)]
        out, step = np.empty(info.size // block_bytes * block, np.float32), SLICE // block
        # A scale that is infinite or no number is the file's own; it shows in the numbers.
        with np.errstate(all="ignore"):
            for first in range(0, info.size // block_bytes, step):
                blocks = data[first * block_bytes : (first + step) * block_bytes]
                found = dequantize(np.array(blocks)[None], _kind(info.kind))[0]
                out[first * block : first * block + len(found)] = found
        return torch.from_numpy(out.reshape(info.shape))

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
