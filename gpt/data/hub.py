"""Corpora from Hugging Face datasets, streamed: no copy of them on the disk.

The library is an optional extra, and imported only when a source begins with `hf:`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpt.data.decoding import Reading
from gpt.data.formats import Piece, check_text_type, missing_field, texts_of
from gpt.errors import DataError

_ROWS = 1000


@dataclass(frozen=True)
class Dataset:
    """One split of a dataset.

    Attributes:
        name: `NAME` or `NAME:CONFIG`, as it was given.
        split: the split.
        builder: the library's, which has resolved the name to files of one revision.
    """

    name: str
    split: str
    builder: Any

    @classmethod
    def find(cls, name: str, split: str) -> Dataset:
        """Look a dataset up.

        Args:
            name: of a dataset on the hub, or the path of a folder with one; `:CONFIG` may follow.

        Raises:
            DataError: the library is not installed, nothing of that name, or no network.
        """
        try:
            import datasets
        except ImportError:
            raise DataError(
                f"hf:{name} needs the package datasets; run: pip install 'antiphon[datasets]'"
            ) from None
        datasets.disable_progress_bars()
        dataset, _, config = name.partition(":")
        try:
            builder = datasets.load_dataset_builder(dataset, config or None)
        except Exception as error:  # noqa: BLE001 (the library raises whatever lies below it)
            raise DataError(_not_found(name, error)) from None
        return cls(name, split, builder)

    @property
    def identity(self) -> dict[str, Any]:
        """Name, split, and the hash that the library takes of the files and their revision."""
        return {
            "dataset": self.name,
            "split": self.split,
            "revision": str(self.builder.hash),
        }

    def pieces(self, field: str, reading: Reading) -> Iterator[Piece]:
        """Its rows in order, one document each.

        Raises:
            DataError: no such split or field, or what the library says when a download breaks off.
        """
        where = f"hf:{self.name}"
        number = 0
        try:
            rows = self.builder.as_streaming_dataset(split=self.split)
            if rows.column_names is not None:
                if field not in rows.column_names:
                    raise DataError(missing_field(where, field, rows.column_names))
                rows = rows.select_columns([field])
            for table in rows.with_format("arrow").iter(batch_size=_ROWS):
                if field not in table.column_names:
                    raise DataError(missing_field(where, field, table.column_names))
                column = table.column(field)
                check_text_type(column.type, where, field)
                for chunk in column.chunks:
                    for text in texts_of(chunk, where, number, reading):
                        number += 1
                        yield Piece(reading.row(text), True, where, number)
                reading.advance(column.nbytes)
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001 (the library raises whatever lies below it)
            raise DataError(f"cannot read {where}, split {self.split}: {_line(error)}") from None


def _not_found(name: str, error: Exception) -> str:
    offline = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    if offline:
        return (
            f"hf:{name} cannot be looked up: {_line(error)}; where there is a network, download it "
            "into a folder (hf download --repo-type dataset NAME --local-dir FOLDER), bring that "
            "here, and give hf:FOLDER or its files"
        )
    return f"hf:{name} cannot be used: {_line(error)}"


def _line(error: Exception) -> str:
    """What the error says, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
