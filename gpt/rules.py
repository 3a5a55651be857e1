"""How a vocabulary of another make differs from one whose ids are its ranks and whose text is taken
as it comes; and what is done to text before it is split."""

from __future__ import annotations

import functools
import itertools
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import regex

from gpt.errors import TokenizerError

NORMALIZERS = ("", "nfc", "blank")
PREFIXES = ("", "each", "missing", "first")

BLANK = "\u2581"
"""What vocabularies of the SentencePiece kind write for a space."""

After: TypeAlias = Literal["", "token", "text"]
"""What stands before a stretch of text: nothing, a special token, or text of the same document."""


@dataclass(frozen=True)
class Rules:
    """What an imported vocabulary asks for.

    Attributes:
        order: ids of the tokens that take part in merging, those that merge first before others.
            The rest are only decoded. None: all, in order of their ids.
        characters: merging begins with characters instead of bytes; one without a token becomes
            the tokens of its bytes.
        normalizer: what text goes through: `nfc`, or `blank`, where U+2581 means a space.
        prefix: which stretches of text between special tokens get a space before them: `each`;
            `missing`, those that do not begin with one; `first`, the one that begins the text,
            if it does not begin with one.
        always: names of tokens that are taken as such wherever they stand in a text.
    """

    order: tuple[int, ...] | None = None
    characters: bool = False
    normalizer: str = ""
    prefix: str = ""
    always: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises TokenizerError for a normalizer or prefix that there is not."""
        for field, value, known in (
            ("normalizer", self.normalizer, NORMALIZERS),
            ("prefix", self.prefix, PREFIXES),
        ):
            if value not in known:
                raise TokenizerError(
                    f"the tokenizer's {field} is {repr(value)[:40]}, but must be one of "
                    f"{', '.join(map(repr, known))}"
                )

    def prepared(self, chunks: Iterable[str], after: After = "") -> Iterator[str]:
        """A stretch of text as it is to be split, in chunks of any size.

        Args:
            after: what stands before the stretch.
        """
        if self.normalizer == "nfc":
            chunks = composed(chunks)
        elif self.normalizer == "blank":
            chunks = (chunk.replace(BLANK, " ") for chunk in chunks)
        wanted = after == "" if self.prefix == "first" else after != "text" and bool(self.prefix)
        for chunk in chunks:
            if wanted and chunk:
                wanted = False
                if self.prefix == "each" or chunk[0] != " ":
                    yield " "
            yield chunk


def composed(chunks: Iterable[str]) -> Iterator[str]:
    """The canonical composition (NFC) of text in chunks; where they end does not matter."""
    held: list[str] = []
    for chunk in chunks:
        border = _last_border(chunk)
        if border is None:
            held.append(chunk)
        else:
            yield unicodedata.normalize("NFC", "".join(held) + chunk[:border])
            held = [chunk[border:]]
    yield unicodedata.normalize("NFC", "".join(held))


def _last_border(text: str) -> int | None:
    """Index of the last character that no character before it can change."""
    # Below U+0300 nothing combines with what stands before; ordinary text needs no more.
    for i in range(len(text) - 1, max(-1, len(text) - 9), -1):
        if text[i] < "\u0300":
            return i
    found = _borders().search(text)
    return None if found is None else int(found.start())


@functools.cache
def _borders() -> regex.Pattern[str]:
    """Finds from the end a character that begins anew: neither a mark, nor the second part of a
    pair that composes."""
    joined = set()
    for char in map(chr, itertools.chain(range(0xD800), range(0xE000, sys.maxunicode + 1))):
        if unicodedata.combining(char):
            joined.add(char)
        parts = unicodedata.decomposition(char)
        if parts and not parts.startswith("<"):
            joined.update(chr(int(part, 16)) for part in parts.split()[1:])
    # Vowels and final consonants of Korean, which compose by arithmetic.
    joined.update(map(chr, [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]))
    # A character that is itself not composed may begin with one of them.
    for char in map(chr, range(0x300, sys.maxunicode + 1)):
        if not 0xD800 <= ord(char) < 0xE000 and unicodedata.normalize("NFC", char) != char:
            joined.add(char)
    return regex.compile(rf"(?r)[^{regex.escape(''.join(sorted(joined)))}]")
