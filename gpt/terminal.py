"""Whether a stream is a terminal that shows colours, and the little that is coloured."""

from __future__ import annotations

import os
import unicodedata
from typing import TextIO

DIM, RED, RESET = "\x1b[2m", "\x1b[31m", "\x1b[0m"


def shows_colour(stream: TextIO) -> bool:
    """Not into a pipe or a file, not if NO_COLOR is set (https://no-color.org), not on a terminal
    that cannot."""
    return (
        stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") != "dumb"
    )


def dim(text: str, on: bool = True) -> str:
    return f"{DIM}{text}{RESET}" if on and text else text


def red(text: str, on: bool = True) -> str:
    return f"{RED}{text}{RESET}" if on and text else text


def printable(text: str) -> str:
    """Text without what would command the terminal: a model can make any character."""
    return text if text.isprintable() else "".join(map(_harmless, text))


def _harmless(char: str) -> str:
    commands = unicodedata.category(char) == "Cc" and char not in "\n\t"
    return "\N{REPLACEMENT CHARACTER}" if commands else char


def width(text: str) -> int:
    """Columns that printable text takes; East Asian wide characters take two."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def padded(text: str, columns: int) -> str:
    return text + " " * (columns - width(text))
