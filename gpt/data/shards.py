"""Token shards: the prepared form of a corpus, on disk and memory-mapped.

A prepared folder holds `tokenizer.json`, `meta.json` and for each split the shards
`train-00000.bin`, `train-00001.bin`, …: bare little-endian ids, uint16 where the vocabulary allows,
else uint32. Each document is followed by end-of-text.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from gpt.data.description import SPLITS, DamagedError, check
from gpt.errors import DataError, TokenizerError
from gpt.tokenizer import FILE_NAME, Tokenizer

FORMAT = 2


class TokenArray:
    """A read-only view of the ids of one split, over memory-mapped shards.

    `len(a)` is the number of ids, `a[i]` one of them as an int, `a[i:j]` a copy of some as an int64
    array, across shard borders. The maps are opened on first use and are not pickled, so a data
    loader's workers open their own.
    """

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int], dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self._paths = list(paths)
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + size)
        self._maps: list[npt.NDArray[Any] | None] = [None] * len(self._paths)

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> npt.NDArray[np.int64]: ...
    def __getitem__(self, index: int | slice) -> int | npt.NDArray[np.int64]:
        if not isinstance(index, slice):
            at = index + len(self) if index < 0 else index
            if not 0 <= at < len(self):
                raise IndexError(f"index {index} is outside {len(self)} tokens")
            return int(self[at : at + 1][0])
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"a step of {step} is not supported; slice the copy instead")
        out = np.empty(max(stop - start, 0), np.int64)
        filled = 0
        shard = bisect.bisect_right(self._starts, start) - 1
        while filled < len(out):
            begin = self._starts[shard]
            part = self._map(shard)[start + filled - begin : stop - begin]
            out[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return out

    def _map(self, shard: int) -> npt.NDArray[Any]:
        found = self._maps[shard]
        if found is None:
            found = np.memmap(self._paths[shard], self.dtype, mode="r")
            self._maps[shard] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": [None] * len(self._paths)}


@dataclass(frozen=True)
class SourceSpan:
    """Which ids of a prepared corpus come from one of its sources.

    Attributes:
        name: the source, as it was given.
        weight: its weight in the mix, as the caller of `prepare()` gave it; it is not kept in the
            folder, which serves any weights: opened without `prepare()` it is 1.
        train, val: the half-open range of ids in each split.
    """

    name: str
    weight: float
    train: tuple[int, int]
    val: tuple[int, int]


@dataclass(frozen=True)
class PreparedData:
    """A prepared corpus.

    Attributes:
        folder: where it is.
        meta: all of `meta.json`: the sources, settings and counts it was made with.
        tokenizer: what the ids mean.
        train, val: the ids of both splits.
        train_bytes, val_bytes: UTF-8 bytes of text in each, end-of-text not counted.
        val_chars: characters of text in the validation split.
        sources: where the text of each source lies, in the order they were given.
    """

    folder: Path
    meta: dict[str, Any]
    tokenizer: Tokenizer
    train: TokenArray
    val: TokenArray
    train_bytes: int
    val_bytes: int
    val_chars: int
    sources: list[SourceSpan]

    @property
    def max_id(self) -> int:
        """The largest id in either split."""
        return max(int(self.meta["splits"][split]["max_id"]) for split in SPLITS)

    @classmethod
    def open(cls, folder: str | Path) -> PreparedData:
        """Open a prepared folder after checking that all of it is there.

        Raises:
            DataError: not a prepared folder, of another format, or damaged.
        """
        folder = Path(folder)
        again = "delete the folder and prepare the data again"
        try:
            meta = json.loads((folder / "meta.json").read_bytes())
        except FileNotFoundError:
            raise DataError(f"{folder} holds no prepared data (there is no meta.json)") from None
        except OSError as error:
            raise DataError(f"cannot read {folder}/meta.json: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise DataError(f"{folder}/meta.json is damaged: it is not JSON; {again}") from None
        version = meta.get("format") if isinstance(meta, dict) else None
        if version is not None and version != FORMAT:
            raise DataError(
                f"{folder} is of format {repr(version)[:40]}, but this version reads {FORMAT}; "
                f"{again}"
            )
        try:
            check(meta)
            tokenizer = Tokenizer.load(folder / FILE_NAME)
            if tokenizer.fingerprint != meta["tokenizer"]["fingerprint"]:
                raise DataError(
                    f"{folder}/{FILE_NAME} is not the one the ids were made with; {again}"
                )
            if meta["dtype"] != (wanted := dtype_for(tokenizer.n_vocab)):
                raise DamagedError(
                    f"dtype is {meta['dtype'][:40]!r}, but ids below {tokenizer.n_vocab} are in "
                    f"{wanted!r}"
                )
            for split in SPLITS:
                if (largest := meta["splits"][split]["max_id"]) >= tokenizer.n_vocab:
                    raise DamagedError(
                        f"splits.{split}.max_id is {largest}, but the vocabulary has "
                        f"{tokenizer.n_vocab} ids"
                    )
        except TokenizerError as error:
            raise DataError(f"{folder} is damaged: {error}; {again}") from None
        except DamagedError as error:
            raise DataError(f"{folder}/meta.json is damaged: {error}; {again}") from None
        train, val = (meta["splits"][split] for split in SPLITS)
        return cls(
            folder, meta, tokenizer,
            _open_split(folder, train["shards"], meta["dtype"]),
            _open_split(folder, val["shards"], meta["dtype"]),
            train["bytes"], val["bytes"], val["chars"], _spans(meta["spans"]),
        )  # fmt: skip


def _spans(entries: list[dict[str, Any]]) -> list[SourceSpan]:
    """The spans of all sources, which lie one after the other in each split."""
    spans = []
    at = dict.fromkeys(SPLITS, 0)
    for entry in entries:
        ranges = {}
        for split in SPLITS:
            ranges[split] = (at[split], at[split] + entry[split]["tokens"])
            at[split] = ranges[split][1]
        spans.append(SourceSpan(entry["source"], 1.0, ranges["train"], ranges["val"]))
    return spans


def _open_split(folder: Path, shards: list[dict[str, Any]], dtype: str) -> TokenArray:
    for shard in shards:
        path = folder / shard["file"]
        wanted = shard["tokens"] * np.dtype(dtype).itemsize
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror})") from None
        if size != wanted:
            raise DataError(
                f"{path} is damaged: it has {size} bytes instead of {wanted}; delete the folder "
                "and prepare the data again"
            )
    return TokenArray(
        [folder / shard["file"] for shard in shards], [s["tokens"] for s in shards], dtype
    )


class ShardWriter:
    """Writes the ids of one split into shards of at most `limit` ids, and counts them."""

    def __init__(self, folder: Path, split: str, n_vocab: int, limit: int) -> None:
        self.dtype = dtype_for(n_vocab)
        self.shards: list[dict[str, Any]] = []
        self.max_id = -1
        self._folder = folder
        self._split = split
        self._n_vocab = n_vocab
        self._limit = limit
        self._file: FileIO | None = None

    @property
    def tokens(self) -> int:
        return sum(shard["tokens"] for shard in self.shards)

    def append(self, ids: Sequence[int] | npt.NDArray[Any]) -> None:
        """Add ids. Raises DataError for one outside the vocabulary, OSError if the disk is full."""
        if not len(ids):
            return
        array = np.asarray(ids)
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= self._n_vocab:
            raise DataError(
                f"the tokenizer gave id {low if low < 0 else high}, outside its own vocabulary of "
                f"{self._n_vocab}"
            )
        self.max_id = max(self.max_id, high)
        array = array.astype(self.dtype)
        while len(array):
            file = self._file
            if file is None or self.shards[-1]["tokens"] == self._limit:
                file = self._next()
            part = array[: self._limit - self.shards[-1]["tokens"]]
            data = memoryview(part.tobytes())
            while data:  # a disk that is nearly full takes a part
                data = data[file.write(data) :]
            self.shards[-1]["tokens"] += len(part)
            array = array[len(part) :]

    def _next(self) -> FileIO:
        self.close()
        name = f"{self._split}-{len(self.shards):05d}.bin"
        # Unbuffered: what comes is large, and a full disk is noticed where it is written.
        self._file = open(self._folder / name, "wb", buffering=0)  # noqa: SIM115 (kept open)
        self.shards.append({"file": name, "tokens": 0})
        return self._file

    def close(self) -> None:
        """Flush the last shard to disk."""
        if self._file is not None:
            with self._file as file:
                self._file = None
                os.fsync(file.fileno())


def dtype_for(n_vocab: int) -> str:
    """The smallest stored type that holds all ids: `<u2` up to 65,536 of them, else `<u4`."""
    return "<u2" if n_vocab <= 1 << 16 else "<u4"
