"""Amounts and values as people write them."""

from __future__ import annotations

from typing import Any


def size(count: float) -> str:
    """Bytes for people."""
    for unit, each in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= each:
            return (
                f"{count / each:.3g} {unit}"
                if count < 999.5 * each
                else f"{count / each:.0f} {unit}"
            )
    return f"{count:.0f} B"


def number(count: float) -> str:
    """FLOPs for people."""
    for unit, each in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= each:
            return f"{count / each:.3g} {unit}FLOP"
    return f"{count:.0f} FLOP"


def shown(value: Any) -> str:
    """A value as a person would write it, without braces and quotes."""
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {shown(each)}" for name, each in value.items())
    if isinstance(value, list):
        return (
            "; ".join(map(shown, value))
            if any(isinstance(each, dict) for each in value)
            else (", ".join(map(shown, value)) or "none")
        )
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
