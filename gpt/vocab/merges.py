"""From merges of pairs to an order of tokens.

Hugging Face and llama.cpp merge the neighbours whose *pair* comes first in a list. tiktoken merges
those whose *union* comes first. Both give the same ids under a condition on the vocabulary alone:

Call the parts that a token's own bytes become by the merges of pairs its remains. While the two
procedures agree, what stands between the borders of two neighbours has merged as it would have
alone. So if their union is a token that remains whole, they are the last pair on its way, and that
pair is a merge; if its remains are three or more, no two neighbours ever have that union; only if
they are two, tiktoken would merge what the list does not. Tokens are therefore ranked by the last
merge on their way, and those that do not remain whole take no part in merging.

`ignore_merges` makes a word that is a token that token at once. So does tiktoken: such a vocabulary
keeps the tokens with three remains or more, and is refused if one has two.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from gpt.errors import TokenizerError

Rank = Callable[[str, str], float]
"""Of a pair; infinite if it does not merge. The lowest goes first, the leftmost of equals."""

SHORT = 64
"""Up to so many symbols it is fastest to look at all."""


def remains(symbols: Sequence[str], rank: Rank) -> tuple[list[str], tuple[str, str] | None]:
    """What merging leaves of symbols, and the last pair that was merged."""
    if len(symbols) > SHORT:
        return _long_remains(symbols, rank)
    parts = list(symbols)
    ranks = [rank(a, b) for a, b in itertools.pairwise(parts)]
    last = None
    while ranks and (best := min(ranks)) < math.inf:
        i = ranks.index(best)
        last = (parts[i], parts[i + 1])
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del ranks[i]
        if i:
            ranks[i - 1] = rank(parts[i - 1], parts[i])
        if i < len(ranks):
            ranks[i] = rank(parts[i], parts[i + 1])
    return parts, last


def _long_remains(symbols: Sequence[str], rank: Rank) -> tuple[list[str], tuple[str, str] | None]:
    size = len(symbols)
    parts = list(symbols)
    right = list(range(1, size + 1))
    left = list(range(-1, size - 1))
    heap: list[tuple[float, int, str, str]] = []

    def offer(i: int) -> None:
        if i >= 0 and right[i] < size:
            a, b = parts[i], parts[right[i]]
            if (found := rank(a, b)) < math.inf:
                heapq.heappush(heap, (found, i, a, b))

    for i in range(size - 1):
        offer(i)
    last = None
    while heap:
        _, i, a, b = heapq.heappop(heap)
        j = right[i]
        if parts[i] != a or j >= size or parts[j] != b:
            continue  # one of the two has merged otherwise since
        parts[i], parts[j] = a + b, ""
        right[i] = right[j]
        if right[i] < size:
            left[right[i]] = i
        last = (a, b)
        offer(i)
        offer(left[i])
    return [part for part in parts if part], last


def by_pairs(
    tokens: Iterable[str],
    merges: Mapping[tuple[str, str], int],
    symbols: Callable[[str], Sequence[str]],
    *,
    ignore_merges: bool = False,
) -> list[str]:
    """The tokens of two symbols and more that take part in merging, in the order they merge.

    Args:
        tokens: as they are spelled, special ones left out.
        merges: rank of each pair.
        symbols: what merging of a token's text begins with.
        ignore_merges: a word that is a token becomes it without merging.

    Raises:
        TokenizerError: an order of tokens cannot give the same ids.
    """
    ranked: list[tuple[int, str]] = []
    unranked: list[str] = []
    for token in tokens:
        first = symbols(token)
        if len(first) < 2:
            continue
        left, last = remains(first, lambda a, b: merges.get((a, b), math.inf))
        if len(left) == 1 and last is not None:
            ranked.append((merges[last], token))
        elif ignore_merges:
            if len(left) == 2:
                raise TokenizerError(
                    f"the vocabulary takes the word {token[:40]!r} as one token and leaves "
                    f"{left[0][:40]!r} and {left[1][:40]!r} apart within a word, which tiktoken "
                    "cannot do; it cannot be imported exactly"
                )
            unranked.append(token)
    return [token for _, token in sorted(ranked)] + unranked


def by_scores(scores: Mapping[str, float], symbols: Callable[[str], Sequence[str]]) -> list[str]:
    """The same for a vocabulary that merges the neighbours whose union has the highest score.

    Raises:
        TokenizerError: two tokens that merge have the same score.
    """
    found: list[tuple[float, str]] = []
    for token in scores:
        first = symbols(token)
        if len(first) < 2:
            continue
        left, _ = remains(first, lambda a, b: -scores.get(a + b, -math.inf))
        if len(left) == 1:
            found.append((-scores[token], token))
    found.sort()
    for (score, token), (other, twin) in itertools.pairwise(found):
        if score == other:
            raise TokenizerError(
                f"the tokens {token[:40]!r} and {twin[:40]!r} have the same score, so which of "
                "them merges first depends on the text; this cannot be imported exactly"
            )
    return [token for _, token in found]


def pairs_of(tokens: Mapping[bytes, int], symbols: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
    """The merges that give the ids of an order of tokens, in that order: the last pair on the way
    of each that merging reaches.

    Args:
        tokens: rank of each token.
        symbols: those that merging begins with.
    """
    names = {token: spell(token) for token in tokens}
    ranks = {names[token]: rank for token, rank in tokens.items()}
    base = set(symbols)
    found = []
    for token in sorted(tokens, key=tokens.__getitem__):
        if token in base:
            continue
        left, last = remains(first_symbols(token, base), lambda a, b: ranks.get(a + b, math.inf))
        if len(left) == 1 and last is not None:
            found.append((last[0].encode("latin-1"), last[1].encode("latin-1")))
    return found


def spell(token: bytes) -> str:
    return token.decode("latin-1")


def first_symbols(token: bytes, base: set[bytes]) -> list[str]:
    """A token cut into the symbols that it begins with: whole characters that are symbols, else
    bytes."""
    found = []
    i = 0
    while i < len(token):
        lead = token[i]
        size = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        part = token[i : i + size] if token[i : i + size] in base else token[i : i + 1]
        found.append(spell(part))
        i += len(part)
    return found
