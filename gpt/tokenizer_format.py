"""A vocabulary as plain data that JSON can hold, and its identity.

Format 2: `kind`, `pattern`, `end_of_text` (a name), `special` (ids by name), `tokens` (base64 by
id, empty where there is none) and `fingerprint`. Format 1 had end-of-text alone, after the tokens.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpt.errors import TokenizerError

END_OF_TEXT = "<|endoftext|>"
FORMAT = 2


class Described(NamedTuple):
    """What a tokenizer is made of; see `gpt.tokenizer.Tokenizer` for the fields."""

    kind: str
    pattern: str
    tokens: list[bytes]
    special: dict[str, int]
    end_of_text: str


def to_dict(described: Described, fingerprint: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": described.kind,
        "pattern": described.pattern,
        "end_of_text": described.end_of_text,
        "special": described.special,
        "fingerprint": fingerprint,
        "tokens": [base64.b64encode(token).decode("ascii") for token in described.tokens],
    }


def from_dict(values: Any) -> tuple[Described, str]:
    """The inverse of `to_dict`; reads format 1 too.

    The types are right afterwards, the rest is for who makes a tokenizer of it to check.

    Raises:
        TokenizerError: not made by `to_dict`, or of a later format.
    """
    if not isinstance(values, dict):
        raise TokenizerError(f"a tokenizer is an object of fields, not {type(values).__name__}")
    if "added_tokens" in values:
        raise TokenizerError("it is one of the Hugging Face kind, which cannot be read here")
    version = values.get("format")
    if version not in (1, FORMAT):
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
    return Described(kind, pattern, decoded, special, end_of_text), str(values.get("fingerprint"))


def fingerprint(described: Described) -> str:
    """SHA-256 (hex) of all but the kind: what decides which ids a text gets.

    Where end-of-text is the one special token, after all others and under its usual name, it is
    what it was in format 1.
    """
    _, pattern, tokens, special, end_of_text = described
    parts = [pattern.encode("utf-8", "surrogatepass")]
    if special == {END_OF_TEXT: len(tokens)} and all(tokens):
        parts += [*tokens, END_OF_TEXT.encode()]
    else:
        # No pattern: it would lose text. So this is the digest of no plain vocabulary.
        parts = [b"special tokens", *parts, end_of_text.encode(), *_numbered(special, tokens)]
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
