"""Squares of numbers as pictures: of characters for a terminal, or of grey dots in a PNG file."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from gpt.errors import UserError
from gpt.files import write_atomically

SHADES, PLAIN_SHADES = " ░▒▓█", " .:*#"
"""From nothing to all; the plain ones for terminals that have no others."""

FUTURE = 0.85
"""Grey of what no query may see."""


def terminal_shades() -> str:
    """The shades that standard output can show."""
    wide = (sys.stdout.encoding or "").lower().startswith("utf")
    return SHADES if wide else PLAIN_SHADES


def write_grey(path: Path, grey: Any) -> None:
    """Write a PNG file, one pixel for each number of a matrix, 0 (black) to 1 (white).

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.image import imsave

    data = io.BytesIO()
    imsave(data, grey, format="png", cmap="gray", vmin=0.0, vmax=1.0)
    try:
        write_atomically(path, data.getvalue())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
