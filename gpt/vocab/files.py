"""Files of somebody else's: JSON of bounded size, and fields of a known kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpt.errors import TokenizerError

MAX_FILE = 128 * 2**20
"""Bytes of a vocabulary's file; the largest in use have 35 MB."""
MAX_TOKEN = 4096
"""Characters of a token; the longest in use have some hundreds."""
MAX_MERGES = 1 << 23


def read(path: Path) -> bytes:
    """Raises TokenizerError that names the file."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_FILE:
        raise TokenizerError(
            f"{path} is larger than {MAX_FILE // 2**20} MiB, which no vocabulary is"
        )
    return data


def read_json(path: Path) -> dict[str, Any]:
    """An object. Raises TokenizerError that names the file."""
    try:
        found = json.loads(read(path).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:100]
        raise TokenizerError(f"{path} is not JSON: {reason}") from None
    if not isinstance(found, dict):
        raise TokenizerError(f"{path} is JSON, but no object")
    return found


def read_optional(path: Path) -> dict[str, Any]:
    """The same; an empty one where there is no such file."""
    return read_json(path) if path.is_file() else {}
