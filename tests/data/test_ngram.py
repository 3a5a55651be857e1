"""The n-gram baseline: hand-computed, a proper distribution, and free of the tokenizer."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.data import ngram
from gpt.data.ngram import END, NGramModel, ngram_bits_per_byte, symbol_blocks
from gpt.data.prepare import prepare
from gpt.errors import DataError
from gpt.tokenizer import Tokenizer


def pack(*grams: tuple[int, ...]) -> np.ndarray:
    return np.array([sum(s << 9 * i for i, s in enumerate(reversed(g))) for g in grams])


def fit(symbols: list[int], order: int, n_symbols: int) -> NGramModel:
    return NGramModel(order, n_symbols).fit(iter([np.array(symbols)]))


def test_unigrams_by_hand() -> None:
    # Counts a 2, b 1; half is taken off each: (1.5 + 0.5) / 3 and 1 spread over 4 symbols.
    model = fit([0, 0, 1], order=1, n_symbols=4)
    rest = (0.5 + 0.5) / 3 / 4
    expected = [1.5 / 3 + rest, 0.5 / 3 + rest, rest, rest]
    assert model.probabilities(pack((0,), (1,), (2,), (3,))) == pytest.approx(expected)


def test_bigrams_by_hand() -> None:
    # After the start symbol 2: 2a aa ab ba ab. Different symbols before a: 2, a, b; before b: a.
    model = fit([0, 0, 1, 0, 1], order=2, n_symbols=3)
    rest = (0.5 + 0.5) / 4 / 3
    a, b, start = 2.5 / 4 + rest, 0.5 / 4 + rest, rest
    # After a: ab twice, aa once; (1.5, 0.5) stay, 1 of 3 is left for the unigrams.
    expected = [0.5 / 3 + a / 3, 1.5 / 3 + b / 3, start / 3]
    assert model.probabilities(pack((0, 0), (0, 1), (0, 2))) == pytest.approx(expected)
    bits = model.bits(iter([np.array([1])]))
    assert bits == pytest.approx(-np.log2(0.5 * b))  # after the start only a was seen


@settings(deadline=None)
@given(
    symbols=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    order=st.integers(1, 4),
    context=st.tuples(*[st.integers(0, 3)] * 3),
)
def test_probabilities_sum_to_one(symbols: list[int], order: int, context: tuple[int, ...]) -> None:
    model = fit(symbols, order, n_symbols=4)
    grams = pack(*((*context, s)[-order:] for s in range(4)))
    p = model.probabilities(grams)
    assert p.min() > 0
    assert p.sum() == pytest.approx(1)


def test_probabilities_sum_to_one_with_estimated_discounts() -> None:
    rng = np.random.default_rng(0)
    symbols = np.minimum(rng.geometric(0.3, 3000) - 1, 7)
    model = NGramModel(3, 8).fit(iter([symbols]))
    for context in product(range(8), repeat=2):
        grams = pack(*((*context, s) for s in range(8)))
        assert model.probabilities(grams).sum() == pytest.approx(1)
    order_1 = NGramModel(1, 8).fit(iter([symbols])).probabilities(pack(*((s,) for s in range(8))))
    assert order_1 == pytest.approx(np.bincount(symbols, minlength=8) / 3000, abs=0.002)


def test_blocks_change_nothing() -> None:
    symbols = np.random.default_rng(1).integers(0, 4, 500)
    whole = NGramModel(4, 5).fit(iter([symbols]))
    parts = NGramModel(4, 5).fit(iter(np.split(symbols, [1, 7, 100, 130, 499])))
    bits = whole.bits(iter([symbols[:50]]))
    assert parts.bits(iter(np.split(symbols[:50], [3, 20]))) == pytest.approx(bits, rel=1e-12)


def test_nothing_to_count_is_a_data_error() -> None:
    with pytest.raises(DataError, match="no text"):
        NGramModel(2).fit(iter([]))
    with pytest.raises(ValueError, match="order 8"):
        NGramModel(8)


def test_the_figure_does_not_depend_on_the_tokenizer(tmp_path: Path) -> None:
    for i in range(25):
        (tmp_path / f"{i:02d}.txt").write_text(f"今日 {i}: the cat sat on the mat. {i * 7}\n" * 9)
    figures = [
        ngram_bits_per_byte(
            prepare(tmp_path, tokenizer=t, vocab_size=300, root=tmp_path / "d", progress=False)
        )
        for t in ("bpe", "bytes", "chars")
    ]
    assert figures[0] == pytest.approx(figures[1], rel=1e-12)
    assert figures[0] == pytest.approx(figures[2], rel=1e-12)
    assert 0.1 < figures[0] < 2


def test_symbols_are_bytes_and_document_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram, "_BLOCK", 7)
    (tmp_path / "a.txt").write_text("文a" * 30)
    (tmp_path / "b.txt").write_text("b" * 10)
    tokenizer = Tokenizer.bpe(["文a" * 30], 300)
    data = prepare(tmp_path, tokenizer=tokenizer, root=tmp_path / "d", progress=False)
    blocks = list(symbol_blocks(data.train, data.tokenizer))
    assert len(blocks) > 3
    text = ("文a" * 27).encode()
    assert np.concatenate(blocks).tolist() == [*text, END, *b"b" * 9, END]


def test_a_longer_context_predicts_regular_text_better(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abcabdabcabe" * 200)
    data = prepare(tmp_path / "t.txt", tokenizer="bytes", root=tmp_path, progress=False)
    figures = [ngram_bits_per_byte(data, order) for order in (1, 2, 4, 7)]
    assert figures == sorted(figures, reverse=True)
    assert figures[0] > 1.8
    assert figures[-1] < 0.2
