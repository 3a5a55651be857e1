"""Bytes to text: whatever the blocks, with each wrong byte named, left out or replaced."""

from __future__ import annotations

import io
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.data import decoding
from gpt.data.decoding import Newlines, OnError, Reading, decode_utf8
from gpt.errors import DataError


@settings(deadline=None)
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60),
    block=st.integers(1, 9),
)
def test_text_comes_back_whatever_the_block_size(text: str, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "_BLOCK", block)
        assert "".join(decode_utf8(io.BytesIO(text.encode()), "x")) == text.removeprefix("\ufeff")
        assert "".join(decode_utf8(io.BytesIO(text.encode("utf-8-sig")), "x")) == text


@settings(deadline=None)
@given(
    before=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
    bad=st.sampled_from(
        [b"\x80", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xe6\x96", b"\xf0\x9f."]
    ),
    block=st.integers(1, 9),
)
def test_a_byte_that_is_not_utf8_is_named_with_its_offset(
    before: str, bad: bytes, block: int
) -> None:
    data = before.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "_BLOCK", block)
        with pytest.raises(DataError) as caught:
            list(decode_utf8(io.BytesIO(data + bad), "odd.txt"))
    assert f"odd.txt is not UTF-8: byte 0x{bad[0]:02X} at byte offset {len(data)} " in str(
        caught.value
    )


def test_a_binary_file_is_named_with_the_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_BLOCK", 4)
    with pytest.raises(DataError, match=r"x.txt is not a text file.*byte offset 6"):
        list(decode_utf8(io.BytesIO(b"abcdef\0gh"), "x.txt"))


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("on_error", ["stop", "skip", "replace"])
def test_utf16_is_known_by_its_mark_and_never_guessed_at(codec: str, on_error: OnError) -> None:
    data = "\ufeffabc".encode(codec)
    with pytest.raises(DataError, match=r"x.txt is UTF-16 or UTF-32 .*iconv -f UTF-16"):
        list(decode_utf8(io.BytesIO(data), "x.txt", Reading(on_error)))


def test_the_error_names_the_choice_there_is() -> None:
    for data in (b"a\xff", b"a\0"):
        with pytest.raises(DataError, match=r"--on-error skip .* or replace"):
            list(decode_utf8(io.BytesIO(data), "x.txt"))


@settings(deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([b"a", "文".encode(), "🙂".encode(), "\ufffd".encode(), b"\xff", b"\xe6",
                         b"\xf0\x9f", b"\0", b"\x80"]), max_size=12),
    block=st.integers(1, 9),
)  # fmt: skip
def test_what_does_not_belong_is_left_out_or_replaced_and_counted(
    parts: list[bytes], block: int
) -> None:
    data = b"".join(parts)
    for on_error, handler in (("skip", "ignore"), ("replace", "replace")):
        reading = Reading(on_error)  # type: ignore[arg-type]
        nul = "" if on_error == "skip" else "\ufffd"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoding, "_BLOCK", block)
            text = "".join(decode_utf8(io.BytesIO(data), "x", reading))
        if b"\0" in data:  # may part or join the bytes around it
            assert "\0" not in text
            assert reading.losses.bytes
        else:
            assert text == data.decode(errors=handler)
            lost = (
                len(data) - len(text.encode())
                if on_error == "skip"
                else text.count("\ufffd") - data.count("\ufffd".encode())
            )
            assert reading.losses.bytes == lost
            assert bool(lost) == bool(reading.losses.first)
        assert not nul or text.count(nul) >= data.count(0)


@given(
    text=st.text("a\r\n", max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4).map(sorted),
)
def test_line_ends_are_kept_or_made_one(text: str, cuts: list[int]) -> None:
    edges = [0, *cuts, len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(edges)]
    wanted: dict[Newlines, str] = {
        "keep": text,
        "lf": text.replace("\r\n", "\n").replace("\r", "\n"),
    }
    for newlines, expected in wanted.items():
        found = list(Reading(newlines=newlines).text(chunks))
        assert "".join(found) == expected
        assert "" not in found
        assert Reading(newlines=newlines).row(text) == expected
