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
from gpt.splitting import CHAR_PATTERN, CL100K_PATTERN, GPT4_PATTERN, PATTERNS, Splitter
from tests.nasty import mixed, pair_ranks

# What has no border that holds in every pattern.
borderless = st.text(st.sampled_from("aBslvST\u0301文ǅʰª12'"), max_size=200) | st.text(
    st.sampled_from("12५.,/!'\n\r\t"), max_size=200
)


def encoding(pattern: str) -> tiktoken.Encoding:
    """A vocabulary whose merges show where pieces end."""
    return tiktoken.Encoding(
        "test", pat_str=pattern, mergeable_ranks=pair_ranks(), special_tokens={"<|end|>": 100_000}
    )


ENCODINGS = {p: encoding(p) for p in (*PATTERNS.values(), CL100K_PATTERN, CHAR_PATTERN)}
SPLITTERS = {p: Splitter(p) for p in ENCODINGS}


def pieces_of(splitter: Splitter, segments: list[str]) -> list[str]:
    return [piece for segment in segments for piece in splitter.pieces(segment)]


@pytest.mark.parametrize("pattern", ENCODINGS)
@settings(deadline=None)
@given(text=mixed | borderless, size=st.integers(24, 60))
def test_ids_of_the_segments_are_the_ids_of_the_whole(pattern: str, text: str, size: int) -> None:
    splitter, encode = SPLITTERS[pattern], ENCODINGS[pattern].encode_ordinary
    assume(max(map(len, splitter.pieces(text)), default=0) < size // 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "SEGMENT", size)
        segments = list(splitter.segments([text]))
    assert max(map(len, segments), default=0) <= size
    assert pieces_of(splitter, segments) == list(splitter.pieces(text))
    assert [token for segment in segments for token in encode(segment)] == encode(text)


@pytest.mark.parametrize("word", ["文文Ab", "Ab'll", "aBa", "a\u0301B", "ʰAʰb", "'re", "A'S"])
def test_no_cut_is_made_where_what_follows_could_move_it(word: str) -> None:
    for pattern, splitter in SPLITTERS.items():
        for before in range(40):
            text = "1" * before + word + "1" * 60  # nowhere a blank or an end of a word
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(splitting, "SEGMENT", 40)
                segments = list(splitter.segments([text]))
            assert len(segments) > 1
            if pattern != PATTERNS["gpt2"]:  # where all the digits are one piece
                assert pieces_of(splitter, segments) == list(splitter.pieces(text)), pattern


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


@pytest.mark.parametrize("pattern", PATTERNS.values())
@settings(deadline=None)
@given(before=mixed, after=mixed)
def test_only_the_long_piece_itself_is_cut(pattern: str, before: str, after: str) -> None:
    splitter, encode = SPLITTERS[pattern], ENCODINGS[pattern].encode_ordinary
    limit = 40
    text = before + "a" * 2 * limit + after
    pieces = list(splitter.pieces(text))
    assume(sum(len(piece) >= 2 * limit for piece in pieces) == 1)
    expected = []
    for piece in pieces:
        step = limit if len(piece) >= 2 * limit else len(piece)
        expected += [piece[i : i + step] for i in range(0, len(piece), step)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "MAX_PIECE", limit)
        segments = list(splitter.segments([text]))
    ids = [token for segment in segments for token in encode(segment)]
    assert ids == [token for piece in expected for token in encode(piece)]


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
        (r"(?|a|b)|(?s:.)", "not valid: .*Unknown group flag"),  # Python has more than Rust
        (r"\p{L}+|\X", "not valid: .*Invalid escape"),
        (r"(?R)|(?s:.)", "calls itself"),
        (r"(a)(?1)|(?s:.)", "calls itself"),
        (r"(?P<n>a)(?&n)|(?s:.)", "calls itself"),
        (r"(?P<n>a(?P>n)?)|(?s:.)", "calls itself"),
        (r"(a\g<1>?)|(?s:.)", "calls itself"),
        (r"\b|(?s:.)", "matches nothing at some places"),
        (r"(?=q)|(?s:.)", "matches nothing at some places"),
        (r"(?<=x)|(?s:.)", "matches nothing at some places"),
        ("(" * 900 + ")" * 900 + "|(?s:.)", "not valid|matches nothing"),
    ],
)
def test_a_pattern_of_unbounded_cost_is_refused(pattern: str, says: str) -> None:
    """From a tokenizer file anybody could have written; found before it is compiled or used."""
    with pytest.raises(TokenizerError, match=says) as caught:
        Splitter(pattern)
    assert len(str(caught.value)) < 400


def test_a_pattern_that_would_take_for_ever_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "MAX_SECONDS", 0.05)
    splitter = Splitter(r"(?:a|aa)+$|(?s:.)")
    text = "a" * 400 + "b" * 3 * splitting.MAX_PIECE
    with pytest.raises(TokenizerError, match=r"'\(\?:a\|aa\)\+.* takes too long: over 0.05"):
        list(splitter.pieces(text))
    with pytest.raises(TokenizerError, match="takes too long"):
        list(splitter.segments([text]))
