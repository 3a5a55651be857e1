"""Tokens as a person can see them: blanks and control characters shown, borders by colour or line.

For looking at only: what is printed cannot always be told from text that looks the same. JSON has
it exactly.
"""

from __future__ import annotations

import unicodedata
from typing import TextIO

from gpt.terminal import RESET

BORDER = "│"
"""Stands between tokens where there are no colours."""

# Black on five light backgrounds, so that neighbours differ; special tokens white on dark red.
_COLOURS = [f"\x1b[38;5;16;48;5;{number}m" for number in (153, 223, 157, 219, 229)]
_SPECIAL = "\x1b[1;38;5;231;48;5;88m"

_SIGNS = {" ": "·", "\t": "⇥", "\n": "⏎", "\x7f": "␡"}


def visible(data: bytes) -> str:
    """One token's bytes as printable text, line by line: after each ⏎ is a line break.

    A byte that is part of no whole character in this token is `\\xNN`; a character that shows
    nothing, or would play tricks on a terminal, is its control picture or `\\uNNNN`.
    """
    text = data.decode("utf-8", errors="backslashreplace")
    if text.isprintable() and " " not in text and not unicodedata.combining(text[:1] or " "):
        return text
    shown = "".join(map(_shown, text))
    # A mark would be drawn over the last character of the token before.
    return f"◌{shown}" if unicodedata.combining(text[:1] or " ") else shown


def _shown(char: str) -> str:
    if sign := _SIGNS.get(char):
        return f"{sign}\n" if char == "\n" else sign
    if char < " ":
        return chr(0x2400 + ord(char))
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


class PieceWriter:
    """Writes tokens one after another."""

    def __init__(self, out: TextIO, colour: bool) -> None:
        self._out = out
        self._colour = colour
        self._count = 0
        self._line_is_empty = True

    def write(self, data: bytes, *, special: bool = False) -> None:
        """One token; the bytes of a special one are its name."""
        text = visible(data)
        if self._colour:
            style = _SPECIAL if special else _COLOURS[self._count % len(_COLOURS)]
            # Up to the end of each line: a background would run on to the terminal's edge.
            lines = text.split("\n")
            self._out.write("\n".join(f"{style}{line}{RESET}" if line else "" for line in lines))
        else:
            self._out.write(text if self._line_is_empty else BORDER + text)
        self._line_is_empty = text.endswith("\n") if text else self._line_is_empty
        self._count += 1

    def end(self) -> None:
        """End the line, if there is anything on it."""
        if not self._line_is_empty:
            self._out.write("\n")
            self._line_is_empty = True


def readable(text: str) -> str:
    """Text for a terminal: line ends and tabs stay, what plays tricks on it is shown as a sign."""
    if text.isprintable():
        return text
    return "".join(char if char in "\n\t" or char.isprintable() else _shown(char) for char in text)
