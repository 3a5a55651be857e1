"""The settings of somebody else's configuration, each taken once; what is left over is refused.

A reader says what it knows of each setting: how it is used, which values make no difference, or
that it does not matter at all. `Fields.finish` then names the settings that nobody asked for. Were
one of them passed over, the model would run and compute something else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from gpt.errors import CheckpointError
from gpt.params import brief

MAX_JSON_BYTES = 1 << 28
"""Indices of the largest models have some megabytes, tokenizers some tens."""
MAX_INT = 2**31

_MISSING: Any = object()


class Fields:
    """The fields of one object of a configuration.

    Args:
        values: as parsed.
        where: the file, and the place in it, for messages.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise CheckpointError(f"{where} is no object of fields, but {brief(values)}")
        self._values = dict(values)
        self.where = where

    def has(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return name in self._values

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """The value as it is; null and missing are `default`, or a complaint."""
        value = self._values.pop(name, None)
        if value is None:
            if default is _MISSING:
                self.refuse(name, "is missing")
            return default
        return value

    def integer(self, name: str, default: Any = _MISSING, least: int = 1) -> Any:
        """A whole number from `least` to 2**31, or the default."""
        value = self.take(name, default)
        if value is default:
            return value
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= MAX_INT:
            self.refuse(
                name, f"is {brief(value)}, but must be a whole number from {least} to 2**31"
            )
        return value

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """A finite number above 0, or the default."""
        value = self.take(name, default)
        if value is default:
            return value
        if type(value) not in (int, float) or not 0 < value < 1e30 or not math.isfinite(value):
            self.refuse(name, f"is {brief(value)}, but must be a finite number above 0")
        return float(value)

    def flag(self, name: str, default: Any = _MISSING) -> Any:
        value = self.take(name, default)
        if type(value) is not bool:
            self.refuse(name, f"is {brief(value)}, but must be true or false")
        return value

    def text(self, name: str, default: Any = _MISSING) -> Any:
        value = self.take(name, default)
        if value is not default and not isinstance(value, str):
            self.refuse(name, f"is {brief(value)}, but must be text")
        return value

    def section(self, name: str) -> Fields | None:
        """The fields of an object in this one; None if there is none."""
        value = self.take(name, None)
        return None if value is None else Fields(value, f"{name} in {self.where}")

    def only(self, name: str, *allowed: Any) -> None:
        """The field must be missing, null or one of these: any other value computes what is not
        supported."""
        value = self.take(name, None)
        if value is not None and not any(
            type(value) is type(each) and value == each for each in allowed
        ):
            wanted = " or ".join(json.dumps(each) for each in allowed) or "left out"
            self.refuse(name, f"is {brief(value)}, which is not supported (it must be {wanted})")

    def ignore(self, *names: str) -> None:
        """These do not change what the model computes."""
        for name in names:
            self._values.pop(name, None)

    def refuse(self, name: str, what: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {name} {what}")

    def finish(self) -> None:
        """Raises CheckpointError if a field is left that nobody asked for."""
        left = [name for name, value in self._values.items() if value is not None]
        if left:
            raise CheckpointError(
                f"{self.where} sets {', '.join(map(brief, left[:5]))}, which is not known here and "
                "may change what the model computes; if it does not, delete it from that file"
            )


def read_json(path: Path, what: str = "object") -> dict[str, Any]:
    """An object of a JSON file.

    Raises:
        CheckpointError: no such file, too large to be one, no JSON, NaN in it, or no object.
    """
    text = read_text(path)
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = (str(error).splitlines() or ["?"])[0][:200]
        raise CheckpointError(f"{path} is not usable JSON: {reason}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is no JSON {what}, but {brief(values)}")
    return values


def read_text(path: Path) -> str:
    """A text file of moderate size. Raises CheckpointError."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has over {MAX_JSON_BYTES >> 20} MiB; that is no text")
        return path.read_bytes().decode()  # line ends as they are
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is no UTF-8 text") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no number in JSON")


def smallest_period(items: Iterable[str]) -> list[str] | str:
    """The shortest list that repeats to these; a lone one as itself. Patterns over the layers."""
    listed = list(items)
    for n in range(1, len(listed) + 1):
        if all(item == listed[i % n] for i, item in enumerate(listed)):
            return listed[0] if n == 1 else listed[:n]
    return listed
