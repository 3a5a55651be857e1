"""Special tokens: ids that stand for no bytes of a text, and their names where a text has them.

A name in a text is ordinary text unless the caller asks for it to be taken as the token: what a
user types must not steer the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence

import regex

from gpt.errors import TokenizerError

MAX_NAME = 256
"""Characters of a special token's name."""
MAX_SPECIAL = 10_000
"""Special tokens of a vocabulary; those in use have some hundreds. All are looked for at once."""
MAX_VOCAB = 1 << 22
"""Ids of a vocabulary, gaps included; the largest in use have some 260,000."""


def check_names(names: Collection[object]) -> None:
    """Raises TokenizerError for too many, or for one that is no text, empty, too long or twice."""
    if len(names) > MAX_SPECIAL:
        raise TokenizerError(
            f"there are {len(names)} special tokens, but may be at most {MAX_SPECIAL}; leave "
            "some out"
        )
    seen = set()
    for name in names:
        if not (isinstance(name, str) and 0 < len(name) <= MAX_NAME):
            raise TokenizerError(
                f"a special token needs a name of 1 to {MAX_NAME} characters, not {repr(name)[:80]}"
            )
        try:
            name.encode()
        except UnicodeEncodeError:
            raise TokenizerError(f"the special token {name!r} is no valid text") from None
        if name in seen:
            raise TokenizerError(f"the special token {name!r} is given twice; give it once")
        seen.add(name)


def check_special(special: Mapping[str, int], tokens: Sequence[bytes], end_of_text: str) -> None:
    """Raises TokenizerError for special tokens that cannot stand beside `tokens`.

    Args:
        special: ids by name.
        tokens: bytes by id; empty where there is no token.
        end_of_text: which of them ends a text.
    """
    check_names(special)
    if end_of_text not in special:
        raise TokenizerError(
            f"the end-of-text token {end_of_text!r} is not among the special tokens "
            f"({', '.join(map(repr, [*special][:8])) or 'there are none'})"
        )
    for name, token in special.items():
        if not (isinstance(token, int) and 0 <= token < MAX_VOCAB) or isinstance(token, bool):
            raise TokenizerError(
                f"the special token {name!r} has the id {repr(token)[:40]}, but ids are whole "
                f"numbers from 0 to {MAX_VOCAB - 1}"
            )
        if token < len(tokens) and tokens[token]:
            raise TokenizerError(f"the special token {name!r} has the id of another, {token}")
    if len({*special.values()}) < len(special):
        raise TokenizerError("two special tokens have the same id; each needs one of its own")


class SpecialFinder:
    """Finds names in text that comes in chunks: the leftmost first, of those the longest."""

    def __init__(self, names: Iterable[str]) -> None:
        ordered = sorted(names, key=len, reverse=True)
        self._longest = len(ordered[0])
        self._find = regex.compile("|".join(map(regex.escape, ordered)))

    def stretches(self, chunks: Iterable[str]) -> Iterator[tuple[bool, Iterator[str]]]:
        """The same text as stretches, each (whether it is names, its parts in order).

        The parts of a stretch are to be read before the next one is asked for. Where the chunks end
        does not matter: a name may be cut by a chunk's end.
        """
        for named, parts in itertools.groupby(self._parts(chunks), key=lambda part: part[0]):
            yield named, (text for _, text in parts)

    def _parts(self, chunks: Iterable[str]) -> Iterator[tuple[bool, str]]:
        held = ""
        for chunk in chunks:
            held += chunk
            # A name that begins before this place is in view with all that could be longer.
            held = yield from self._take(held, len(held) - self._longest + 1)
        yield from self._take(held, len(held))

    def _take(self, text: str, stop: int) -> Generator[tuple[bool, str], None, str]:
        """Parts of `text` up to `stop`, or to the end of a name that begins before it; returns
        what is left."""
        start = 0
        for match in self._find.finditer(text):
            if match.start() >= stop:
                break
            if match.start() > start:
                yield False, text[start : match.start()]
            yield True, match.group()
            start = match.end()
        if stop > start:
            yield False, text[start:stop]
            start = stop
        return text[start:]
