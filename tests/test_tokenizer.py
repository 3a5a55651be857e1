"""Every text survives encoding, what cannot is named before tiktoken sees it, files are checked."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.errors import InexpressibleTextError, TokenizerError
from gpt.splitting import CHAR_PATTERN, GPT4_PATTERN
from gpt.tokenizer import END_OF_TEXT, Tokenizer

ENGLISH = "The king's men saw 1234 ships; the king said: we'll fight!\n\nThe queen said no.\n" * 9
CHINESE = "滕王高阁临江渚，佩玉鸣鸾罢歌舞。画栋朝飞南浦云，珠帘暮卷西山雨。\n" * 9
ALPHABET = "abc \n\0é文🙂\u0301"

BYTES_FINGERPRINT = "136a82617c1271db7df95745d3423490339a528897ec6fe7afcc9835add319f0"

BPE = Tokenizer.bpe([ENGLISH, CHINESE], 400)
BYTES = Tokenizer.bytes()
CHARS = Tokenizer.chars(ALPHABET)
MAKERS = {"bpe": BPE, "bytes": BYTES, "chars": CHARS}

any_text = st.text(st.characters(codec="utf-8"), max_size=80)


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@settings(deadline=None)
@given(text=any_text)
def test_any_text_comes_back(kind: str, text: str) -> None:
    ids = MAKERS[kind].encode(text)
    assert MAKERS[kind].decode(ids) == text
    assert ids == MAKERS[kind].encoding.encode_ordinary(text)
    assert all(0 <= token < MAKERS[kind].eot for token in ids)


@settings(deadline=None)
@given(text=st.text(ALPHABET, max_size=80))
def test_chars_gives_one_id_a_character(text: str) -> None:
    ids = CHARS.encode(text)
    assert ids == [sorted(ALPHABET).index(char) for char in text]
    assert CHARS.decode(ids) == text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, BPE.n_vocab - 1)))
def test_any_ids_decode(ids: list[int]) -> None:
    data = b"".join(map(BPE.token_bytes, ids))
    assert BPE.decode_bytes(ids) == data
    assert BPE.decode(ids) == data.decode(errors="replace")


@pytest.mark.parametrize("kind", MAKERS)
def test_end_of_text_is_the_last_id_and_has_no_bytes(kind: str) -> None:
    tokenizer = MAKERS[kind]
    assert tokenizer.kind == kind
    assert tokenizer.eot == tokenizer.n_vocab - 1 == tokenizer.encoding.eot_token
    assert tokenizer.encoding.n_vocab == tokenizer.n_vocab
    assert tokenizer.token_bytes(tokenizer.eot) == b""
    assert tokenizer.decode([tokenizer.eot, 7, tokenizer.eot]) == tokenizer.decode([7])


@pytest.mark.parametrize("tokenizer", [BPE, BYTES, Tokenizer.chars(END_OF_TEXT + "ab")])
def test_typed_control_text_is_ordinary(tokenizer: Tokenizer) -> None:  # S19
    text = f"a{END_OF_TEXT}b"
    ids = tokenizer.encode(text)
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("token", [-1, BPE.n_vocab])
def test_an_unknown_id_is_named(token: int) -> None:
    with pytest.raises(TokenizerError, match=rf"id {token} is outside .* \(0 to {BPE.eot}\)"):
        BPE.decode([65, token])


# Inexpressible text (S27)


@settings(deadline=None)
@given(before=st.text(ALPHABET, max_size=20), bad=st.characters(codec="utf-8"))
def test_chars_names_the_first_character_it_lacks(before: str, bad: str) -> None:
    if bad in ALPHABET:
        return
    with pytest.raises(InexpressibleTextError) as caught:
        CHARS.encode(before + bad + "a" + bad)
    assert (caught.value.char, caught.value.offset) == (bad, len(before))


def lacking(*missing: int, merges: tuple[bytes, ...] = ()) -> Tokenizer:
    tokens = [bytes([b]) for b in range(256) if b not in missing]
    return Tokenizer("odd", GPT4_PATTERN, [*tokens, *merges])


def test_a_vocabulary_that_lacks_a_byte_names_the_character() -> None:
    # 文 is E6 96 87.
    with pytest.raises(InexpressibleTextError) as caught:
        lacking(0x96).encode("one two, 一二文三")
    assert (caught.value.char, caught.value.offset) == ("文", 11)


def test_a_missing_byte_does_no_harm_inside_a_merged_token() -> None:
    whole = lacking(0x96, merges=("文".encode(),))
    assert whole.decode(whole.encode("文")) == "文"  # the piece is a token as it is
    with pytest.raises(InexpressibleTextError):
        whole.encode("文文")  # but no merge leads there: E6 96 is no token
    stepwise = lacking(0x96, merges=(b"\xe6\x96", "文".encode()))
    assert stepwise.decode(stepwise.encode("a文文")) == "a文文"


@settings(deadline=None)
@given(data=st.data())
def test_the_check_foretells_a_panic_exactly(data: st.DataObject) -> None:
    letters = "abcd"
    words = st.text(letters, min_size=1, max_size=4)
    merges = data.draw(st.lists(words.filter(lambda w: len(w) > 1), unique=True, max_size=8))
    tokenizer = lacking(ord("b"), ord("d"), merges=tuple(word.encode() for word in merges))
    text = data.draw(st.text(letters + " ", max_size=16))
    try:
        ids = tokenizer.encoding.encode_ordinary(text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        with pytest.raises(InexpressibleTextError):
            tokenizer.encode(text)
    else:
        assert tokenizer.encode(text) == ids


def test_an_offset_counts_from_the_start_of_a_stream() -> None:
    with pytest.raises(InexpressibleTextError) as caught:
        list(CHARS.encode_stream(["ab" * 200_000, "c", "Zab"]))
    assert (caught.value.char, caught.value.offset) == ("Z", 400_001)


@pytest.mark.parametrize("kind", MAKERS)
def test_half_a_surrogate_pair_is_named(kind: str) -> None:
    with pytest.raises(TokenizerError, match=r"U\+D83D\) at offset 2"):
        MAKERS[kind].encode("ab\ud83d")


def test_a_panic_in_a_worker_thread_is_a_tokenizer_error(monkeypatch: Any) -> None:
    """Past every check, a panic still has to leave as an Exception."""
    tokenizer = lacking(0x96)
    monkeypatch.setattr(tokenizer, "_missing", frozenset())
    caught: list[BaseException] = []

    def work() -> None:
        try:
            tokenizer.encode("文")
        except Exception as error:  # noqa: BLE001 (that it is one is the point)
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(caught[0], TokenizerError)


# Long text


@pytest.mark.parametrize(
    ("kind", "unit"),
    [("bpe", "a"), ("bpe", " "), ("bpe", "\n"), ("bpe", "文"), ("bytes", " "), ("chars", " ")],
)
def test_a_megabyte_of_one_thing_is_encoded(kind: str, unit: str) -> None:
    text = unit * (1_100_000 // len(unit))  # blanks overflow tiktoken's stack from 1,000,000 on
    assert MAKERS[kind].decode(MAKERS[kind].encode(text)) == text


def test_a_vocabulary_can_be_learned_from_a_megabyte_of_blanks() -> None:
    tokenizer = Tokenizer.bpe([" " * 1_100_000], 260)
    assert tokenizer.decode(tokenizer.encode("    a")) == "    a"


# Learning


def test_a_vocabulary_is_no_larger_than_the_text_supports() -> None:
    small = Tokenizer.bpe(["aaab aaab"], 1000)
    assert 257 < small.n_vocab < 300
    assert small.encode("aaab") == [small.eot - 2]
    assert Tokenizer.bpe([], 1000).n_vocab == 257
    assert Tokenizer.bpe([ENGLISH], 290).n_vocab == 290


def test_merging_makes_text_shorter_and_each_step_is_deterministic() -> None:
    again = Tokenizer.bpe(iter([ENGLISH, CHINESE]), 400)
    assert again.fingerprint == BPE.fingerprint
    assert len(BPE.encode(ENGLISH)) < len(ENGLISH) / 2
    assert len(BPE.encode(CHINESE)) < len(CHINESE.encode()) / 3


@pytest.mark.parametrize("size", [256, 0, -1])
def test_a_bpe_vocabulary_needs_all_bytes_and_end_of_text(size: int) -> None:
    with pytest.raises(TokenizerError, match=f"vocab_size is {size}.*at least 257"):
        Tokenizer.bpe([ENGLISH], size)
    assert Tokenizer.bpe([ENGLISH], 257).n_vocab == 257


def test_what_the_texts_raise_comes_through() -> None:
    def texts() -> Any:
        yield "abc"
        raise KeyError("corpus")

    with pytest.raises(KeyError, match="corpus"):
        Tokenizer.bpe(texts(), 300)
    with pytest.raises(TokenizerError, match="surrogate"):
        Tokenizer.bpe(["a\ud800"], 300)


@pytest.mark.parametrize("alphabet", ["", []])
def test_chars_needs_an_alphabet(alphabet: Any) -> None:
    with pytest.raises(TokenizerError, match="at least one character"):
        Tokenizer.chars(alphabet)


# Identity (T10) and files


def test_the_fingerprint_is_the_identity() -> None:
    assert BYTES.fingerprint == Tokenizer.bytes().fingerprint
    assert BYTES.fingerprint == BYTES_FINGERPRINT, "models saved before today would not load"
    different = [
        BYTES, BPE, CHARS, Tokenizer.chars("ab"), Tokenizer.chars("ac"),
        Tokenizer.bpe([ENGLISH], 280), Tokenizer("x", CHAR_PATTERN, [b"a", b"bc"]),
        Tokenizer("x", CHAR_PATTERN, [b"ab", b"c"]),
        Tokenizer("x", GPT4_PATTERN, [b"a", b"bc"]),
    ]  # fmt: skip
    assert len({tokenizer.fingerprint for tokenizer in different}) == len(different)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_saved_tokenizer_is_the_same(kind: str, tmp_path: Path) -> None:
    tokenizer = MAKERS[kind]
    tokenizer.save(tmp_path / "deep" / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "deep" / "tokenizer.json")
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["tokenizer.json"]
    for other in (loaded, pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert (other.kind, other.fingerprint) == (kind, tokenizer.fingerprint)
        assert other.encode("abc \n文") == tokenizer.encode("abc \n文")


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in BPE.to_dict().items() if key != name}


def swapped() -> list[str]:
    tokens = BPE.to_dict()["tokens"]
    return [*tokens[:-2], tokens[-1], tokens[-2]]


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        *(without(name) for name in BPE.to_dict()),
        BPE.to_dict() | {"format": 3},
        BPE.to_dict() | {"tokens": swapped()},
        BPE.to_dict() | {"tokens": BPE.to_dict()["tokens"][:-1]},
        BPE.to_dict() | {"tokens": ["!"]},
        BPE.to_dict() | {"tokens": [7]},
        BPE.to_dict() | {"tokens": "abc"},
        BPE.to_dict() | {"pattern": "(("},
        BPE.to_dict() | {"pattern": CHAR_PATTERN},
        BPE.to_dict() | {"kind": 3},
        BPE.to_dict() | {"end_of_text": "<eos>"},
    ],
)
def test_a_damaged_file_is_a_tokenizer_error_in_one_line(values: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(values))
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_not_json_is_a_tokenizer_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match="not JSON"):
        Tokenizer.load(path)


def test_missing_and_unwritable_files_are_tokenizer_errors(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"cannot read .*No such file"):
        Tokenizer.load(tmp_path / "none.json")
    (tmp_path / "file").touch()
    with pytest.raises(TokenizerError, match="cannot write"):
        BYTES.save(tmp_path / "file" / "tokenizer.json")


@pytest.mark.parametrize("tokens", [[], [b""], [b"a", b"a"]])
def test_unusable_tokens_are_refused(tokens: list[bytes]) -> None:
    with pytest.raises(TokenizerError, match="not usable"):
        Tokenizer("odd", CHAR_PATTERN, tokens)
    values = {"format": 1, "kind": "odd", "pattern": CHAR_PATTERN, "end_of_text": END_OF_TEXT}
    values["tokens"] = [base64.b64encode(token).decode() for token in tokens]
    with pytest.raises(TokenizerError):
        Tokenizer.from_dict(values)
