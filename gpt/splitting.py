"""Where text may be cut before it reaches the tokenizer, so that any amount of it can be encoded.

A tiktoken encoding first splits text into pieces by a regular expression, then merges bytes within
each piece; nothing merges across the border of two pieces. Text that is cut at such a border
therefore gives the same ids as the whole, and a file of any size can be encoded bit by bit.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

import regex
import tiktoken

from gpt.errors import TokenizerError

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The split of GPT-2's tokenizer: words, numbers and runs of punctuation, each with the space
before it; English contractions in lower case."""

_GPT4_WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
GPT4_PATTERN = rf"{_GPT4_WORDS}|\s*[\r\n]|\s+(?!\S)|\s+"
"""The split of GPT-4's tokenizer: words with the space before them, at most three digits together,
runs of punctuation, line ends. Every character belongs to some piece."""

CL100K_PATTERN = rf"{_GPT4_WORDS}|\s++$|\s*[\r\n]|\s+(?!\S)|\s+"
"""The same as tiktoken has it in `cl100k_base`, where all blanks at the end of a text are one
piece."""

_RISING = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_FALLING = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'(?:[sdmt]|ll|ve|re))?"
O200K_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_RISING}*{_FALLING}+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_RISING}+{_FALLING}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The split of GPT-4o's tokenizer: a word ends where a capital follows a small letter, has its
combining marks in it and its contraction at its end."""

PATTERNS = {"gpt2": GPT2_PATTERN, "gpt4": GPT4_PATTERN, "o200k": O200K_PATTERN}
"""The split patterns that have a name."""

CHAR_PATTERN = r"(?s:.)"
"""Every character is a piece of its own."""

SEGMENT = 1 << 18
"""Most characters that are handed to tiktoken at once."""

MAX_PIECE = 1 << 13
"""A piece at least twice as long as this is cut into bits of this many characters."""

# Borders that hold in GPT-2's split and all its descendants, whatever stands around them: before a
# blank that follows something visible, and after a word unless an apostrophe or more of it follows.
_BORDER = regex.compile(r"(?<=\S) |(?<=\p{L})[^\p{L}\p{M}\p{N}']")
# For patterns that let a word and what follows it be one piece: only the first of the two.
_BLANK_BORDER = regex.compile(r"(?<=\S) ")
_LAST_BORDERS = {
    border: regex.compile(rf"(?r){border.pattern}") for border in (_BORDER, _BLANK_BORDER)
}
_WORD_ENDS = "ab.c;d-e_f/g(h)é!漢。i\u2026 j\tk\nl"
"""Words with something else than a blank after them."""
_LAST_UNRISING = regex.compile(r"(?r)[^\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]")

# Something of every branch that a split pattern may have: a pattern must not lose any of it.
# Each character of ASCII besides, for a pattern that matches nothing before one of them alone.
_PROBE = (
    "It's 12345 naïve\tcafés…  \r\n\n 漢字、かな ﷺ e\u0301 🙂\u200d !?\x00\x1f\x85\u2028_x \n"
    + "".join(map(chr, range(128)))
)


def split_pattern(name: str) -> str:
    """The regular expression of that name in `PATTERNS`; one that is written out is given back.

    Raises:
        TokenizerError: a bare word that is no name of a pattern.
    """
    if name in PATTERNS:
        return PATTERNS[name]
    if regex.fullmatch(r"[\w .-]*", name):  # nothing that a pattern for any text could do with
        near = difflib.get_close_matches(name, PATTERNS, n=1)
        hint = f"did you mean {near[0]}?" if near else "give one of them, or a regular expression"
        raise TokenizerError(
            f"the split pattern {name[:80]!r} is unknown (there are {', '.join(PATTERNS)}); {hint}"
        )
    return name


MAX_PATTERN = 2000
"""Characters of a split pattern; those in use have under 300."""
MAX_REPEATS = 10_000
"""Product of a pattern's counted repeats: what a regex engine unrolls them to."""


MAX_SECONDS = 10
"""Processor time for the pieces of a segment by a pattern of unknown make; ordinary ones take a
thousandth of it, and some that try every way to match would take for ever."""

_SUBROUTINE = regex.compile(r"\(\?(?:R|&|P>|[+-]?\d)|\\g[<'{\d+-]")

_KNOWN = frozenset([*PATTERNS.values(), CL100K_PATTERN, CHAR_PATTERN])


def _refused(pattern: str) -> str:
    """What tiktoken has against a pattern that is good in Python; empty if nothing. The engine that
    rustbpe learns with is the same."""
    try:
        tiktoken.Encoding("check", pat_str=pattern, mergeable_ranks={b"a": 0}, special_tokens={})
    except ValueError as error:
        return " ".join(str(error).split())[:200]
    return ""


def _repeats(pattern: str) -> int:
    """The product of all counts in `{m}` and `{m,n}`, capped."""
    product = 1
    for low, high in regex.findall(r"\{(\d+)(?:,(\d*))?\}", pattern):
        product *= max(1, int((high or low)[:9]))
        if product > MAX_REPEATS:
            break
    return product


