"""A vocabulary as plain data that JSON can hold, and its identity.

Format 2: `kind`, `pattern`, `end_of_text` (a name), `special` (ids by name), `tokens` (base64 by
id, empty where there is none) and `fingerprint`. Format 1 had end-of-text alone, after the tokens.
Format 3 is for what only imported vocabularies have: `begin`, `ends` and the fields of
`gpt.rules.Rules`. What can be said in format 2 is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from gpt.errors import TokenizerError
from gpt.rules import Rules

END_OF_TEXT = "<|endoftext|>"
FORMAT = 3


class Described(NamedTuple):
    """What a tokenizer is made of; see `gpt.tokenizer.Tokenizer` for the fields."""

    kind: str
    pattern: str
    tokens: list[bytes]
    special: dict[str, int]
    end_of_text: str
    begin: str | None = None
    ends: tuple[str, ...] = ()
    rules: Rules = Rules()

    @property
    def plain(self) -> bool:
        """Whether nothing of it is of format 3."""
        return self.begin is None and not self.ends and self.rules == Rules()


def to_dict(described: Described, fingerprint: str) -> dict[str, Any]:
    return {
        "format": 2 if described.plain else FORMAT,
        "kind": described.kind,
        "pattern": described.pattern,
        "end_of_text": described.end_of_text,
        "special": described.special,
        "fingerprint": fingerprint,
        **({} if described.plain else _additions(described)),
        "tokens": [base64.b64encode(token).decode("ascii") for token in described.tokens],
    }


def _additions(described: Described) -> dict[str, Any]:
    """What format 3 has beyond format 2, as plain data."""
    values = {"begin": described.begin, "ends": described.ends, **asdict(described.rules)}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def from_dict(values: Any) -> tuple[Described, str]:
    """The inverse of `to_dict`; reads formats 1 and 2 too.

    The types are right afterwards, the rest is for who makes a tokenizer of it to check.

    Raises:
        TokenizerError: not made by `to_dict`, or of a later format.
    """
    if not isinstance(values, dict):
        raise TokenizerError(f"a tokenizer is an object of fields, not {type(values).__name__}")
    if "added_tokens" in values:
        raise TokenizerError("it is one of the Hugging Face kind, which cannot be read here")
    version = values.get("format")
    if type(version) is not int or not 1 <= version <= FORMAT:
        raise TokenizerError(
            f"its format is {repr(version)[:40]}, but this version reads 1 to {FORMAT}"
        )
    kind, pattern, tokens = (values.get(name) for name in ("kind", "pattern", "tokens"))
    if not (isinstance(kind, str) and isinstance(pattern, str) and isinstance(tokens, list)):
        raise TokenizerError("a tokenizer needs the fields kind, pattern and tokens")
    if not (kind.isprintable() and 0 < len(kind) <= 40):
        raise TokenizerError(f"the tokenizer's kind is no name: {kind[:40]!r}")
    end_of_text = values.get("end_of_text")
    if not isinstance(end_of_text, str) or (version == 1 and end_of_text != END_OF_TEXT):
        raise TokenizerError(f"the end-of-text token is {repr(end_of_text)[:40]}, no such name")
    special = {end_of_text: len(tokens)} if version == 1 else values.get("special")
    if not isinstance(special, dict):
        raise TokenizerError("a tokenizer needs the field special: ids by name")
    try:
        decoded = [base64.b64decode(token, validate=True) for token in tokens]
    except (binascii.Error, TypeError, ValueError):
        raise TokenizerError("the tokenizer has a token that is not base64") from None
    described = Described(kind, pattern, decoded, special, end_of_text)
    if version == FORMAT:
        begin, ends, rules = _read_additions(values)
        described = described._replace(begin=begin, ends=ends, rules=rules)
    return described, str(values.get("fingerprint"))


def _read_additions(values: dict[str, Any]) -> tuple[str | None, tuple[str, ...], Rules]:
    begin, ends, order = (values.get(name) for name in ("begin", "ends", "order"))
    texts = [values.get(name, "") for name in ("normalizer", "prefix")]
    always, characters = values.get("always", []), values.get("characters", False)
    wrong = {
        "begin": not isinstance(begin, str | None),
        "ends": not _is_list(ends, str),
        "order": order is not None and not _is_list(order, int),
        "always": not _is_list(always, str),
        "characters": not isinstance(characters, bool),
        "normalizer or prefix": not _is_list(texts, str),
    }
    if any(wrong.values()):
        name = next(name for name, is_wrong in wrong.items() if is_wrong)
        raise TokenizerError(f"the tokenizer's field {name} is not what it must be")
    assert order is None or isinstance(order, list)
    rules = Rules(None if order is None else tuple(order), characters, *texts, always=tuple(always))
    return begin, tuple(ends or ()), rules


def _is_list(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def fingerprint(described: Described) -> str:
    """SHA-256 (hex) of all but the kind: what decides which ids a text gets.

    Where end-of-text is the one special token, after all others and under its usual name, it is
    what it was in format 1.
    """
    _, pattern, tokens, special, end_of_text, *_ = described
    parts = [pattern.encode("utf-8", "surrogatepass")]
    if special == {END_OF_TEXT: len(tokens)} and all(tokens):
        parts += [*tokens, END_OF_TEXT.encode()]
    else:
        # No pattern: it would lose text. So this is the digest of no plain vocabulary.
        parts = [b"special tokens", *parts, end_of_text.encode(), *_numbered(special, tokens)]
    if not described.plain:
        parts = [b"rules", json.dumps(_additions(described), sort_keys=True).encode(), *parts]
    # Lengths go first, so that no two vocabularies spell the same bytes.
    return hashlib.sha256(b"".join([_NUMBER(len(part)) + part for part in parts])).hexdigest()


def _numbered(special: Mapping[str, int], tokens: Sequence[bytes]) -> list[bytes]:
    names = sorted((token, name.encode()) for name, token in special.items())
    return [
        *(_NUMBER(token) + name for token, name in names),
        b"",
        *(_NUMBER(rank) + token for rank, token in enumerate(tokens) if token),
    ]


_NUMBER = struct.Struct("<Q").pack
"""A number as eight bytes."""
