"""Vocabularies of GGUF metadata: read as the library of the original would, and written for
llama.cpp."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.errors import TokenizerError
from gpt.tokenizer import Tokenizer
from gpt.vocab import from_gguf, to_gguf, to_huggingface
from gpt.vocab.check import SAMPLE
from gpt.vocab.patterns import DIGITS_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN
from gpt.vocab.spelling import spelled

TEXTS = [*SAMPLE, *SAMPLE]
KEY = "tokenizer.ggml."
WRITTEN = {
    "gpt-2": Tokenizer.bpe(TEXTS, 400, pattern="gpt2", special_tokens=["<|user|>"]),
    "llama-bpe": Tokenizer.bpe(TEXTS, 400),
    "smollm": Tokenizer.bpe(TEXTS, 400, pattern=DIGITS_PATTERN),
    "qwen2": Tokenizer.bpe(TEXTS, 400, pattern=QWEN2_PATTERN),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read_back_with_the_same_ids(name: str) -> None:
    ours = WRITTEN[name]
    found = to_gguf(ours)
    assert found[KEY + "pre"] == name
    again = from_gguf(json.loads(json.dumps(found)))
    assert (again.special, again.eot, again.begin) == (ours.special, ours.eot, None)
    for text in TEXTS:
        if name != "qwen2":  # which is for text in composed form
            assert again.encode(text) == ours.encode(text)
        assert again.decode(ours.encode(text)) == text
    assert to_gguf(again) == found


def test_bytes_are_written_and_what_llama_cpp_cannot_say_is_refused() -> None:
    ours = Tokenizer.bytes()
    found = to_gguf(ours)
    assert found[KEY + "merges"] == [] and found[KEY + "tokens"][:256] == [
        spelled(bytes([byte])) for byte in range(256)
    ]
    with pytest.raises(TokenizerError, match="come of no merge"):
        to_gguf(Tokenizer("odd", LLAMA3_PATTERN.replace("{1,3}", ""), [b"a", b"b", b"abc"]))
    for pattern in ("o200k", r"\s+|\S+"):
        made = Tokenizer.bpe(TEXTS, 300, pattern=pattern)
        with pytest.raises(TokenizerError, match="no name for the split pattern .* gpt-2, llama"):
            to_gguf(made)
    with pytest.raises(TokenizerError, match="no name for the split pattern"):
        to_gguf(Tokenizer.chars("abc é"))


def smollm(**more: Any) -> dict[str, Any]:
    """Metadata as SmolLM2's: special tokens first, and a chat's end as the end of a text."""
    plain = to_gguf(WRITTEN["smollm"])
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *plain[KEY + "tokens"][:-1], "<tool>"]
    kinds = [3] * 3 + [1] * (len(tokens) - 4) + [4]
    fields = {"tokens": tokens, "token_type": kinds, "bos_token_id": 1, "eos_token_id": 2}
    return plain | {KEY + name: value for name, value in (fields | more).items()}


def test_the_tokens_of_a_chat_and_of_documents_are_told_apart() -> None:
    ours = from_gguf(smollm())
    assert (ours.end_of_text, ours.ends, ours.begin) == ("<|endoftext|>", ("<|im_end|>",), None)
    assert ours.end_ids == {0, 2} and ours.start == 0
    assert ours.encode("a<tool>")[-1] == ours.n_vocab - 1
    shift = [id_ + 3 for id_ in WRITTEN["smollm"].encode(TEXTS[1])]
    assert ours.encode(TEXTS[1]) == shift
    begun = from_gguf(smollm(add_bos_token=True))
    assert begun.begin == "<|im_start|>" and begun.prompt("")[:1] == [1]
    assert from_gguf(to_gguf(begun)).fingerprint == begun.fingerprint
    theirs = tokenizers.Tokenizer.from_str(to_huggingface(begun)["tokenizer.json"])
    assert theirs.encode("hello 12").ids == begun.prompt("hello 12")


def sentencepiece(**more: Any) -> dict[str, Any]:
    """Metadata as Llama 2's: scores, byte tokens, and a space before the text."""
    words = ["▁t", "he", "▁the", "in", "er", "▁▁", "▁s", "é¡"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzABCT.,'é¡漢"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, *letters]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {KEY + name: value for name, value in (fields | more).items()}


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("the in er saT\n漢字é¡ \u0301🙂\x00▁"), max_size=40))
def test_merging_by_score_is_taken_over(text: str) -> None:
    ours = from_gguf(sentencepiece())
    theirs = tokenizers.Tokenizer.from_str(to_huggingface(ours)["tokenizer.json"])
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.prompt(text)[0] == 1
    assert ours.decode(ours.encode(text)) == text.replace("▁", " ")
    assert from_gguf(to_gguf(ours)).encode(text) == ours.encode(text)


def test_a_character_without_a_token_becomes_the_tokens_of_its_bytes() -> None:
    ours = from_gguf(sentencepiece())
    first = 3
    assert ours.encode("字")[1:] == [first + byte for byte in "字".encode()]
    assert ours.encode("\n")[1:] == [first + 10]
    assert ours.encode("é")[1:] == [ours.plain_tokens.index("é".encode())]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "bert"}, "'bert'; gpt2 and llama are supported"),
        ({"pre": "chameleon"}, "'chameleon', a way to split text that is not known here"),
        ({"pre": None}, "not known here"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "there twice"),
        ({"tokens": ["a", 3], "token_type": [1, 1]}, "damaged"),
        ({"token_type": [1]}, "one entry for each token"),
        ({"merges": ["ab"]}, "no pair of tokens"),
        ({"merges": ["a b", "zz z"]}, "merge"),
        ({"eos_token_id": 10**9}, "which is no token"),
        ({"eos_token_id": -1}, "which is no token"),
        ({"add_eos_token": True}, "a token after each text"),
        ({"add_bos_token": True, "bos_token_id": None}, "there is no bos_token_id"),
    ],
)
def test_broken_and_unknown_metadata_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        from_gguf(smollm(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scores": None}, "one number for each token"),
        ({"scores": [float("nan")] * 304}, "one number for each token"),
        ({"scores": [0.0] * 304}, "have the same score"),
    ],
)
def test_scores_that_decide_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    metadata = sentencepiece(**fields)
    size = len(metadata[KEY + "tokens"])
    if metadata[KEY + "scores"]:
        metadata[KEY + "scores"] = metadata[KEY + "scores"][:1] * size
    with pytest.raises(TokenizerError, match=message):
        from_gguf(metadata)
