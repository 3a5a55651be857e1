"""Ids to text as it comes: whole characters, stop strings, reasons to end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.stream import FinishReason, TextStream


class Pieces:
    """A vocabulary of given pieces; the id after them is end-of-text."""

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]

    @property
    def eot(self) -> int:
        return len(self.pieces)

    @property
    def end_ids(self) -> frozenset[int]:
        return frozenset([self.eot])

    def token_bytes(self, token: int, /) -> bytes:
        return self.pieces[token]


def run(pieces: list[str | bytes], stop: list[str] | None = None) -> tuple[list[str], TextStream]:
    """Push all pieces (the last one is the last allowed) or as many as the stream wants."""
    stream = TextStream(Pieces(*pieces), stop or [])
    deltas = []
    for i in range(len(pieces)):
        deltas.append(stream.push(i, last=i == len(pieces) - 1))
        if stream.finish_reason:
            break
    return deltas, stream


def test_no_half_character_is_ever_shown() -> None:
    """S1: four-, two-, three- and three-byte characters, one byte a token."""
    text = "🌶ďЖ한"
    deltas, _ = run([bytes([b]) for b in text.encode()])
    assert deltas == ["", "", "", "🌶", "", "ď", "", "Ж", "", "", "한"]


def test_a_text_cut_inside_a_character_is_flushed_once() -> None:
    """S2."""
    data = "a🌶".encode()[:3]
    deltas, stream = run([bytes([b]) for b in data])
    assert deltas == ["a", "", "\ufffd"]
    assert "".join(deltas) == data.decode(errors="replace")
    assert stream.finish_reason is FinishReason.LENGTH


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    """S3."""
    deltas, stream = run(["ABC", "DEF", "G", "HI", "J"], ["DEFGHIJ"])
    assert deltas == ["ABC", "", "", "", ""]
    assert stream.finish_reason is FinishReason.STOP
    assert stream.matched_stop == "DEFGHIJ"


def test_what_was_held_back_in_vain_comes_out() -> None:
    deltas, stream = run(["ABC", "DEF", "G", "x", "DE"], ["DEFGHIJ"])
    assert deltas == ["ABC", "", "", "DEFGx", "DE"]
    assert stream.finish_reason is FinishReason.LENGTH


def test_no_more_is_held_back_than_could_begin_a_stop_string() -> None:
    assert run(["xxA", "B", "A", "z"], ["ABAC"])[0] == ["xx", "", "", "ABAz"]
    assert run(["aaaa", "b"], ["aab"])[0] == ["aa", ""]


def test_a_stop_string_need_not_align_with_tokens() -> None:
    """S4."""
    deltas, stream = run([" Paris", "!"], ["Pari"])
    assert deltas == [" "]
    assert stream.matched_stop == "Pari"


def test_of_two_stop_strings_the_one_completed_first_wins_then_the_longest() -> None:
    assert run(["abcd"], ["abcd", "bc"])[0] == ["a"]
    deltas, stream = run(["abc"], ["bc", "abc"])
    assert deltas == [""]
    assert stream.matched_stop == "abc"


def test_end_of_text_ends_the_text_and_adds_nothing() -> None:
    vocabulary = Pieces("a", b"\xf0\x9f")
    stream = TextStream(vocabulary, ["ab"])
    assert stream.push(0, last=False) == ""
    assert stream.push(1, last=False) == ""  # nothing complete yet, so "a" may still begin "ab"
    assert stream.push(vocabulary.eot, last=False) == "a\ufffd"
    assert stream.finish_reason is FinishReason.END_OF_TEXT
    with pytest.raises(ValueError, match="over"):
        stream.push(0, last=True)


def test_stop_strings_of_many_scripts() -> None:
    deltas, stream = run([bytes([b]) for b in "你好，世界。再见".encode()], ["世界。"])
    assert "".join(deltas) == "你好，"
    assert stream.matched_stop == "世界。"


@settings(max_examples=300)
@given(st.binary(max_size=30), st.data())
def test_deltas_join_to_the_whole_decode(data: bytes, draw: st.DataObject) -> None:
    """Any bytes, cut anywhere: what a client joins is what it would have decoded at once."""
    if not data:
        return
    borders = sorted(draw.draw(st.sets(st.integers(1, len(data) - 1))) if len(data) > 1 else [])
    pieces = [data[a:b] for a, b in zip([0, *borders], [*borders, len(data)], strict=True)]
    deltas, stream = run(list(pieces))
    assert "".join(deltas) == data.decode(errors="replace")
    assert all(delta.encode() for delta in deltas if delta)
    assert stream.finish_reason is FinishReason.LENGTH


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The oracle: look at every prefix of the text."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500)
@given(
    st.text("ab🌶", max_size=12),
    st.lists(st.text("ab🌶", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_stop_strings_do_not_depend_on_the_cut(
    text: str, stops: list[str], draw: st.DataObject
) -> None:
    data = text.encode()
    if not data:
        return
    borders = sorted(draw.draw(st.sets(st.integers(1, len(data) - 1))) if len(data) > 1 else [])
    pieces = [data[a:b] for a, b in zip([0, *borders], [*borders, len(data)], strict=True)]
    deltas, stream = run(list(pieces), stops)
    assert ("".join(deltas), stream.matched_stop) == cut_at_stop(text, stops)
