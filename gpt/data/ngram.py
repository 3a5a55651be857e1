"""The yardstick: how well a byte-level n-gram model predicts the held-out text.

A GPT has learned something only where it beats counting. This is interpolated modified Kneser-Ney
smoothing (Chen & Goodman 1999, section 3.3) over bytes: the probability of a symbol after its last
`order - 1` symbols, backed off to ever shorter contexts and at last to the uniform distribution.
End-of-text is a symbol of its own, the 257th: it is predicted and paid for once a document, exactly
as a GPT's loss counts it, and the text is taken to begin after one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gpt.data.shards import PreparedData, TokenArray
from gpt.errors import DataError
from gpt.tokenizer import Tokenizer

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

END = 256
"""The symbol for end-of-text."""

_BITS = 9
_BLOCK = 1 << 20


class NGramModel:
    """Counts of all n-grams up to an order, and the probabilities they give.

    An n-gram is packed into an int64, nine bits a symbol, the newest lowest: its context is the key
    shifted right once, the shorter n-gram without its oldest symbol the key's low bits.
    """

    def __init__(self, order: int = 5, n_symbols: int = 257) -> None:
        """An untrained model.

        Args:
            order: symbols in the longest n-gram, 1 to 7.
            n_symbols: size of the alphabet, at most 512. The start of the text stands behind
                symbols `n_symbols - 1`.
        """
        if not (1 <= order <= 7 and 1 <= n_symbols <= 1 << _BITS):
            raise ValueError(f"order {order} or n_symbols {n_symbols} is out of range")
        self.order = order
        self.n_symbols = n_symbols
        self._levels: list[_Level] = []

    def fit(self, blocks: Iterator[Ints]) -> NGramModel:
        """Count the n-grams of a stream of symbols that comes in blocks. Returns the model."""
        runs = []  # sorted keys and their counts, each run longer than the next
        for block in self._grams(blocks):
            runs.append(_merge(block, np.ones(len(block), np.int64)))
            # Merging only runs of like length keeps the work near n log n for any size of text.
            while len(runs) > 1 and len(runs[-2][0]) <= 2 * len(runs[-1][0]):
                runs[-2:] = [_merge_runs(runs[-2:])]
        if not runs:
            raise DataError("there is no text to count n-grams in")
        keys, counts = _merge_runs(runs)
        self._levels = [_Level(keys, counts)]
        for length in range(self.order - 1, 0, -1):
            # Below the longest, an n-gram counts once for each different symbol before it.
            keys, counts = _merge(keys & _mask(length), np.ones(len(keys), np.int64))
            self._levels.insert(0, _Level(keys, counts))
        return self

    def probabilities(self, grams: Ints) -> Floats:
        """Probability of the newest symbol of each packed n-gram, given the rest of it.

        Args:
            grams: (N,) packed n-grams of `order` symbols.

        Returns:
            (N,) probabilities; for a fixed context they sum to 1 over the alphabet.
        """
        p = np.full(len(grams), 1 / self.n_symbols)
        for length, level in enumerate(self._levels, start=1):
            p = level.interpolate(grams & _mask(length), p)
        return p

    def bits(self, blocks: Iterator[Ints]) -> float:
        """Bits in all that the symbols of a stream cost under this model."""
        return float(
            sum(-np.log2(self.probabilities(block)).sum() for block in self._grams(blocks))
        )

    def _grams(self, blocks: Iterator[Ints]) -> Iterator[Ints]:
        """The packed n-gram that ends at each symbol of a stream."""
        history = np.full(self.order - 1, self.n_symbols - 1, np.int64)
        for block in blocks:
            symbols = np.concatenate([history, block])
            grams = np.zeros(len(block), np.int64)
            for i in range(self.order):
                grams = (grams << _BITS) | symbols[i : i + len(block)]
            history = symbols[len(block) :]
            yield grams


class _Level:
    """All n-grams of one length: sorted keys, discounted counts, and what each context leaves."""

    def __init__(self, keys: Ints, counts: Ints) -> None:
        self._keys = keys
        discount = _discounts(counts)[np.minimum(counts, 3)]
        contexts = keys >> _BITS
        first = np.flatnonzero(np.diff(contexts, prepend=-1))
        self._contexts = contexts[first]
        total = np.add.reduceat(counts, first)
        # Dividing here, once an n-gram, spares it once a query.
        sizes = np.diff(first, append=len(keys))
        self._share = (counts - discount) / np.repeat(total, sizes)
        self._rest = np.add.reduceat(discount, first) / total

    def interpolate(self, grams: Ints, lower: Floats) -> Floats:
        """Probabilities at this length, from those one symbol shorter."""
        share = _look_up(self._keys, self._share, grams, 0.0)
        # A context that was never seen leaves all of the probability to the shorter one.
        rest = _look_up(self._contexts, self._rest, grams >> _BITS, 1.0)
        return share + rest * lower


def ngram_bits_per_byte(data: PreparedData, order: int = 5) -> float:
    """Held-out bits per byte of an n-gram model counted on the training split.

    Args:
        data: any prepared corpus; tokens are turned back into their bytes first, so the figure does
            not depend on the tokenizer.
        order: symbols in an n-gram.
    """
    model = NGramModel(order).fit(symbol_blocks(data.train, data.tokenizer))
    return model.bits(symbol_blocks(data.val, data.tokenizer)) / data.val_bytes


def symbol_blocks(tokens: TokenArray, tokenizer: Tokenizer) -> Iterator[Ints]:
    """The text of a split as symbols: bytes 0 to 255, and END for end-of-text; about 1M at once."""
    texts = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
    symbols = [list(text) or [END] for text in texts]
    sizes = np.array([len(one) for one in symbols], np.int64)
    table = np.array([symbol for one in symbols for symbol in one], np.int64)
    starts = np.cumsum(sizes) - sizes
    step = max(int(_BLOCK / max(float(sizes.mean()), 1.0)), 1)
    for at in range(0, len(tokens), step):
        ids = tokens[at : at + step]
        size = sizes[ids]
        ends = np.cumsum(size)
        # Within each token's run, count up from its start in the table.
        yield table[np.arange(int(ends[-1])) + np.repeat(starts[ids] - (ends - size), size)]


def _mask(length: int) -> int:
    return (1 << _BITS * length) - 1


def _merge(keys: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Sorted different keys, with the counts of equal ones added."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[first], np.add.reduceat(counts[order], first)


def _merge_runs(runs: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    keys, counts = zip(*runs, strict=True)
    return _merge(np.concatenate(keys), np.concatenate(counts))


def _discounts(counts: Ints) -> Floats:
    """What is taken off a count of 0, 1, 2, and 3 or more, from the counts of counts.

    Where there are too few of these to estimate from, half is taken off each.
    """
    n1, n2, n3, n4 = (int(np.count_nonzero(counts == i)) for i in (1, 2, 3, 4))
    if not (n1 and n2 and n3 and n4):
        return np.array([0.0, 0.5, 0.5, 0.5])
    y = n1 / (n1 + 2 * n2)
    estimate = [1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
    # A discount beyond the count, or below nothing, would make a negative probability.
    return np.array([0.0, *(min(max(d, 0.01), i) for i, d in enumerate(estimate, start=1))])


def _look_up(keys: Ints, values: Floats, wanted: Ints, missing: float) -> Floats:
    """`values` where `wanted` stands in the sorted `keys`, `missing` where it does not."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], missing)
