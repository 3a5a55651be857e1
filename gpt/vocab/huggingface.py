"""Vocabularies of Hugging Face folders: `tokenizer.json`, or `vocab.json` with `merges.txt`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt.errors import TokenizerError
from gpt.specials import MAX_VOCAB
from gpt.tokenizer import Tokenizer
from gpt.vocab.check import check_ids
from gpt.vocab.described import DOCUMENT_ENDS, BpeVocabulary, build, choose_ends
from gpt.vocab.files import MAX_MERGES, read, read_json, read_optional
from gpt.vocab.patterns import QWEN2_PATTERN, of_pre_tokenizer, steps_of

PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")


def open_vocabulary(folder: Path | str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    `tokenizer.json` is read, else `vocab.json` and `merges.txt`; beside it what the configuration
    files say of the tokens that begin and end a text. Where the `tokenizers` library is installed,
    its ids of a sample are compared.

    Raises:
        TokenizerError: none of these files, a damaged one, or a vocabulary that cannot be taken
            over exactly; the reason is named.
    """
    folder = Path(folder)
    try:
        return _open(folder)
    except TokenizerError as error:
        if str(folder) in str(error):
            raise
        raise TokenizerError(f"the vocabulary in {folder} cannot be imported: {error}") from None


def _open(folder: Path) -> Tokenizer:
    settings: dict[str, Any] = {}
    for name in reversed(CONFIGS):
        settings |= read_optional(folder / name)
    if (folder / "tokenizer.json").is_file():
        described = read_json(folder / "tokenizer.json")
    else:
        pair = next((p for p in PAIRS if all((folder / name).is_file() for name in p)), None)
        if pair is None:
            model = next(iter(sorted(folder.glob("*.model"))), None)
            hint = (
                f"; it has {model.name}, which is not read: let transformers write a tokenizer.json"
                if model
                else ""
            )
            raise TokenizerError(
                f"{folder} has neither a tokenizer.json nor a vocab.json with merges.txt{hint}"
            )
        described = _of_pair(folder, *pair, settings)
    tokenizer = of_description(described, settings, _end_ids(folder))
    check_ids(tokenizer, described)
    return tokenizer


def of_description(
    described: Mapping[str, Any], settings: Mapping[str, Any], end_ids: Sequence[int] = ()
) -> Tokenizer:
    """A tokenizer from what a `tokenizer.json` holds.

    Args:
        described: its content.
        settings: that of `tokenizer_config.json`.
        end_ids: ids of the tokens that end what the model makes.

    Raises:
        TokenizerError: something that cannot be taken over exactly.
    """
    model = _object(described.get("model"), "model")
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(
            f"its model is of the type {repr(model.get('type'))[:40]}; only BPE is supported"
        )
    if model.get("dropout"):
        raise TokenizerError("its model leaves out merges at random (dropout), so ids are not sure")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise TokenizerError(f"its model has a {name}, which is not supported")
    vocab = _vocab(model.get("vocab"))
    special, always = _added(described.get("added_tokens") or [], vocab)
    normalizer, prefix = _normalizer(described.get("normalizer"))
    pre_tokenizer = described.get("pre_tokenizer")
    pattern: str | None = None
    characters = normalizer == "blank" or _is_metaspace(pre_tokenizer)
    if characters:
        if pre_tokenizer is not None:
            pattern, prefix = _metaspace(pre_tokenizer, normalizer)
        normalizer = "blank"
    elif prefix:
        raise TokenizerError("its normalizer prepends to byte-level text, which is not supported")
    else:
        pattern, prefix = of_pre_tokenizer(pre_tokenizer)
    if normalizer == "nfc" and any(
        token.get("normalized") for token in described.get("added_tokens") or []
    ):
        raise TokenizerError("an added token is looked for in normalized text; not supported")
    begin = _begin(described.get("post_processor"), settings, special)
    named = [token for name in ("eos_token",) if (token := _name(settings.get(name)))]
    end_of_text, ends = choose_ends(special, named, end_ids)
    return build(
        BpeVocabulary(
            vocab=vocab,
            merges=_merges(model.get("merges"), vocab),
            special=special,
            always=always,
            pattern=pattern,
            characters=characters,
            byte_fallback=bool(model.get("byte_fallback")),
            unknown=_name(model.get("unk_token")),
            ignore_merges=bool(model.get("ignore_merges")),
            normalizer=normalizer,
            prefix=prefix,
            end_of_text=end_of_text,
            begin=begin,
            ends=ends,
        )
    )


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TokenizerError(f"it has no {name}, or a damaged one")
    return value


