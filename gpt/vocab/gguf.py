"""Vocabularies in the metadata of GGUF files (`tokenizer.ggml.*`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpt.errors import TokenizerError
from gpt.specials import MAX_VOCAB
from gpt.splitting import CHAR_PATTERN
from gpt.tokenizer import Tokenizer
from gpt.vocab.described import BpeVocabulary, build, choose_ends
from gpt.vocab.files import MAX_MERGES
from gpt.vocab.merges import pairs_of
from gpt.vocab.patterns import GGUF_NAMES, LLAMA3_PATTERN, NAMES, QWEN2_PATTERN
from gpt.vocab.spelling import byte_token, spelled

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens."""


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Args:
        metadata: plain values by their full names, such as `tokenizer.ggml.tokens`.

    Raises:
        TokenizerError: a part is missing or damaged, or it cannot be taken over exactly.
    """
    try:
        return _from_gguf(metadata)
    except TokenizerError as error:
        raise TokenizerError(f"the vocabulary of the GGUF cannot be imported: {error}") from None


def _from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    model = metadata.get(KEY + "model")
    if model not in ("gpt2", "llama"):
        raise TokenizerError(
            f"{KEY}model is {repr(model)[:40]}; gpt2 and llama are supported (byte-level BPE, and "
            "BPE of the SentencePiece kind)"
        )
    tokens = _texts(metadata, "tokens", MAX_VOCAB)
    kinds = metadata.get(KEY + "token_type", [NORMAL] * len(tokens))
    if not (isinstance(kinds, list) and len(kinds) == len(tokens)):
        raise TokenizerError(f"{KEY}token_type does not have one entry for each token")
    if metadata.get(KEY + "add_eos_token") is True:
        raise TokenizerError(f"{KEY}add_eos_token is set: a token after each text; not supported")
    vocab: dict[str, int] = {}
    special: dict[str, int] = {}
    always = []
    for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if not token or token in vocab or token in special:
            raise TokenizerError(f"token {id_} is {token[:40]!r}, which is empty or there twice")
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            special[token] = id_
            if kind == USER_DEFINED:
                always.append(token)
        else:
            vocab[token] = id_
    ids = {
        name: _id(metadata, name, len(tokens), default if model == "llama" else None)
        for name, default in (("bos", 1), ("eos", 2), ("eot", None), ("eom", None))
    }
    named = {name: id_ for name, id_ in ids.items() if id_ is not None}
    for found in named.values():
        special[tokens[found]] = found
        vocab.pop(tokens[found], None)
    ends = [tokens[found] for name, found in named.items() if name != "bos"]
    end_of_text, others = choose_ends(special, ends, [])
    make = _bytes if model == "gpt2" else _characters
    parts, adds = make(metadata, vocab, tokens, kinds)
    if metadata.get(KEY + "add_bos_token", adds) is True:
        if "bos" not in named:
            raise TokenizerError(f"{KEY}add_bos_token is set, but there is no bos_token_id")
        parts["begin"] = tokens[named["bos"]]
    return build(
        BpeVocabulary(
            vocab=vocab, special=special, always=always, end_of_text=end_of_text, ends=others,
            **parts,
        )
    )  # fmt: skip


def _texts(metadata: Mapping[str, Any], name: str, most: int, least: int = 1) -> list[str]:
    found = metadata.get(KEY + name)
    if not (
        isinstance(found, list)
        and least <= len(found) <= most
        and all(isinstance(text, str) for text in found)
    ):
        raise TokenizerError(f"{KEY}{name} is missing, damaged or too long")
    return found


def _id(metadata: Mapping[str, Any], name: str, size: int, default: int | None) -> int | None:
    found = metadata.get(f"{KEY}{name}_token_id", default)
    if found is None:
        return None
    if type(found) is not int or not 0 <= found < size:
        raise TokenizerError(f"{KEY}{name}_token_id is {repr(found)[:40]}, which is no token")
    return found


def _bytes(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], tokens: list[str], kinds: list[int]
) -> tuple[dict[str, Any], bool]:
    """The fields of a byte-level vocabulary, and whether a text begins with a token unless the
    file says otherwise."""
    name = metadata.get(KEY + "pre")
    if not isinstance(name, str) or name not in GGUF_NAMES:
        raise TokenizerError(
            f"{KEY}pre is {repr(name)[:40]}, a way to split text that is not known here; known are "
            f"{', '.join(GGUF_NAMES)}"
        )
    pattern = GGUF_NAMES[name]
    merges: dict[tuple[str, str], int] = {}
    for rank, merge in enumerate(_texts(metadata, "merges", MAX_MERGES, 0)):
        left, _, right = merge.partition(" ")
        if not left or right == "" or left not in vocab or right not in vocab:
            raise TokenizerError(f"merge {rank} is {merge[:40]!r}, which is no pair of tokens")
        if left + right not in vocab or (left, right) in merges:
            raise TokenizerError(f"merge {rank}, {merge[:40]!r}, makes no token or is there twice")
        merges[left, right] = rank
    fields = {
        "merges": merges,
        "pattern": pattern,
        "ignore_merges": pattern == LLAMA3_PATTERN,
        # The file does not say so, but the vocabulary was made for text in that form.
        "normalizer": "nfc" if pattern == QWEN2_PATTERN else "",
    }
    return fields, pattern == LLAMA3_PATTERN


def _characters(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], tokens: list[str], kinds: list[int]
) -> tuple[dict[str, Any], bool]:
    scores = metadata.get(KEY + "scores")
    if not (
        isinstance(scores, list)
        and len(scores) == len(tokens)
        and all(type(score) in (int, float) and math.isfinite(score) for score in scores)
    ):
        raise TokenizerError(f"{KEY}scores does not have one number for each token")
    prefix = metadata.get(KEY + "add_space_prefix", True)
    return {
        "merges": {},
        "scores": {token: scores[id_] for token, id_ in vocab.items()},
        "characters": True,
        "byte_fallback": True,
        "normalizer": "blank",
        "prefix": "each" if prefix else "",
    }, True


def to_gguf(tokenizer: Tokenizer) -> dict[str, Any]:
    """The metadata by which llama.cpp gives the same ids.

    Returns:
        Plain values by their full names, such as `tokenizer.ggml.tokens`.

    Raises:
        TokenizerError: llama.cpp has no name for its split pattern, or no way to say what it does.
    """
    if tokenizer.rules.characters:
        found = _written_characters(tokenizer)
    else:
        found = _written_bytes(tokenizer)
    found[KEY + "eos_token_id"] = tokenizer.eot
    if tokenizer.ends:
        # A model made to converse ends its turns with the first of them.
        found[KEY + "eos_token_id"] = tokenizer.special[tokenizer.ends[0]]
    found[KEY + "bos_token_id"] = tokenizer.start
    found[KEY + "add_bos_token"] = tokenizer.begin is not None
    found[KEY + "add_eos_token"] = False
    return found


def _written_bytes(tokenizer: Tokenizer) -> dict[str, Any]:
    rules = tokenizer.rules
    ranks = tokenizer.ranks
    merges = pairs_of(ranks, [token for token in ranks if len(token) == 1])
    merging = {left + right for left, right in merges}
    name = NAMES.get(tokenizer.pattern)
    if name is None and tokenizer.pattern == CHAR_PATTERN and not merges:
        name = "gpt-2"  # nothing merges, so it does not matter how text is split
    if name is None:
        raise TokenizerError(
            f"llama.cpp has no name for the split pattern {tokenizer.pattern[:80]!r}, so a GGUF of "
            f"this model would get other ids; it knows those of "
            f"{', '.join(sorted({*NAMES.values()}))}"
        )
    unreached = [token for token in ranks if len(token) > 1 and token not in merging]
    if unreached and name != "llama-bpe":
        raise TokenizerError(
            f"{len(unreached)} tokens, among them {unreached[0][:20]!r}, come of no merge; a GGUF "
            "cannot say what text becomes them"
        )
    if rules.prefix or (rules.normalizer and name != "qwen2"):
        raise TokenizerError(
            "llama.cpp neither puts a space before a byte-level text nor normalizes it; a GGUF of "
            "this model would get other ids"
        )
    texts, kinds = _listed(tokenizer, spelled)
    return {
        KEY + "model": "gpt2",
        KEY + "pre": name,
        KEY + "tokens": texts,
        KEY + "token_type": kinds,
        KEY + "merges": [f"{spelled(left)} {spelled(right)}" for left, right in merges],
    }


def _written_characters(tokenizer: Tokenizer) -> dict[str, Any]:
    rules = tokenizer.rules
    if rules.prefix not in ("", "each"):
        raise TokenizerError(
            "llama.cpp puts a space before every stretch of text or before none, unlike this "
            "vocabulary; a GGUF of this model would get other ids"
        )
    assert rules.order is not None
    place = {token: i for i, token in enumerate(rules.order)}
    fallback = byte_ids(tokenizer)
    texts, kinds = _listed(tokenizer, lambda data: data.decode().replace(" ", "▁"), fallback)
    # Merging goes by score here, so what takes no part must not have a text that could come of it.
    idle = [
        id_
        for id_, (kind, data) in enumerate(zip(kinds, tokenizer.plain_tokens, strict=False))
        if kind == NORMAL and id_ not in place and len(data.decode()) > 1
    ]
    if idle:
        raise TokenizerError(f"the token {texts[idle[0]]!r} takes no part in merging")
    return {
        KEY + "model": "llama",
        KEY + "pre": "default",
        KEY + "tokens": texts,
        KEY + "token_type": kinds,
        KEY + "scores": [
            float(-place[id_]) if id_ in place and kind == NORMAL else 0.0
            for id_, kind in enumerate(kinds)
        ],
        KEY + "add_space_prefix": rules.prefix == "each",
    }


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Bytes by the ids of the tokens that stand for them where a character has none: of two that
    are the same byte the one that takes no part in merging, and all that are half a character."""
    order = set(tokenizer.rules.order or ())
    found: dict[int, int] = {}
    by_byte: dict[int, list[int]] = {}
    for id_, data in enumerate(tokenizer.plain_tokens):
        if len(data) == 1:
            by_byte.setdefault(data[0], []).append(id_)
    for byte, ids in by_byte.items():
        spare = [id_ for id_ in ids if id_ not in order] or ids
        found[spare[0]] = byte
    return found


def _listed(
    tokenizer: Tokenizer, text: Any, fallback: Mapping[int, int] | None = None
) -> tuple[list[str], list[int]]:
    """The texts and kinds of all ids."""
    fallback = fallback or {}
    texts, kinds = [], []
    names = {id_: name for name, id_ in tokenizer.special.items()}
    for id_ in range(tokenizer.n_vocab):
        data = tokenizer.plain_tokens[id_] if id_ < len(tokenizer.plain_tokens) else b""
        if id_ in names:
            kinds.append(USER_DEFINED if names[id_] in tokenizer.rules.always else CONTROL)
            texts.append(names[id_])
        elif id_ in fallback:
            kinds.append(BYTE)
            texts.append(byte_token(fallback[id_]))
        elif data:
            kinds.append(NORMAL)
            texts.append(text(data))
        else:
            kinds.append(UNUSED)
            texts.append(f"[unused{id_}]")
    if len(set(texts)) < len(texts):
        raise TokenizerError("two of its tokens would be written the same; it cannot be exported")
    return texts, kinds
