"""Vocabularies of Hugging Face folders: the ids are those of the `tokenizers` library, or the
import says why they cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

import gpt.splitting
from gpt.errors import TokenizerError
from gpt.tokenizer import Tokenizer
from gpt.vocab import open_vocabulary, to_huggingface
from gpt.vocab.check import SAMPLE
from gpt.vocab.huggingface import of_description
from gpt.vocab.patterns import LLAMA3_PATTERN, QWEN2_PATTERN

CODE = Path(gpt.splitting.__file__).read_text(encoding="utf-8")
TEXTS = [*SAMPLE, *SAMPLE, CODE]
END = "<|endoftext|>"
Theirs = tokenizers.Tokenizer


def trained(
    pre: Any = None, normalizer: Any = None, special: tuple[str, ...] = (END,), **model: Any
) -> Theirs:
    """A byte-level vocabulary learned by the library itself."""
    made = Theirs(models.BPE(**model))
    made.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        made.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    made.decoder = decoders.ByteLevel()
    return made


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def sentencepiece(*, metaspace: Any = None) -> Theirs:
    """A vocabulary of characters with byte tokens, in the way of Llama 2."""
    learned = Theirs(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁\n]+|▁+|\n"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=330, limit_alphabet=90, show_progress=False)
    learned.train_from_iterator(TEXTS, trainer)
    model = json.loads(learned.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # As in Llama 2, single characters come last.
    ordered = sorted(model["vocab"], key=lambda token: (len(token) == 1, model["vocab"][token]))
    tokens = [*names, *ordered]
    made = Theirs(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if metaspace is None:
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        made.pre_tokenizer = metaspace
    made.add_special_tokens([AddedToken(name, normalized=False) for name in names[:3]])
    return made


MAKERS: dict[str, Callable[[], Theirs]] = {
    "gpt2": trained,
    "prefix": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": lambda: trained(split(LLAMA3_PATTERN), ignore_merges=True),
    "qwen2": lambda: trained(split(QWEN2_PATTERN), normalizers.NFC()),
    "smollm2": lambda: trained(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    ),
    "numbers": lambda: trained(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "llama2": sentencepiece,
    "metaspace first": lambda: sentencepiece(
        metaspace=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ),
    "metaspace split": lambda: sentencepiece(
        metaspace=pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    ),
    "metaspace never": lambda: sentencepiece(
        metaspace=pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    ),
}
_made: dict[str, tuple[Theirs, Tokenizer]] = {}


def both(kind: str) -> tuple[Theirs, Tokenizer]:
    if kind not in _made:
        theirs = MAKERS[kind]()
        _made[kind] = theirs, of_description(json.loads(theirs.to_str()), {})
    return _made[kind]


def their_ids(theirs: Theirs, text: str) -> list[int]:
    return list(theirs.encode(text, add_special_tokens=False).ids)


TEXT = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("ab eEsStT'’ſ\u212a\t\n\r \u00a0\u2003019½²,.!▁-\u0301\u0327한漢é"),
    ),
    max_size=60,
)


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_ids_are_those_of_the_library(kind: str, text: str) -> None:
    theirs, ours = both(kind)
    # A newer Unicode than an engine's gives it digits that it does not know yet.
    assert ours.encode(text) == their_ids(theirs, text)


@pytest.mark.parametrize("kind", MAKERS)
def test_ids_of_prose_code_and_other_scripts_are_those_of_the_library(kind: str) -> None:
    theirs, ours = both(kind)
    for text in TEXTS:
        assert ours.encode(text) == their_ids(theirs, text)
        chunks = [text[i : i + 3] for i in range(0, len(text), 3)]
        assert [id_ for ids in ours.encode_stream(chunks) for id_ in ids] == ours.encode(text)
        if kind != "qwen2" and "▁" not in text:
            plain = text.removeprefix(" ") if ours.rules.prefix in ("missing", "first") else text
            assert ours.decode(ours.encode(text)) == plain


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_written_is_read_back_the_same(kind: str, tmp_path: Path) -> None:
    theirs, ours = both(kind)
    for name, text in to_huggingface(ours).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    again = open_vocabulary(tmp_path)
    assert (again.end_of_text, again.special) == (ours.end_of_text, ours.special)
    assert (again.rules.normalizer, again.rules.prefix) == (
        ours.rules.normalizer,
        ours.rules.prefix,
    )
    written = Theirs.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert again.encode(text) == their_ids(written, text) == their_ids(theirs, text)
    assert Tokenizer.from_dict(json.loads(json.dumps(ours.to_dict()))).to_dict() == ours.to_dict()


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "metaspace first", "metaspace split"])
def test_special_tokens_in_a_text_are_found_on_request_as_the_library_finds_them(kind: str) -> None:
    theirs, ours = both(kind)
    name = ours.end_of_text
    text = f"{name}one {name} two{name}{name}\nthree {name}"
    assert ours.encode(text, special=[*ours.special]) == their_ids(theirs, text)
    assert ours.special[name] not in ours.encode(text)


def test_ids_that_are_not_ranks_are_kept_apart() -> None:
    described = json.loads(trained().to_str())
    vocab = described["model"]["vocab"]
    size = len(vocab)
    described["model"]["vocab"] = {token: size - 1 - id_ for token, id_ in vocab.items()}
    described["added_tokens"][0]["id"] = size - 1
    ours = of_description(described, {})
    theirs = Theirs.from_str(json.dumps(described))
    assert ours.rules.order is not None
    for text in TEXTS:
        assert ours.encode(text) == their_ids(theirs, text)
        assert ours.decode(ours.encode(text)) == text
    assert Tokenizer.from_dict(ours.to_dict()).encode(TEXTS[0]) == ours.encode(TEXTS[0])


FLAGS = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)


def small(merges: list[Any], tokens: str, **model: Any) -> dict[str, Any]:
    """A byte-level description with these merges and further tokens."""
    base = [*pre_tokenizers.ByteLevel.alphabet()]
    vocab = {token: i for i, token in enumerate([*sorted(base), *tokens.split(), END])}
    return {
        "added_tokens": [{"id": vocab[END], "content": END, "special": True} | FLAGS],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, **model},
    }


def test_a_token_that_no_merge_leads_to_is_only_decoded() -> None:
    """tiktoken would merge a and bc, and take the word abc as that token; the library does not."""
    described = small(["b c", "c d"], "bc cd abc")
    ours = of_description(described, {})
    theirs = Theirs.from_str(json.dumps(described))
    for text in ("abc", "abcd", "bcd", "xabc", "acd"):
        assert ours.encode(text) == their_ids(theirs, text)
    token = described["model"]["vocab"]["abc"]
    assert ours.decode([token]) == "abc" and token not in ours.encode("abc abc")


def test_tokens_rank_by_the_merge_that_leads_to_them() -> None:
    """Two merges make abc; from its own bytes only the second is taken."""
    described = small(
        [["b", "c"], ["ab", "c"], ["c", "d"], ["a", "bc"], ["a", "b"]], "abc ab cd bc"
    )
    ours = of_description(described, {})
    theirs = Theirs.from_str(json.dumps(described))
    for text in ("abc", "abcd", "aabcc", "ab", "bcd", "abab cdc"):
        assert ours.encode(text) == their_ids(theirs, text)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_merges_in_any_order_give_the_librarys_ids_or_are_refused(data: st.DataObject) -> None:
    tokens = ["a", "b", "c"]
    pairs: list[tuple[str, str]] = []
    for _ in range(data.draw(st.integers(0, 9))):
        pair = (data.draw(st.sampled_from(tokens)), data.draw(st.sampled_from(tokens)))
        if pair not in pairs:
            pairs.append(pair)
            tokens.append("".join(pair))
    extra = data.draw(st.lists(st.text("abc", min_size=2, max_size=5), max_size=2))
    pairs = data.draw(st.permutations(pairs))
    names = dict.fromkeys([*(t for t in tokens if len(t) > 1), *extra])
    described = small([list(p) for p in pairs], " ".join(names))
    described["model"]["ignore_merges"] = data.draw(st.booleans())
    try:
        ours = of_description(described, {})
    except TokenizerError as error:
        assert described["model"]["ignore_merges"] and "cannot be imported exactly" in str(error)
        return
    theirs = Theirs.from_str(json.dumps(described))
    text = data.draw(st.text("abc ", max_size=40))
    assert ours.encode(text) == their_ids(theirs, text)


def test_words_that_are_tokens_at_once_are_refused_where_tiktoken_would_merge_them() -> None:
    described = small(["b c"], "bc abc", ignore_merges=True)
    with pytest.raises(TokenizerError, match="'abc' as one token .* cannot be imported exactly"):
        of_description(described, {})


def test_added_tokens_that_are_not_special_are_found_in_any_text() -> None:
    theirs = trained()
    theirs.add_tokens(
        [AddedToken("<tool>", normalized=False), AddedToken("    ", normalized=False)]
    )
    ours = of_description(json.loads(theirs.to_str()), {})
    for text in ("a<tool>b", "if x:\n        y\n    z", "<tool><tool>", END + " a"):
        assert ours.encode(text, special=[END]) == their_ids(theirs, text)
    assert ours.special["<tool>"] in ours.encode("a<tool>b")
    assert ours.special[END] not in ours.encode(END)
    again = Tokenizer.from_dict(ours.to_dict())
    assert again.encode("a<tool>b") == ours.encode("a<tool>b")


def write(folder: Path, **files: Any) -> Path:
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


CHAT = (END, "<|im_start|>", "<|im_end|>", "<s>")


def test_tokens_that_begin_and_end_a_text_are_found(tmp_path: Path) -> None:
    theirs = trained(special=CHAT)
    theirs.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", theirs.token_to_id("<s>"))]
    )
    write(
        tmp_path,
        tokenizer=json.loads(theirs.to_str()),
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>"},
        generation_config={"eos_token_id": [theirs.token_to_id("<|im_end|>"), 0]},
    )
    ours = open_vocabulary(tmp_path)
    assert (ours.begin, ours.end_of_text, ours.ends) == ("<s>", END, ("<|im_end|>",))
    assert ours.prompt("hello") == theirs.encode("hello").ids
    assert ours.start == ours.special["<s>"]
    assert ours.end_ids == {ours.eot, ours.special["<|im_end|>"]}
    again = Tokenizer.from_dict(ours.to_dict())
    assert (again.begin, again.ends, again.fingerprint) == (ours.begin, ours.ends, ours.fingerprint)
    write(tmp_path, tokenizer_config={"add_bos_token": False})
    assert open_vocabulary(tmp_path).begin is None
    files = to_huggingface(ours)
    assert Theirs.from_str(files["tokenizer.json"]).encode("hello").ids == ours.prompt("hello")


def test_a_pair_of_files_is_read(tmp_path: Path) -> None:
    theirs = trained()
    theirs.model.save(str(tmp_path))
    ours = open_vocabulary(tmp_path)
    assert [ours.encode(text) for text in TEXTS] == [their_ids(theirs, text) for text in TEXTS]
    assert ours.special == {END: 0}
    write(tmp_path, tokenizer_config={"tokenizer_class": "LlamaTokenizer"})
    with pytest.raises(TokenizerError, match="'LlamaTokenizer', of which only a tokenizer.json"):
        open_vocabulary(tmp_path)


def test_a_folder_without_a_vocabulary_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="has neither a tokenizer.json nor"):
        open_vocabulary(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match="it has tokenizer.model, which is not read"):
        open_vocabulary(tmp_path)


def changed(**parts: Any) -> dict[str, Any]:
    described = small(["b c"], "bc")
    for path, value in parts.items():
        target = described
        *above, last = path.split("__")
        for name in above:
            target = target[name]
        target[last] = value
    return described


GROUPS = {"type": "Split", "behavior": "Isolated", "invert": False}


def regexes(pattern: str) -> dict[str, Any]:
    step = GROUPS | {"pattern": {"Regex": pattern}}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [step, level]}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model__type": "Unigram"}, "type 'Unigram'; only BPE"),
        ({"model__dropout": 0.1}, "dropout"),
        ({"model__end_of_word_suffix": "</w>"}, "end_of_word_suffix"),
        ({"model__continuing_subword_prefix": "##"}, "continuing_subword_prefix"),
        ({"model__vocab": {"a": 0, "b": 0}}, "the same id"),
        ({"model__vocab": {"a": 10**30}}, "ids are whole numbers"),
        ({"model__vocab": {"a": -1}}, "ids are whole numbers"),
        ({"model__vocab": {"a": 1.5}}, "ids are whole numbers"),
        ({"model__vocab": ["a"]}, "no vocabulary"),
        ({"model__vocab": {"x" * 5000: 1}, "model__merges": []}, "over 4096 characters"),
        ({"model__merges": None}, "no list of merges"),
        ({"model__merges": ["b"]}, "a merge is a pair"),
        ({"model__merges": [["b", "c", "d"]]}, "a merge is a pair"),
        ({"model__merges": [["b", 3]]}, "a merge is a pair"),
        ({"model__merges": ["b d"]}, "no token 'bd'"),
        ({"model__merges": ["b c", "b c"]}, "twice"),
        ({"normalizer": {"type": "Lowercase"}}, r"normalizer \(Lowercase\) is not supported"),
        ({"normalizer": {"type": "NFKC"}}, r"normalizer \(NFKC\)"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, r"pre_tokenizer \(Whitespace\)"),
        ({"pre_tokenizer": None}, r"pre_tokenizer \(none\)"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "byte_fallback"),
        ({"pre_tokenizer": regexes(r"\s+(?!\S)|.")}, "may not mean the same"),
        ({"pre_tokenizer": regexes(r"\h+|\H+")}, "may not mean the same"),
        ({"pre_tokenizer": regexes(r"[a-z&&[^b]]|[^x]")}, "may not mean the same"),
        ({"pre_tokenizer": regexes(r"(?<=a)b|[^x]")}, "may not mean the same"),
        ({"pre_tokenizer": regexes(r"(?i:stra)|\s+|\S+")}, "may not mean the same"),
        ({"pre_tokenizer": regexes(r"\p{L}+")}, "leaves some characters out"),
        ({"pre_tokenizer": regexes("a{9999}{9999}|[^x]|x")}, "too large"),
        ({"pre_tokenizer": regexes("(a" * 900 + ")" * 900)}, "not valid|leaves some|too large"),
        ({"post_processor": {"type": "BertProcessing"}}, "BertProcessing is not supported"),
        ({"added_tokens": [{"id": 1}]}, "needs a content"),
        ({"added_tokens": [{"id": 2**40, "content": "x"}]}, "ids are whole numbers"),
        ({"added_tokens": [{"id": 3, "content": "<x>", "special": True}]}, "the same id 3"),
        ({"added_tokens": [{"id": 7, "content": "b", "special": True}]}, "has two ids"),
        ({"added_tokens": [{"id": 999, "content": "<x>", "lstrip": True}]}, "lstrip"),
        ({"added_tokens": []}, "no special token of it ends a text"),
    ],
)
def test_what_cannot_be_taken_over_exactly_is_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        of_description(changed(**parts), {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "is not JSON"),
        (b'{"model": {"vocab": {"a": ' + b"9" * 10_000 + b"}}}", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "no object"),
        (b"{}", "no model"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        open_vocabulary(tmp_path)


def test_the_self_check_finds_other_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the import does not know to refuse is found by comparing."""
    import gpt.vocab.huggingface as module

    described = json.loads(trained().to_str())
    monkeypatch.setattr(module, "_normalizer", lambda found: ("", ""))
    described["normalizer"] = {"type": "Lowercase"}
    write(tmp_path, tokenizer=described)
    with pytest.raises(TokenizerError, match="its ids are not those of the tokenizers library"):
        open_vocabulary(tmp_path)


