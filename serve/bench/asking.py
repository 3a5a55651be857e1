"""What a load asks: lengths from a distribution or a file, prompts of random tokens. No torch."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.errors import ConfigError, DataError

FORMS = ("fixed:N", "uniform:A-B", "lognormal:MEDIAN:SIGMA:MAX")


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers from 1 up, as it was written in one of `FORMS`.

    Attributes:
        low, high: the least and the most that it gives.
        median, sigma: of the lognormal one, which is cut off at `high`; sigma is the standard
            deviation of the logarithm. None: all numbers from `low` to `high` are equally likely.
    """

    text: str
    low: int
    high: int
    median: float | None = None
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """An argparse type."""
        kind, _, rest = text.partition(":")
        try:
            if kind == "fixed":
                found = cls(text, int(rest), int(rest))
            elif kind == "uniform":
                low, _, high = rest.partition("-")
                found = cls(text, int(low), int(high))
            elif kind == "lognormal":
                median, sigma, most = rest.split(":")
                found = cls(text, 1, int(most), float(median), float(sigma))
                if not (1 <= float(median) <= int(most) and 0 <= float(sigma) < 10):
                    raise ValueError
            else:
                raise ValueError
            if not 1 <= found.low <= found.high:
                raise ValueError
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text[:60]!r} must be one of {', '.join(FORMS)}, with numbers from 1 up"
            ) from None
        return found

    def draw(self, numbers: random.Random) -> int:
        if self.median is None:
            return numbers.randint(self.low, self.high)
        drawn = self.median * math.exp(self.sigma * numbers.gauss(0, 1))
        return min(max(round(drawn), self.low), self.high)


@dataclass(frozen=True)
class Ask:
    """One request: a prompt, how many tokens to make, and the seed of their draws."""

    prompt: str | list[int]
    output: int
    seed: int


@dataclass(frozen=True)
class Row:
    """A line of a file of requests; what it leaves out is drawn."""

    prompt: str | list[int] | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def read_rows(path: str) -> list[Row]:
    """JSON lines of `prompt` (text or ids) or `prompt_tokens`, and `output_tokens`.

    Raises:
        DataError: names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise DataError(f"cannot read {path}: {reason}; give a file of JSON lines") from None
    rows = [_row(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DataError(f"{path} has no requests; give one JSON object a line")
    return rows


def _row(line: str, where: str) -> Row:
    known = ("prompt", "prompt_tokens", "output_tokens")
    try:
        found = json.loads(line)
    except ValueError:
        raise DataError(f"{where} is not JSON") from None
    if not isinstance(found, dict) or not set(found) <= set(known):
        raise DataError(f"{where} must be an object with some of {', '.join(known)} and no more")
    if "prompt" in found and "prompt_tokens" in found:
        raise DataError(f"{where} has both prompt and prompt_tokens; leave one out")
    for name in ("prompt_tokens", "output_tokens"):
        if name in found and not (type(found[name]) is int and found[name] >= 1):
            raise DataError(f"{where}: {name} must be a whole number from 1 up")
    prompt = found.get("prompt", "")
    if not (isinstance(prompt, str) or _all_whole(prompt)):
        raise DataError(f"{where}: prompt must be text or a list of token ids")
    return Row(**found)


def _all_whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def check_room(
    block_size: int, prompts: Lengths, outputs: Lengths, prefix: int, rows: Sequence[Row] = ()
) -> None:
    """Raises ConfigError if the longest request cannot fit into the model's context."""
    asked = [
        (
            len(row.prompt) if isinstance(row.prompt, list)
            else 1 if isinstance(row.prompt, str)  # the server counts its tokens
            else row.prompt_tokens or prompts.high,
            row.output_tokens or outputs.high,
        )
        for row in rows
    ] or [(prompts.high, outputs.high)]  # fmt: skip
    prompt, output = max(asked, key=sum)
    if prefix + prompt + output > block_size:
        shared = f"{prefix} shared and " if prefix else ""
        raise ConfigError(
            f"a request may have {shared}{prompt} prompt tokens and make {output}, but the model's "
            f"context holds {block_size} in all; make them shorter"
        )


class Requests:
    """An endless run of requests, the same for the same seed.

    Args:
        ids: tokens that prompts are made of.
        prefix: tokens that all prompts begin with.
        own_prefix: each prompt has a beginning of its own instead, of the same length.
        seed: of lengths and prompts; the shared beginning has `prefix_seed`.
        rows: requests to take in turn.
    """

    def __init__(
        self,
        ids: Sequence[int],
        prompts: Lengths,
        outputs: Lengths,
        *,
        seed: str,
        prefix: int = 0,
        prefix_seed: str = "",
        own_prefix: bool = False,
        rows: Sequence[Row] = (),
    ) -> None:
        self._ids = ids
        self._prompts, self._outputs = prompts, outputs
        self._numbers = random.Random(seed)
        self._prefix = prefix
        self._shared = random.Random(prefix_seed).choices(ids, k=prefix)
        self._own_prefix = own_prefix
        self._rows = rows
        self._next = 0

    def __iter__(self) -> Iterator[Ask]:
        return self

    def __next__(self) -> Ask:
        numbers = self._numbers
        row = self._rows[self._next % len(self._rows)] if self._rows else Row()
        self._next += 1
        length = row.prompt_tokens or self._prompts.draw(numbers)
        output = row.output_tokens or self._outputs.draw(numbers)
        prompt: str | list[int]
        if row.prompt is None:
            begin = numbers.choices(self._ids, k=self._prefix) if self._own_prefix else self._shared
            prompt = [*begin, *numbers.choices(self._ids, k=length)]
        else:
            prompt = row.prompt
        return Ask(prompt, output, numbers.getrandbits(62))