def _vocab(found: Any) -> dict[str, int]:
    vocab = _object(found, "vocabulary")
    for token, id_ in vocab.items():
        _checked_id(token, id_)
    if len(set(vocab.values())) < len(vocab):
        raise TokenizerError("two tokens of its vocabulary have the same id")
    return vocab


def _checked_id(token: str, id_: Any) -> int:
    if type(id_) is not int or not 0 <= id_ < MAX_VOCAB:
        raise TokenizerError(
            f"the token {token[:40]!r} has the id {repr(id_)[:40]}, but ids are whole numbers "
            f"from 0 to {MAX_VOCAB - 1}"
        )
    return id_


def _merges(found: Any, vocab: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """The rank of each pair; they are texts with a space between, or lists of two."""
    if not isinstance(found, list) or len(found) > MAX_MERGES:
        raise TokenizerError("it has no list of merges, or far too long a one")
    merges: dict[tuple[str, str], int] = {}
    for rank, merge in enumerate(found):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and all(isinstance(part, str) and part for part in pair)
        ):
            raise TokenizerError(
                f"merge {rank} is {repr(merge)[:40]}, but a merge is a pair of tokens"
            )
        left, right = pair
        for token in (left, right, left + right):
            if token not in vocab:
                raise TokenizerError(
                    f"merge {rank} is {repr(merge)[:40]}, but the vocabulary has no token "
                    f"{token[:40]!r}"
                )
        if (left, right) in merges:
            raise TokenizerError(f"the merge {repr(merge)[:40]} is in its list twice")
        merges[left, right] = rank
    return merges


def _added(found: Any, vocab: Mapping[str, int]) -> tuple[dict[str, int], list[str]]:
    """Ids of the added tokens by name, and names of those that are ordinary text."""
    if not isinstance(found, list):
        raise TokenizerError("its added_tokens are no list")
    special: dict[str, int] = {}
    always = []
    for token in found:
        fields: dict[str, Any] = token if isinstance(token, dict) else {}
        name = fields.get("content")
        if not isinstance(name, str) or not name:
            raise TokenizerError(f"an added token is {repr(token)[:60]}, but it needs a content")
        id_ = _checked_id(name, fields.get("id"))
        if vocab.get(name, id_) != id_ or special.get(name, id_) != id_:
            raise TokenizerError(f"the token {name[:40]!r} has two ids")
        for flag in ("single_word", "lstrip", "rstrip"):
            if token.get(flag):
                raise TokenizerError(
                    f"the added token {name[:40]!r} takes in what stands beside it ({flag}), which "
                    "is not supported"
                )
        special[name] = id_
        if not token.get("special"):
            always.append(name)
    taken = {id_: name for name, id_ in vocab.items()}
    for name, id_ in special.items():
        if taken.setdefault(id_, name) != name:
            raise TokenizerError(
                f"the tokens {name[:40]!r} and {taken[id_][:40]!r} have the same id {id_}"
            )
    return special, always


def _normalizer(found: Any) -> tuple[str, str]:
    """The name of a normalizer in `gpt.rules`, and the prefix that it makes."""
    steps = steps_of(found, "normalizers", "normalizer")
    kinds = [step.get("type") for step in steps]
    if not kinds:
        return "", ""
    if kinds == ["NFC"]:
        return "nfc", ""
    prefix = ""
    if kinds[0] == "Prepend" and steps[0].get("prepend") == "▁":
        prefix, kinds, steps = "each", kinds[1:], steps[1:]
    if (
        kinds == ["Replace"]
        and steps[0].get("pattern") == {"String": " "}
        and steps[0].get("content") == "▁"
    ):
        return "blank", prefix
    shown = ", ".join(str(kind)[:20] for kind in kinds[:6])
    raise TokenizerError(
        f"its normalizer ({shown}) is not supported; NFC is, and ▁ in place of spaces"
    )


def _is_metaspace(found: Any) -> bool:
    return isinstance(found, dict) and found.get("type") == "Metaspace"


def _metaspace(found: Any, normalizer: str) -> tuple[str | None, str]:
    """The pattern of a pre-tokenizer of that type, None if it splits nothing; and the prefix."""
    scheme = found.get("prepend_scheme", "always") if isinstance(found, dict) else None
    prefix = {"always": "missing", "first": "first", "never": ""}.get(str(scheme))
    if (
        normalizer
        or prefix is None
        or not _is_metaspace(found)
        or found.get("replacement", "▁") != "▁"
        or found.get("add_prefix_space") is False
    ):
        raise TokenizerError(
            f"its pre_tokenizer is {repr(found)[:80]}, which is not supported beside its normalizer"
        )
    return (r" ?[^ ]+| " if found.get("split", True) else None), prefix