class Splitter:
    """One split pattern and the cuts that go with it.

    Exact for those in `PATTERNS` and for all without look-behind that, like them, never join a word
    or a visible character with the blank after it. `CHAR_PATTERN` may be cut anywhere.
    """

    def __init__(self, pattern: str) -> None:
        """Raises TokenizerError for a pattern that is not one, or that drops some text."""
        shown = repr(pattern)[:80]
        if len(pattern) > MAX_PATTERN or _repeats(pattern) > MAX_REPEATS:
            raise TokenizerError(
                f"the split pattern {shown} is too large: at most {MAX_PATTERN} characters, and "
                f"counted repeats that multiply to at most {MAX_REPEATS}"
            )
        if _SUBROUTINE.search(pattern):
            raise TokenizerError(
                f"the split pattern {shown} calls itself or a group of its own (as (?R), (?1) and "
                "(?&name) do), which need not end; write out what is meant"
            )
        self._timeout = None if pattern in _KNOWN else MAX_SECONDS
        # Before Python's engine, which can take what the other refuses, and take for ever over it.
        if pattern not in _KNOWN and (reason := _refused(pattern)):
            raise TokenizerError(f"the split pattern {shown} is not valid: {reason}")
        self.pattern = pattern
        try:
            self._compiled = regex.compile(pattern)
        except (regex.error, TypeError, RecursionError, MemoryError) as error:
            raise TokenizerError(f"the split pattern {shown} is not valid: {error}") from None
        if any(self._matches("")):
            raise TokenizerError(f"the split pattern {shown} matches nothing at all; it must not")
        pieces = list(self.pieces(_PROBE))
        if "".join(pieces) != _PROBE:
            raise TokenizerError(
                f"the split pattern {pattern!r} leaves some characters out; every character must "
                r"belong to a piece (end the pattern with |\s+|.)"
            )
        if not all(pieces):
            raise TokenizerError(
                f"the split pattern {shown} matches nothing at some places, between two pieces; "
                "every match must have a character at least"
            )
        self.by_character = pattern == CHAR_PATTERN
        starts = {match.start() for match in self._matches(_WORD_ENDS)}
        holds = all(match.start() in starts for match in _BORDER.finditer(_WORD_ENDS))
        self._border = _BORDER if holds else _BLANK_BORDER

    def pieces(self, text: str) -> Iterator[str]:
        """The pieces of `text` in order. Bytes merge within a piece only."""
        return (match.group() for match in self._matches(text))

    def _matches(self, text: str) -> Iterator[regex.Match[str]]:
        """Raises TokenizerError where the pattern takes far too long."""
        try:
            yield from self._compiled.finditer(text, timeout=self._timeout)
        except TimeoutError:
            raise TokenizerError(
                f"the split pattern {repr(self.pattern)[:80]} takes too long: over {MAX_SECONDS} "
                f"seconds for {len(text)} characters; write it without repeats of what can match "
                "the same text in several ways"
            ) from None

    def segments(self, chunks: Iterable[str]) -> Iterator[str]:
        """The same text in segments that can be encoded one by one.

        The ids do not depend on how the text came in chunks, and for ordinary text they are those
        of the whole at once. The one exception is a piece of `2 * MAX_PIECE` characters or more
        (thousands of letters without a blank or punctuation, or nothing but blanks): it is cut,
        because the regular expression engine overflows its stack on blanks by the million, and in
        some versions of tiktoken the time to merge a piece grows with its length squared.
        """
        for window in self._windows(chunks):
            yield from self._without_long_pieces(window)

    def _windows(self, chunks: Iterable[str]) -> Iterator[str]:
        held: list[str] = []
        size = 0
        for chunk in chunks:
            held.append(chunk)
            size += len(chunk)
            if size <= SEGMENT:
                continue
            text = "".join(held)
            start = 0
            # One character beyond the segment is in view, so that a border at its end is seen.
            while len(text) - start > SEGMENT:
                cut = start + self._cut(text[start : start + SEGMENT + 1])
                yield text[start:cut]
                start = cut
            held = [text[start:]]
            size = len(text) - start
        if size:
            yield "".join(held)

    def _cut(self, window: str) -> int:
        """Where to cut a window of SEGMENT + 1 characters: at the last border, 1 to SEGMENT."""
        if self.by_character:
            return SEGMENT
        if border := _LAST_BORDERS[self._border].search(window):
            return int(border.start())
        # No blank and no end of a word in all of it: numbers line by line, say. Any piece may begin
        # the next segment if what follows the window cannot change where it begins: a contraction
        # of up to three characters, or the first small letter after capitals.
        visible = _LAST_UNRISING.search(window)
        settled = min(visible.start() if visible else 0, len(window) - 3)
        cut = SEGMENT  # in the midst of a piece, where nothing better is found
        for match in self._matches(window):
            # What comes before a cut must not end in blanks: they would be the end of their text.
            if 0 < match.start() <= settled and not window[match.start() - 1].isspace():
                cut = match.start()
        return cut

    def _without_long_pieces(self, segment: str) -> Iterator[str]:
        blocks = range(0, len(segment) - MAX_PIECE + 1, MAX_PIECE)
        # A piece of twice the length covers a whole aligned block, and no border can be in there.
        if self.by_character or all(self._border.search(segment, i, i + MAX_PIECE) for i in blocks):
            yield segment
            return
        start = solid = 0
        blanks: list[str] = []  # pieces from `solid` on, which end in blanks
        for match in self._matches(segment):
            if match.end() - match.start() >= 2 * MAX_PIECE:
                if start < solid:
                    yield segment[start:solid]
                # One by one: together they would be the end of a text, where a pattern may take
                # blanks otherwise than before something visible.
                yield from blanks
                for i in range(match.start(), match.end(), MAX_PIECE):
                    yield segment[i : min(i + MAX_PIECE, match.end())]
                start = solid = match.end()
                blanks = []
            elif segment[match.end() - 1].isspace():
                blanks.append(match.group())
            else:
                solid = match.end()
                blanks = []
        if start < len(segment):
            yield segment[start:]


def utf8(text: str, offset: int) -> bytes:
    """UTF-8 of `text`. Raises TokenizerError, where tiktoken would put U+FFFD and say nothing."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text holds half of a surrogate pair (U+{ord(text[error.start]):04X}) at offset "
            f"{offset + error.start}, which is no character; decode the text as UTF-8 first"
        ) from None
