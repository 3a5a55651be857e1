"""Prompts from a file, a line each: read in pieces, checked line by line. No torch."""

from __future__ import annotations

import json
import math
import os
import select
from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from gpt.errors import SamplingError, UserError
from gpt.params import SamplingParams, brief
from gpt.settings import SETTINGS, from_json, nearest

Format = Literal["jsonl", "txt"]

MAX_LINE = 2**24
"""Bytes of a line; a longer one cannot fit into a context and is not kept in memory."""
READ = 2**16

OWN = (
    "index", "line", "error", "choice", "text", "finish_reason", "matched_stop", "usage",
    "prompt_token_ids",
)  # fmt: skip
"""What a result says itself; an input that has these too could not be told from it."""
MISSPELT = 0.86
"""How much like a setting's name an unknown key must be to be taken for a slip."""


class LineError(UserError):
    """A line of the input that cannot be used; the others can."""


class Nothing(Enum):
    """Why there is no line."""

    YET = "there is no whole one yet, and the caller has better things to do than to wait"
    MORE = "the input is at its end"


class LineReader:
    """Lines from a file descriptor, as they come, without waiting when that is not wanted.

    A program that reads an answer before it writes its next prompt would otherwise wait for ever.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._rest = bytearray()
        self._ended = False

    def next(self, *, wait: bool) -> bytes | Nothing:
        """The next line without its end; of one longer than MAX_LINE its first part."""
        while not self._lines:
            if self._ended:
                return Nothing.MORE
            if not wait and not readable(self._descriptor):
                return Nothing.YET
            self._take(os.read(self._descriptor, READ))
        return self._lines.popleft()

    def _take(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._extend(piece)
            self._flush()
        self._extend(rest)
        if not data:
            self._ended = True
            if self._rest:
                self._flush()

    def _extend(self, piece: bytes) -> None:
        self._rest += piece[: MAX_LINE + 1 - len(self._rest)]

    def _flush(self) -> None:
        self._lines.append(bytes(self._rest).removesuffix(b"\r"))
        self._rest.clear()


def readable(descriptor: int) -> bool:
    """Whether a read would not have to wait; always so for files."""
    return bool(select.select([descriptor], [], [], 0)[0])


@dataclass(frozen=True)
class Prompt:
    """One prompt of the input.

    Attributes:
        index: which one, from 0; lines with nothing in them do not count.
        line: its line, from 1.
        prompt: text or token ids.
        settings: the sampling settings that the line gives for itself.
        extra: its other keys, which come back with the result.
        error: why it cannot be used.
    """

    index: int
    line: int
    prompt: str | list[int] = ""
    settings: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class PromptReader:
    """The prompts of an input, in order.

    Args:
        base: the settings of the run; a line's own are checked together with them.
    """

    def __init__(self, lines: LineReader, kind: Format, base: SamplingParams) -> None:
        self._lines = lines
        self._kind = kind
        self._base = base
        self._line = 0
        self._index = 0

    def skip(self, count: int) -> None:
        """Pass over the first `count` prompts."""
        while self._index < count and self.next(wait=True, look=False) is not Nothing.MORE:
            pass

    def next(self, *, wait: bool, look: bool = True) -> Prompt | Nothing:
        """The next prompt; one that cannot be used has an error.

        Args:
            wait: for a whole line, if there is none.
            look: into the line.
        """
        while True:
            data = self._lines.next(wait=wait)
            if isinstance(data, Nothing):
                return data
            self._line += 1
            if self._line == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")
            if data.strip():
                break
        found = Prompt(self._index, self._line)
        self._index += 1
        if not look:
            return found
        try:
            return self._read(data, found)
        except (LineError, SamplingError) as error:
            return replace(found, extra=self._id(data), error=str(error))

    def _read(self, data: bytes, found: Prompt) -> Prompt:
        if len(data) > MAX_LINE:
            raise LineError(f"the line is longer than {MAX_LINE // 2**20} MiB; shorten it")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise LineError(
                f"byte {error.start + 1} of the line is not UTF-8; convert the file to UTF-8"
            ) from None
        if self._kind == "txt":
            return replace(found, prompt=text)
        values = parse(text)
        own = [key for key in values if key in OWN]
        if own and not ("prompt" in values or "token_ids" in values):
            raise LineError('there is no "prompt" and no "token_ids" in the line')
        if own:
            raise LineError(f'the key "{own[0]}" is one of the result\'s own; rename it')
        settings = {key: from_json(key, values[key]) for key in values if key in SETTINGS}
        settings = {key: v for key, v in settings.items() if not (key == "seed" and v is None)}
        replace(self._base, **settings)  # raises SamplingError
        extra = {k: v for k, v in values.items() if k not in (*SETTINGS, "prompt", "token_ids")}
        for key in extra:
            check_spelling(key)
        return replace(found, prompt=_prompt(values), settings=settings, extra=extra)

    def _id(self, data: bytes) -> dict[str, Any]:
        """What a line that cannot be used calls itself, if that can be read."""
        try:
            values = parse(data.decode("utf-8")) if self._kind == "jsonl" else {}
        except (LineError, UnicodeDecodeError):
            return {}
        return {"id": values["id"]} if "id" in values else {}


def parse(text: str) -> dict[str, Any]:
    """A JSON object, of which everything can be written as JSON again. Raises LineError."""

    def no_number(name: str) -> None:
        raise ValueError(f"{name} is no number in JSON")

    try:
        values = json.loads(
            text, parse_constant=no_number, parse_float=_float, parse_int=_whole_number
        )
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:100]
        raise LineError(
            f'the line is not JSON ({reason}); a line is an object with "prompt"; for plain text '
            "use --input-format txt"
        ) from None
    if not isinstance(values, dict):
        raise LineError('the line is JSON but no object; write {"prompt": "..."}')
    return values


def _float(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise LineError(f"the line has a number that is too large, {brief(digits)}")
    return value


def _whole_number(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python reads no more digits than its limit
        raise LineError(
            f"the line has a number of {len(digits):,} digits, {brief(digits)}; put what is so "
            "long in quotes, as text"
        ) from None


def check_spelling(key: str) -> None:
    """Raises LineError if a key is a misspelt setting: it would be passed over without a word."""
    near = nearest(key, [*SETTINGS, "prompt", "token_ids", "num_samples"], cutoff=MISSPELT)
    if near == "num_samples":
        raise LineError(f'"{key}" is set for all lines, with --num-samples')
    if near is not None:
        raise LineError(f'unknown key "{key[:40]}"; did you mean "{near}"?')


def _prompt(values: dict[str, Any]) -> str | list[int]:
    given = [key for key in ("prompt", "token_ids") if key in values]
    if len(given) != 1:
        what = "both" if given else "neither"
        raise LineError(f'the line has {what} of "prompt" and "token_ids"; give one of them')
    value = values[given[0]]
    if given[0] == "prompt":
        if not isinstance(value, str):
            raise LineError('"prompt" is not a text; ids of tokens go into "token_ids"')
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise LineError('"token_ids" is not a list of whole numbers')
