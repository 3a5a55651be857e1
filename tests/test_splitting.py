"""Cuts in the text stream: they lose nothing, and they leave the ids of ordinary text alone."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import tiktoken
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpt import splitting
from gpt.errors import TokenizerError
from gpt.splitting import CHAR_PATTERN, GPT4_PATTERN, Splitter

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SAMPLE = "aB '.!\n12 \t\n"

# Letters, marks, digits, punctuation, apostrophes and every kind of blank, in any order.
mixed = st.text(
    st.sampled_from("aBst é\u0301文、。12'’.!-_\n\r\t \u00a0\u2028\x1c🙂"), max_size=200
)


def encoding(pattern: str) -> tiktoken.Encoding:
    """A vocabulary whose merges show where pieces end."""
    pairs = [(a + b).encode() for a, b in pairwise(SAMPLE)] + [b"  ", b"\n\n", b" \n", b"\n "]
    tokens = dict.fromkeys([*(bytes([b]) for b in range(256)), *pairs])
    ranks = {token: i for i, token in enumerate(tokens)}
    return tiktoken.Encoding(
        "test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|end|>": len(ranks)}
    )


ENCODINGS = {p: encoding(p) for p in (GPT4_PATTERN, GPT2_PATTERN, CHAR_PATTERN)}
SPLITTERS = {p: Splitter(p) for p in ENCODINGS}


@pytest.mark.parametrize("pattern", ENCODINGS)
@settings(deadline=None)
@given(text=mixed, size=st.integers(16, 40))
def test_ids_of_the_segments_are_the_ids_of_the_whole(pattern: str, text: str, size: int) -> None:
    splitter, encode = SPLITTERS[pattern], ENCODINGS[pattern].encode_ordinary
    visible = "".join("x" if char.isspace() else " " for char in text).split()
    assume(max(map(len, [*splitter.pieces(text), *visible]), default=0) < size // 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "SEGMENT", size)
        segments = list(splitter.segments([text]))
    assert max(map(len, segments), default=0) <= size
    assert [token for segment in segments for token in encode(segment)] == encode(text)


@pytest.mark.parametrize("pattern", ENCODINGS)
@settings(deadline=None)
@given(text=mixed, seed=st.integers(0, 2**32), size=st.integers(1, 40))
def test_segments_do_not_depend_on_the_chunks(
    pattern: str, text: str, seed: int, size: int
) -> None:
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=5))
    chunks = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "SEGMENT", size)
        patch.setattr(splitting, "MAX_PIECE", 4)
        whole = list(SPLITTERS[pattern].segments([text]))
        assert list(SPLITTERS[pattern].segments(chunks)) == whole
    assert "".join(whole) == text


def test_a_piece_is_cut_only_from_twice_the_limit_on() -> None:
    limit = splitting.MAX_PIECE
    splitter = SPLITTERS[GPT4_PATTERN]
    just_below = "Once " + "a" * (2 * limit - 2) + " end"  # the piece is " aaa…"
    assert list(splitter.segments([just_below])) == [just_below]
    long = "Once " + "a" * 2 * limit + " end"
    assert list(map(len, splitter.segments([long]))) == [4, limit, limit, 1, 4]


def test_a_long_piece_leaves_the_ids_around_it_alone() -> None:
    encode = ENCODINGS[GPT4_PATTERN].encode_ordinary
    segments = list(SPLITTERS[GPT4_PATTERN].segments(["a B!\n" * 9, " " * 50_000, "B a 12\n"]))
    ids = [token for segment in segments for token in encode(segment)]
    around = encode("a B!\n" * 9), encode(" B a 12\n")
    assert ids[: len(around[0])] == around[0]
    assert ids[-len(around[1]) :] == around[1]


@pytest.mark.parametrize("pattern", [r"\p{L}+", r".", r"\S+| +", r"(?s:.)(?=x)"])
def test_a_pattern_that_loses_text_is_refused(pattern: str) -> None:
    with pytest.raises(TokenizerError, match="leaves some characters out"):
        Splitter(pattern)


def test_a_broken_pattern_is_refused() -> None:
    with pytest.raises(TokenizerError, match=r"'\(\(' is not valid"):
        Splitter("((")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(?:(?:a{1000}){1000})|(?s:.)", "too large"),
        ("a|" * 100_000 + "(?s:.)", "too large"),
        ("|(?s:.)", "matches nothing"),
        ("(" * 900 + ")" * 900 + "|(?s:.)", "not valid|matches nothing"),
    ],
)
def test_a_pattern_of_unbounded_cost_is_refused(pattern: str, says: str) -> None:
    """From a tokenizer file anybody could have written; found before it is compiled or used."""
    with pytest.raises(TokenizerError, match=says) as caught:
        Splitter(pattern)
    assert len(str(caught.value)) < 400
