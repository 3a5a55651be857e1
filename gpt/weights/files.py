"""Tensors of safetensors files and of torch's checkpoints, read one at a time.

Nothing is believed of a file: safetensors checks its own table (sizes, gaps, overlaps) before it
gives out a tensor; a torch checkpoint is a zip archive with a pickle in it, of which torch loads
data only (`weights_only`), and which may not be larger unpacked than it is packed.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpt.errors import CheckpointError
from gpt.weights.fields import read_json
from gpt.weights.layout import FLOATS
from gpt.weights.source import Tensors

MAX_SHARDS = 10_000


class SafetensorsFile:
    """One safetensors file.

    The file is opened anew for each tensor: pages of an open one count as the process's memory, so
    a model would be there twice by the time it is read.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError: it cannot be read, or its table is not consistent."""
        self._path = path
        self._shapes: dict[str, tuple[int, ...]] = {}
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError, ValueError) as error:
            raise self._unreadable(error) from None

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        try:
            with safe_open(self._path, framework="pt") as file:
                return _plain(file.get_tensor(name), name, self._path).clone()
        except (SafetensorError, OSError, ValueError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> CheckpointError:
        reason = (str(error).splitlines() or ["?"])[0][:200]
        return CheckpointError(f"{self._path} is no readable safetensors file: {reason}")


class Held:
    """Tensors that lie in a mapped file already, as those of a torch checkpoint do."""

    def __init__(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        self._tensors = dict(tensors)
        self._path = path

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return _plain(self._tensors[name], name, self._path).clone(
            memory_format=torch.contiguous_format
        )

    def share_storage(self, first: str, second: str) -> bool:
        a, b = self._tensors[first], self._tensors[second]
        return a.data_ptr() == b.data_ptr() and a.shape == b.shape


class Shards:
    """Several files as one. Each tensor is in one of them."""

    def __init__(self, shards: Mapping[Path, Tensors]) -> None:
        """Raises CheckpointError: a tensor is in two files."""
        self._of: dict[str, Tensors] = {}
        self._file: dict[str, Path] = {}
        for path, tensors in shards.items():
            for name in tensors.names():
                if name in self._of:
                    raise CheckpointError(
                        f"the tensor {name[:200]!r} is in two files: {self._file[name].name} and "
                        f"{path.name} in {path.parent}"
                    )
                self._of[name], self._file[name] = tensors, path

    def names(self) -> list[str]:
        return list(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of[name].shape(name)

    def read(self, name: str) -> Tensor:
        return self._of[name].read(name)

    def file_of(self, name: str) -> Path | None:
        return self._file.get(name)


def open_weights(folder: Path) -> Tensors:
    """The weights of a Hugging Face folder: safetensors if there are, else `.bin`, in one file or
    in shards that an index lists.

    Raises:
        CheckpointError: there are none, or something is wrong with them.
    """
    for name, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        whole, index = folder / f"{name}{suffix}", folder / f"{name}{suffix}.index.json"
        if whole.is_file():
            return _open(whole)
        if index.is_file():
            return _open_shards(index)
    raise CheckpointError(
        f"{folder} has no weights: neither model.safetensors nor pytorch_model.bin, nor an index "
        "of shards (model.safetensors.index.json, pytorch_model.bin.index.json)"
    )


def _open(path: Path) -> Tensors:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    return Held(tensors_of(load_torch(path), path), path)


def _open_shards(index: Path) -> Tensors:
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index} has no weight_map, which says where each tensor is")
    files = sorted({str(file) for file in listed.values()})
    if len(files) > MAX_SHARDS:
        raise CheckpointError(f"{index} lists {len(files)} files; at most {MAX_SHARDS} are read")
    for file in files:
        # A name in the folder and nothing else. (A link there may lead anywhere: whoever placed it
        # had the right to, and the hub's own cache consists of them.)
        if file != Path(file).name or file in ("", ".", "..") or "\\" in file or "\0" in file:
            raise CheckpointError(f"{index} lists the file {file[:200]!r}, which is not beside it")
        if not os.path.isfile(index.parent / file):  # False also for a name that no disk takes
            raise CheckpointError(f"{index} lists the file {file[:200]!r}, which is not there")
    shards = Shards({index.parent / file: _open(index.parent / file) for file in files})
    for name, file in listed.items():
        found = shards.file_of(name)
        if found is None or found.name != file:
            raise CheckpointError(f"{index}: the tensor {name[:200]!r} is not in {str(file)[:200]}")
    for name in shards.names():
        if name not in listed:
            raise CheckpointError(f"{index} does not list the tensor {name[:200]!r}")
    return shards


def load_torch(path: Path) -> Any:
    """What a file of `torch.save` holds: tensors and plain data, mapped from the file.

    Raises:
        CheckpointError: it is no such file, or holds anything else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
        size = path.stat().st_size
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CheckpointError(
            f"{path} is no checkpoint that torch has written since version 1.6 ({error}); open it "
            "with what wrote it, and save it again"
        ) from None
    packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if packed or sum(member.file_size for member in members) > size:
        raise CheckpointError(f"{path} is packed, which torch's checkpoints are not")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # torch.load fails in as many ways as there are files that are no checkpoint; all mean the same.
    except Exception as error:  # noqa: BLE001
        reason = str(error).strip().splitlines() or [type(error).__name__]
        line = next((line for line in reason if "Unsupported" in line), reason[0]).strip()
        raise CheckpointError(
            f"{path} cannot be read as data alone, and code in it is not run: {line[:300]}"
        ) from None


def tensors_of(state: Any, path: Path) -> dict[str, Tensor]:
    """The state dict of a checkpoint. Raises CheckpointError unless it is names and tensors."""
    if not isinstance(state, dict) or not state:
        raise CheckpointError(f"{path} holds no tensors by name")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {str(name)[:200]!r} is no tensor")
        # Sparse, meta and expanded tensors can claim any size without having it.
        plain = value.layout is torch.strided and not value.is_meta and not value.is_quantized
        if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: {name[:200]} is no plain array of numbers")
    return state


def _plain(tensor: Tensor, name: str, path: Path) -> Tensor:
    if tensor.dtype not in FLOATS:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{path}: {name} is stored as {kind}; only float32, float16, bfloat16 and float64 are "
            "read (a quantised model must be stored as one of them first)"
        )
    return tensor.detach()