def _begin(found: Any, settings: Mapping[str, Any], special: Mapping[str, int]) -> str | None:
    """The special token that the post-processor puts before a text."""
    steps = steps_of(found, "processors", "post_processor")
    begin: str | None = None
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            continue  # it shifts offsets, no ids
        if kind != "TemplateProcessing":
            raise TokenizerError(f"its post_processor {str(kind)[:40]} is not supported")
        names = _template(step.get("single"))
        if names == [None]:
            continue
        if len(names) != 2 or names[1] is not None or begin is not None:
            raise TokenizerError(
                "its post_processor puts more around a text than one token before it "
                f"({', '.join(str(name or 'the text') for name in names)[:80]}); not supported"
            )
        begin = names[0]
    bos = _name(settings.get("bos_token"))
    if settings.get("add_eos_token") is True:
        raise TokenizerError("its tokenizer_config.json adds a token after a text (add_eos_token)")
    if settings.get("add_bos_token") is False:
        return None
    if begin is None and settings.get("add_bos_token") is True:
        begin = bos
    if begin is not None and begin not in special:
        raise TokenizerError(f"the token {begin[:40]!r} that begins a text is no added token")
    return begin


def _template(found: Any) -> list[str | None]:
    """What a template puts in a row: names of special tokens, None for the text."""
    names: list[str | None] = []
    for part in found if isinstance(found, list) else [None]:
        inner = part.get("SpecialToken") if isinstance(part, dict) else None
        name = inner.get("id") if isinstance(inner, dict) else None
        if not (isinstance(name, str) or (isinstance(part, dict) and "Sequence" in part)):
            raise TokenizerError(f"its post_processor has {repr(part)[:60]}, no part of a template")
        names.append(name)
    return names


def _name(value: Any) -> str | None:
    """The text of a token that a configuration names, as text or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _end_ids(folder: Path) -> list[int]:
    """Ids that end a text, as the model's own configurations have them."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        value = read_optional(folder / name).get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    return [id_ for id_ in found if type(id_) is int]


_CLASSES = {
    None: ("", False),
    "GPT2Tokenizer": ("", False),
    "GPT2TokenizerFast": ("", False),
    "Qwen2Tokenizer": (QWEN2_PATTERN, True),
    "Qwen2TokenizerFast": (QWEN2_PATTERN, True),
}
"""Split pattern (empty: GPT-2's) and composition of tokenizers that are no more than two files."""


def _of_pair(
    folder: Path, vocab_name: str, merges_name: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What a `tokenizer.json` made of the two files would hold."""
    kind = settings.get("tokenizer_class")
    if not (kind is None or isinstance(kind, str)) or kind not in _CLASSES:
        raise TokenizerError(
            f"{folder / vocab_name} belongs to a {repr(kind)[:40]}, of which only a tokenizer.json "
            "can be read; let transformers write one"
        )
    pattern, composes = _CLASSES[kind]
    vocab = _vocab(read_json(folder / vocab_name))
    try:
        lines = read(folder / merges_name).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise TokenizerError(f"{folder / merges_name} is not UTF-8") from None
    if lines[0].startswith("#version"):
        lines = lines[1:]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": settings.get("add_prefix_space") is True,
        "use_regex": not pattern,
        "trim_offsets": True,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "version": "1.0",
        "added_tokens": _named_tokens(folder, vocab, settings),
        "normalizer": {"type": "NFC"} if composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}
        if pattern
        else level,
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [line.rstrip("\r") for line in lines if line.strip("\r")],
        },
    }


def _named_tokens(
    folder: Path, vocab: Mapping[str, int], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Added tokens as a `tokenizer.json` has them, from the configurations beside the two files."""
    ids = dict(vocab)
    for added, id_ in read_optional(folder / "added_tokens.json").items():
        ids[added] = _checked_id(added, id_)
    found: dict[str, dict[str, Any]] = {}
    decoder = settings.get("added_tokens_decoder")
    for key, token in (decoder if isinstance(decoder, dict) else {}).items():
        if isinstance(token, dict) and isinstance(token.get("content"), str) and key.isdecimal():
            found[token["content"]] = {**token, "id": int(key[:10])}
    more = settings.get("additional_special_tokens")
    named = [_name(settings.get(f"{key}_token")) for key in ("bos", "eos", "unk", "pad")]
    named += [_name(one) for one in (more if isinstance(more, list) else [])]
    if not any(named) and not found:
        named = [DOCUMENT_ENDS[0]]
    for token in filter(None, named):
        if token in ids:
            found.setdefault(token, {"content": token, "id": ids[token], "special": True})
    for added in ids.keys() - vocab.keys():
        found.setdefault(added, {"content": added, "id": ids[added], "special": False})
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [flags | token for token in sorted(found.values(), key=lambda token: token["id"])]
