"""What several rounds of a load come to: percentiles, rates, goodput, and ratios of rows."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from serve.bench.drive import Seen

PERCENTS = (50, 90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that is at least as large as so many of a hundred; None of none."""
    if not values:
        return None
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


@dataclass(frozen=True)
class Limits:
    """What a text must keep to count as good: seconds to the first token, and from token to token
    on the average from there on. None: no limit."""

    first: float | None
    gap: float | None

    def keeps(self, first: float, gap: float) -> bool:
        return (self.first is None or first <= self.first) and (self.gap is None or gap <= self.gap)


def summary(name: str, rounds: Sequence[Seen], limits: Limits) -> dict[str, Any]:
    """Plain data of a row. Percentiles are of all rounds together; rates have one value a round."""

    def rate(count: Callable[[Seen], int]) -> dict[str, Any]:
        values = [count(seen) / seen.seconds for seen in rounds]
        return {"median": statistics.median(values), "rounds": values}

    def spread(values: Sequence[float]) -> dict[str, Any]:
        found = {f"p{percent}": percentile(values, percent) for percent in PERCENTS}
        return {**found, "count": len(values)}

    errors: Counter[str] = sum((seen.errors for seen in rounds), Counter())
    messages = sum(seen.messages for seen in rounds)
    return {
        "row": name,
        "tokens_per_s": rate(lambda seen: seen.tokens),
        "prompt_tokens_per_s": rate(lambda seen: seen.prompt_tokens),
        "texts_per_s": rate(lambda seen: len(seen.whole)),
        "good_texts_per_s": rate(lambda seen: sum(limits.keeps(*text) for text in seen.texts)),
        "first_token_s": spread([value for seen in rounds for value in seen.first]),
        "between_tokens_s": spread([value for seen in rounds for value in seen.gaps]),
        "whole_s": spread([value for seen in rounds for value in seen.whole]),
        "tokens_per_message": sum(seen.tokens for seen in rounds) / messages if messages else None,
        "errors": dict(errors),
        "cut_off": sum(seen.cut for seen in rounds),
        "long_prompts": sum(seen.long for seen in rounds),
    }


def ratio(above: dict[str, Any], below: dict[str, Any]) -> tuple[float, float, float] | None:
    """Tokens/s of a row as a multiple of another's: of the medians, and the least and the most of
    the rounds, of which those with the same number ran beside each other."""
    pairs = list(
        zip(above["tokens_per_s"]["rounds"], below["tokens_per_s"]["rounds"], strict=False)
    )
    if not pairs or any(b == 0 for _, b in pairs):
        return None
    each = [a / b for a, b in pairs]
    return statistics.median(each), min(each), max(each)
