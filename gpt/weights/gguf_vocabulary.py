"""Rows of the embedding that have no token: GGUF names as many tokens as there are rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNUSED = 5
"""GGUF's mark of a token that stands for nothing."""
_TOKENS, _KINDS, _SCORES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores"))


def _padding(index: int) -> str:
    """What converters call a row of the embedding that has no token."""
    return f"[PAD{index}]"


def padded(settings: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The tokenizer's settings with a token for every row."""
    found = dict(settings)
    more = range(len(found[_TOKENS]), rows)
    found[_TOKENS] = [*found[_TOKENS], *map(_padding, more)]
    found[_KINDS] = [*found[_KINDS], *[UNUSED for _ in more]]
    if _SCORES in found:
        found[_SCORES] = [*found[_SCORES], *[-1000.0 for _ in more]]
    return found


def without_padding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: the tokenizer's settings without unused tokens of such names at the end."""
    found = {key: value for key, value in settings.items() if key.startswith("tokenizer.")}
    tokens, kinds = found[_TOKENS], found.get(_KINDS)
    if isinstance(kinds, list) and len(kinds) == len(tokens):
        n = len(tokens)
        while n and tokens[n - 1] == _padding(n - 1) and kinds[n - 1] == UNUSED:
            n -= 1
        for key in (_TOKENS, _KINDS, _SCORES):
            if isinstance(found.get(key), list):
                found[key] = found[key][:n]
    return found
