"""What `meta.json` of a prepared folder must be: every field that anything reads, and its type.

Looked through once when the folder is opened, so that nobody who reads a field has to doubt it.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

SPLITS = ("train", "val")
COUNTS = ("tokens", "documents", "bytes", "chars")
"""What is counted of each split, and of each source in it."""


class DamagedError(ValueError):
    """Says which field is wrong, and how."""


def check(meta: Any) -> None:
    """Raises DamagedError for a description that this version has not written."""
    for name in ("tokenizer", "splits"):
        _of_type(meta, name, dict)
    _of_type(meta, "dtype", str)
    _of_type(meta["tokenizer"], "fingerprint", str, "tokenizer.")
    for split in SPLITS:
        _check_split(_of_type(meta["splits"], split, dict, "splits."), f"splits.{split}.")
    spans = _of_type(meta, "spans", list)
    for i, span in enumerate(spans):
        where = f"spans.{i}."
        _of_type(span, "source", str, where)
        for split in SPLITS:
            counts = _of_type(span, split, dict, where)
            for name in COUNTS:
                _number(counts, name, f"{where}{split}.")
    for split in SPLITS:
        for name in COUNTS:
            if sum(span[split][name] for span in spans) != meta["splits"][split][name]:
                raise DamagedError(f"the {name} of all spans are not splits.{split}.{name}")
    if "empty_documents" in meta:
        _number(meta, "empty_documents", "")
    if "left_out" in meta:
        left_out = _of_type(meta, "left_out", dict)
        for name in ("bytes", "rows"):
            _number(left_out, name, "left_out.")
        _of_type(left_out, "first", str, "left_out.")


def _check_split(described: dict[str, Any], where: str) -> None:
    for name in COUNTS:
        _number(described, name, where)
    _number(described, "max_id", where, least=-1)
    shards = _of_type(described, "shards", list, where)
    for i, shard in enumerate(shards):
        file = _of_type(shard, "file", str, f"{where}shards.{i}.")
        if file in ("", "..") or PurePath(file).name != file or "\0" in file:
            raise DamagedError(f"{where}shards.{i}.file is {file[:80]!r}, not the name of a file")
        _number(shard, "tokens", f"{where}shards.{i}.", least=1)
    if sum(shard["tokens"] for shard in shards) != described["tokens"]:
        raise DamagedError(f"the tokens of all shards are not {where}tokens")


def _of_type(holder: Any, name: str, kind: type, where: str = "") -> Any:
    if not isinstance(holder, dict):
        raise DamagedError(f"{where.rstrip('.') or 'all of it'} is no object")
    if name not in holder:
        raise DamagedError(f"the field {where}{name} is missing")
    value = holder[name]
    if type(value) is not kind:
        names = {dict: "object", list: "list", str: "text", int: "whole number"}
        raise DamagedError(f"{where}{name} is {repr(value)[:40]}, no {names[kind]}")
    return value


def _number(holder: Any, name: str, where: str, least: int = 0) -> None:
    value = _of_type(holder, name, int, where)
    if not least <= value < 1 << 63:
        raise DamagedError(f"{where}{name} is {str(value)[:40]}, no count")