def test_padding_and_truncation_of_a_hostile_file_are_not_applied(tmp_path: Path) -> None:
    described = json.loads(trained().to_str())
    described["padding"] = {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": END,
    }
    assert open_vocabulary(write(tmp_path, tokenizer=described)).encode("a") == [
        described["model"]["vocab"]["a"]
    ]


@pytest.mark.parametrize(
    "ours",
    [
        Tokenizer.bytes(["<|user|>"]),
        Tokenizer.chars("abc é漢 \n", ["<|user|>"]),
        Tokenizer.bpe(TEXTS, 400, special_tokens=["<|user|>"]),
        Tokenizer.bpe(TEXTS, 400, pattern="gpt2"),
        Tokenizer.bpe(TEXTS, 400, pattern="o200k"),
    ],
    ids=["bytes", "chars", "bpe", "gpt2", "o200k"],
)
def test_our_own_vocabularies_are_written_for_the_library(ours: Tokenizer) -> None:
    theirs = Theirs.from_str(to_huggingface(ours)["tokenizer.json"])
    for text in ["abc é漢 \n"] if ours.kind == "chars" else TEXTS:
        assert their_ids(theirs, text) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert their_ids(theirs, "ab<|endoftext|>c")[2] == ours.eot


def test_a_pattern_that_cannot_be_said_there_is_refused() -> None:
    ours = Tokenizer.bpe(["some text"], 260, pattern=r"(?s:.)\b|(?s:.)")
    with pytest.raises(TokenizerError, match="may not mean the same to another engine"):
        to_huggingface(ours)
