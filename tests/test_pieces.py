"""Tokens on a terminal: all of them visible, none of them able to do anything to it."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt.pieces import PieceWriter, readable, visible


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"cat", "cat"),
        (b" cat", "·cat"),
        (b"\n\n", "⏎\n⏎\n"),
        (b"\t\r", "⇥␍"),
        (b"\x1b[31m\x7f\0", "␛[31m␡␀"),
        ("文".encode(), "文"),
        ("文".encode()[:2], "\\xe6\\x96"),
        (b"a" + "🙂".encode()[:3], "a\\xf0\\x9f\\x99"),
        ("\u00a0\u200d\u202e".encode(), "\\u00a0\\u200d\\u202e"),
        ("\U000e0001".encode(), "\\U000e0001"),
        ("\u0301x".encode(), "◌\u0301x"),
        (b"", ""),
    ],
)
def test_a_token_is_visible(data: bytes, shown: str) -> None:
    assert visible(data) == shown


@given(st.binary(max_size=12))
def test_no_bytes_reach_the_terminal_as_control_characters(data: bytes) -> None:
    assert all(char.isprintable() for char in visible(data).replace("⏎\n", ""))
    text = data.decode(errors="replace")
    assert all(char.isprintable() for char in readable(text).replace("\n", "").replace("\t", ""))


def written(tokens: list[bytes], colour: bool, special: bytes = b"") -> str:
    out = io.StringIO()
    writer = PieceWriter(out, colour)
    for token in tokens:
        writer.write(token, special=token == special)
    writer.end()
    return out.getvalue()


def test_without_colours_a_line_stands_between_tokens() -> None:
    assert written([b"a", b" b", b"\n", b"c", b".\n", b"\n"], False) == "a│·b│⏎\nc│.⏎\n⏎\n"
    assert written([], False) == written([], True) == ""


def test_neighbours_have_different_colours_and_none_runs_over_a_line_end() -> None:
    lines = written([b"a", b"b", b"\n", b"c"], True).split("\n")
    assert lines[-1] == ""
    for line in lines[:-1]:
        assert line.endswith("\x1b[0m")
    a, b, *_ = lines[0].split("\x1b[0m")
    assert a[:-1] != b[:-1]
    assert (a[-1], b[-1]) == ("a", "b")
    plain, special = (written([b"<b>"], True, mark) for mark in (b"", b"<b>"))
    assert plain != special
