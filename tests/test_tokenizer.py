"""Every text survives encoding, what cannot is named before tiktoken sees it, files are checked."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import threading
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.errors import InexpressibleTextError, TokenizerError
from gpt.splitting import CHAR_PATTERN, GPT4_PATTERN, PATTERNS
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


# Special tokens

CHAT = Tokenizer.bpe([ENGLISH], 300, special_tokens=["<|user|>", "<|user|>s", "<b>"])
# As in cl100k_base: end-of-text amidst the others, and ids without a token.
GAPS = Tokenizer(
    "gaps",
    GPT4_PATTERN,
    [*(bytes([b]) for b in range(256)), b"", b"", b"he"],
    special={END_OF_TEXT: 256, "<|fim|>": 260, "<|end|>": 270},
)
# As in SmolLM2 and others: special tokens first, and another name for the end.
FIRST = Tokenizer(
    "first",
    GPT4_PATTERN,
    [b"", b"", *(bytes([b]) for b in range(256))],
    special={"<s>": 0, "</s>": 1},
    end_of_text="</s>",
)


def test_special_tokens_of_a_bpe_come_after_the_merges_and_before_end_of_text() -> None:
    assert CHAT.n_vocab == 300
    assert [*CHAT.special.items()] == [
        ("<|user|>", 296), ("<|user|>s", 297), ("<b>", 298), (END_OF_TEXT, 299)
    ]  # fmt: skip
    assert CHAT.eot == CHAT.encoding.eot_token == 299
    for kind in (Tokenizer.bytes(["<b>"]), Tokenizer.chars("ab", ["<b>"])):
        assert kind.special == {"<b>": kind.eot - 1, END_OF_TEXT: kind.n_vocab - 1}


def test_names_become_tokens_only_where_that_is_asked_for() -> None:
    text = f"a<|user|>b{END_OF_TEXT}<b>"
    a, b, user, bold = (CHAT.encode(part, special=True) for part in ("a", "b", "<|user|>", "<b>"))
    assert (user, bold) == ([296], [298])
    assert max(CHAT.encode(text)) < 296
    assert CHAT.encode(text, special=True) == a + user + b + CHAT.encode(END_OF_TEXT) + bold
    assert CHAT.encode(text, special=["<b>"]) == CHAT.encode(text[:-3]) + bold
    assert CHAT.encode(text, special=CHAT.special) == a + user + b + [299] + bold
    with pytest.raises(TokenizerError, match="'<u>' is no special token of the bpe"):
        CHAT.encode(text, special=["<u>"])


def test_the_longest_name_goes_first() -> None:
    assert CHAT.encode("<|user|>s<|user|>t", special=True) == [297, 296, ord("t")]


def one_by_one(tokenizer: Tokenizer, text: str, names: Iterable[str]) -> list[int]:
    """Names where they stand, the longest of those that do; the text between them on its own."""
    ids, start, at = [], 0, 0
    while at < len(text):
        here = [name for name in names if text.startswith(name, at)]
        if here:
            name = max(here, key=len)
            ids += [*tokenizer.encode(text[start:at]), tokenizer.special[name]]
            start = at = at + len(name)
        else:
            at += 1
    return ids + tokenizer.encode(text[start:])


@pytest.mark.parametrize("tokenizer", [CHAT, GAPS, FIRST])
@settings(deadline=None)
@given(data=st.data())
def test_names_are_found_across_the_borders_of_chunks(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    parts = [*tokenizer.special, "<|user|", "<", "he ", "s", "文\n"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=8)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    chunks = [text[a:b] for a, b in pairwise([0, *sorted(cuts), len(text)])]
    for names in (tokenizer.special, [next(iter(tokenizer.special))]):
        ids = [i for part in tokenizer.encode_stream(chunks, special=names) for i in part]
        assert ids == one_by_one(tokenizer, text, names)


def test_ids_may_have_gaps_and_end_of_text_any_place() -> None:
    assert (GAPS.n_vocab, GAPS.eot) == (271, 256)
    assert GAPS.encode("he<|end|>", special=True) == [258, 270]
    assert [GAPS.token_bytes(i) for i in (256, 257, 258, 259, 260, 269, 270)] == [
        b"", b"", b"he", b"", b"<|fim|>", b"", b"<|end|>"
    ]  # fmt: skip
    assert GAPS.decode(range(255, 271)) == "\ufffdhe<|fim|><|end|>"
    with pytest.raises(TokenizerError, match=r"id 271 is outside .* \(0 to 270\)"):
        GAPS.token_bytes(271)
    assert (FIRST.n_vocab, FIRST.eot, FIRST.end_of_text) == (258, 1, "</s>")
    assert FIRST.encode("a</s>", special=True) == [*FIRST.encode("a"), *FIRST.encode("</s>")]
    assert FIRST.decode([0, ord("a") + 2, 1]) == "<s>a"


def test_what_special_tokens_stand_for_comes_back() -> None:
    text = "<|user|>Hi<b>"
    assert CHAT.decode(CHAT.encode(text, special=True)) == text


def test_special_tokens_can_be_added_to_any_tokenizer() -> None:
    more = GAPS.with_special_tokens(["<|user|>", "<|end|>"])
    assert more.special == GAPS.special | {"<|user|>": 271}
    assert more.encode("he<|user|>", special=True) == [258, 271]
    assert more.fingerprint != GAPS.fingerprint
    assert GAPS.with_special_tokens(["<|end|>"]) is GAPS


def test_nothing_is_learned_from_the_names_of_special_tokens() -> None:
    text = "<|user|>ab ab ab<|user|> "
    learned = Tokenizer.bpe([text * 50], 280, special_tokens=["<|user|>"])
    assert learned.fingerprint != Tokenizer.bpe([text * 50], 280).fingerprint
    assert not any(b"user" in learned.token_bytes(i) for i in range(learned.eot - 1))


def test_an_offset_counts_special_tokens() -> None:
    chars = Tokenizer.chars("ab", ["<b>"])
    with pytest.raises(InexpressibleTextError) as caught:
        chars.encode("a<b>b<b>aZ", special=True)
    assert (caught.value.char, caught.value.offset) == ("Z", 9)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["<b>", "<b>"], "given twice"),
        ([""], "1 to 256 characters"),
        (["x" * 257], "1 to 256 characters"),
        ([3], "1 to 256 characters"),
        ([f"<{i}>" for i in range(10_001)], "10001 special tokens, but may be at most 10000"),
        (["\ud800"], "no valid text"),
        ([END_OF_TEXT], "every vocabulary has it"),
        ("<b>", "give a list"),
    ],
)
def test_unusable_special_tokens_are_refused(names: Any, says: str) -> None:
    for make in (
        lambda: Tokenizer.bpe([ENGLISH], 300, special_tokens=names),
        lambda: Tokenizer.bytes(names),
        lambda: GAPS.with_special_tokens(names),
    ):
        with pytest.raises(TokenizerError, match=says) as caught:
            make()
        assert len(str(caught.value)) < 200


def test_a_bpe_vocabulary_needs_room_for_its_special_tokens() -> None:
    with pytest.raises(TokenizerError, match=r"vocab_size is 258.*at least 259.*2 special tokens"):
        Tokenizer.bpe([ENGLISH], 258, special_tokens=["<a>", "<b>"])
    assert Tokenizer.bpe([ENGLISH], 259, special_tokens=["<a>", "<b>"]).n_vocab == 259


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_bpe_is_learned_with_any_pattern(pattern: str) -> None:
    learned = Tokenizer.bpe([ENGLISH], 300, pattern)
    assert learned.pattern == PATTERNS[pattern]
    assert learned.fingerprint == Tokenizer.bpe([ENGLISH], 300, PATTERNS[pattern]).fingerprint
    assert learned.decode(learned.encode(ENGLISH + CHINESE)) == ENGLISH + CHINESE
    with pytest.raises(TokenizerError, match=r"'gpt5' is unknown .* did you mean gpt4"):
        Tokenizer.bpe([ENGLISH], 300, "gpt5")


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
    monkeypatch.setattr(tokenizer._codec, "missing", frozenset())
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


@pytest.mark.parametrize("tokenizer", [CHAT, GAPS, FIRST])
def test_special_tokens_and_gaps_are_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    for other in (loaded, pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert other.fingerprint == tokenizer.fingerprint
        assert (other.special, other.eot) == (tokenizer.special, tokenizer.eot)
        text = f"he{tokenizer.end_of_text}<|user|><s>"
        assert other.encode(text, special=True) == tokenizer.encode(text, special=True)


def test_special_tokens_are_part_of_the_identity() -> None:
    tokens = [bytes([b]) for b in range(256)]

    def fingerprint(special: dict[str, int], end_of_text: str = END_OF_TEXT) -> str:
        made = Tokenizer("x", CHAR_PATTERN, tokens, special=special, end_of_text=end_of_text)
        return made.fingerprint

    plain = fingerprint({END_OF_TEXT: 256})
    assert plain == BYTES.fingerprint
    different = [
        plain,
        fingerprint({END_OF_TEXT: 257}),
        fingerprint({END_OF_TEXT: 256, "a": 257}),
        fingerprint({END_OF_TEXT: 257, "a": 256}),
        fingerprint({END_OF_TEXT: 257, "a": 256}, "a"),
        fingerprint({END_OF_TEXT: 256, "b": 257}),
    ]
    assert len(set(different)) == len(different)


def test_a_file_of_format_1_is_read() -> None:
    """Models saved before there were special tokens by name."""
    old = {
        "format": 1,
        "kind": "bytes",
        "pattern": CHAR_PATTERN,
        "end_of_text": END_OF_TEXT,
        "tokens": [base64.b64encode(bytes([b])).decode() for b in range(256)],
        "fingerprint": BYTES_FINGERPRINT,
    }
    assert Tokenizer.from_dict(old).to_dict() == BYTES.to_dict()


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
        BPE.to_dict() | {"format": 4},
        BPE.to_dict() | {"tokens": swapped()},
        BPE.to_dict() | {"tokens": BPE.to_dict()["tokens"][:-1]},
        BPE.to_dict() | {"tokens": ["!"]},
        BPE.to_dict() | {"tokens": [7]},
        BPE.to_dict() | {"tokens": "abc"},
        BPE.to_dict() | {"pattern": "(("},
        BPE.to_dict() | {"pattern": CHAR_PATTERN},
        BPE.to_dict() | {"kind": 3},
        BPE.to_dict() | {"end_of_text": "<eos>"},
        BPE.to_dict() | {"end_of_text": 3},
        BPE.to_dict() | {"format": 1, "end_of_text": "<eos>"},
        BPE.to_dict() | {"special": []},
        BPE.to_dict() | {"special": {}},
        BPE.to_dict() | {"special": {END_OF_TEXT: 5}},
        BPE.to_dict() | {"special": {END_OF_TEXT: 1 << 40}},
        BPE.to_dict() | {"special": {END_OF_TEXT: -1}},
        BPE.to_dict() | {"special": {END_OF_TEXT: True}},
        BPE.to_dict() | {"special": {END_OF_TEXT: "399"}},
        BPE.to_dict() | {"special": {END_OF_TEXT: 399, "<a>": 399}},
        BPE.to_dict() | {"special": {END_OF_TEXT: 400}},
        {"version": "1.0", "added_tokens": [], "model": {}},
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


def test_empty_places_at_the_end_change_nothing(tmp_path: Path) -> None:
    tokens = [bytes([b]) for b in range(256)]
    padded = Tokenizer("bytes", CHAR_PATTERN, [*tokens, b"", b""], special={END_OF_TEXT: 256})
    assert padded.fingerprint == BYTES.fingerprint
    assert padded.to_dict() == BYTES.to_dict()
    assert Tokenizer.from_dict(padded.to_dict()).n_vocab == padded.n_vocab == 257
