"""A tokenizer as the files of a Hugging Face folder."""

from __future__ import annotations

import json
from typing import Any

from gpt.errors import TokenizerError
from gpt.splitting import CHAR_PATTERN, GPT2_PATTERN
from gpt.tokenizer import Tokenizer
from gpt.vocab.check import check_ids
from gpt.vocab.gguf import byte_ids
from gpt.vocab.merges import pairs_of
from gpt.vocab.patterns import for_oniguruma
from gpt.vocab.spelling import byte_token, spelled


def to_huggingface(tokenizer: Tokenizer) -> dict[str, str]:
    """The files that the `tokenizers` and `transformers` libraries read.

    Special tokens' names in a text become those tokens there, as is usual in those libraries.

    Returns:
        Text by the file's name: `tokenizer.json`, `tokenizer_config.json`,
        `special_tokens_map.json`.

    Raises:
        TokenizerError: the vocabulary cannot be said in those terms.
    """
    described = _described(tokenizer)
    check_ids(tokenizer, described)
    end = tokenizer.ends[0] if tokenizer.ends else tokenizer.end_of_text
    begin = tokenizer.begin or tokenizer.end_of_text
    tokens = {"bos_token": begin, "eos_token": end}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokens,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.begin is not None,
    }
    files = {
        "tokenizer.json": described,
        "tokenizer_config.json": settings,
        "special_tokens_map.json": tokens,
    }
    return {
        name: json.dumps(values, ensure_ascii=False, indent=2) + "\n"
        for name, values in files.items()
    }


def _described(tokenizer: Tokenizer) -> dict[str, Any]:
    if tokenizer.rules.characters:
        parts = _by_characters(tokenizer)
    elif tokenizer.pattern == CHAR_PATTERN and tokenizer.rules.order is None:
        parts = _bytes_or_chars(tokenizer)
    else:
        parts = _by_bytes(tokenizer)
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **parts.pop("model"),
    }
    vocab = model["vocab"]
    for name, id_ in tokenizer.special.items():
        if vocab.get(name, id_) != id_:
            raise TokenizerError(
                f"the special token {name!r} is written as an ordinary one is; it cannot be "
                "exported"
            )
        # Without a place there it would be given the next id that is free.
        vocab[name] = id_
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id_,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": name not in tokenizer.rules.always,
            }
            for name, id_ in tokenizer.special.items()
        ],
        **parts,
        "post_processor": _template(tokenizer),
        "model": model,
    }


def _template(tokenizer: Tokenizer) -> dict[str, Any] | None:
    name = tokenizer.begin
    if name is None:
        return None
    first = {"SpecialToken": {"id": name, "type_id": 0}}
    text, other = ({"Sequence": {"id": which, "type_id": i}} for i, which in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"SpecialToken": {"id": name, "type_id": 1}}, other],
        "special_tokens": {name: {"id": name, "ids": [tokenizer.start], "tokens": [name]}},
    }


def _byte_level(**more: Any) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, **more}


def _by_bytes(tokenizer: Tokenizer) -> dict[str, Any]:
    rules = tokenizer.rules
    ranks = tokenizer.ranks
    merges = pairs_of(ranks, [token for token in ranks if len(token) == 1])
    merging = {left + right for left, right in merges}
    if len([token for token in ranks if len(token) == 1]) < len(
        [token for token in tokenizer.plain_tokens if len(token) == 1]
    ):
        raise TokenizerError("a byte of it takes no part in merging; it cannot be exported")
    if rules.prefix not in ("", "missing") or (rules.prefix and tokenizer.pattern != GPT2_PATTERN):
        raise TokenizerError("a byte-level vocabulary with a prefix of this kind is not written")
    level = _byte_level(add_prefix_space=rules.prefix == "missing", use_regex=False)
    split = {
        "type": "Split",
        "pattern": {"Regex": for_oniguruma(tokenizer.pattern)},
        "behavior": "Isolated",
        "invert": False,
    }
    if rules.prefix:
        steps: dict[str, Any] = level | {"use_regex": True}
    else:
        steps = {"type": "Sequence", "pretokenizers": [split, level]}
    return {
        "normalizer": {"type": "NFC"} if rules.normalizer == "nfc" else None,
        "pre_tokenizer": steps,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "vocab": {
                spelled(token): id_ for id_, token in enumerate(tokenizer.plain_tokens) if token
            },
            "merges": [[spelled(left), spelled(right)] for left, right in merges],
            # A word that is a token is that token here, even if no merges lead to it.
            "ignore_merges": any(len(token) > 1 and token not in merging for token in ranks),
        },
    }


def _bytes_or_chars(tokenizer: Tokenizer) -> dict[str, Any]:
    """Nothing merges across characters."""
    tokens = {id_: token for id_, token in enumerate(tokenizer.plain_tokens) if token}
    if all(len(token) == 1 for token in tokens.values()):
        return {
            "normalizer": None,
            "pre_tokenizer": _byte_level(use_regex=False),
            "decoder": _byte_level(use_regex=True),
            "model": {
                "vocab": {spelled(token): id_ for id_, token in tokens.items()},
                "merges": [],
            },
        }
    texts = {id_: token.decode(errors="replace") for id_, token in tokens.items()}
    if any(len(text) != 1 or "\ufffd" == text != tokens[id_] for id_, text in texts.items()):
        raise TokenizerError(
            "a vocabulary of characters and parts of them cannot be written for that library"
        )
    return {
        "normalizer": None,
        "pre_tokenizer": None,
        "decoder": {"type": "Fuse"},
        "model": {"vocab": {text: id_ for id_, text in texts.items()}, "merges": []},
    }


_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def _by_characters(tokenizer: Tokenizer) -> dict[str, Any]:
    rules = tokenizer.rules
    assert rules.order is not None
    fallback = byte_ids(tokenizer)
    vocab = {
        byte_token(fallback[id_]) if id_ in fallback else token.decode().replace(" ", "▁"): id_
        for id_, token in enumerate(tokenizer.plain_tokens)
        if token
    }
    ordered = [tokenizer.plain_tokens[id_] for id_ in rules.order]
    symbols = {token for token in ordered if len(token.decode(errors="ignore")) == 1}
    symbols |= {bytes([byte]) for byte in range(256)}
    merges = pairs_of({token: rank for rank, token in enumerate(ordered)}, symbols)
    steps: list[dict[str, Any]] = [_SPACES]
    if rules.prefix == "each":
        steps.insert(0, {"type": "Prepend", "prepend": "▁"})
    scheme = {"missing": "always", "first": "first", "": "never"}.get(rules.prefix)
    split = tokenizer.pattern == r" ?[^ ]+| "
    metaspace = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": scheme,
        "split": split,
    }
    if split and scheme is None:
        raise TokenizerError("its way to split text after a prefix is not written")
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if rules.prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if scheme is None else None,
        "pre_tokenizer": None if scheme is None else metaspace,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "vocab": vocab,
            "merges": [[part.decode().replace(" ", "▁") for part in pair] for pair in merges],
            "byte_fallback": True,
        },
    }
