"""How files spell tokens: bytes as printable characters (GPT-2), or text with byte tokens
(SentencePiece)."""

from __future__ import annotations

import re

from gpt.rules import BLANK

_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_SPELLED = [*_PLAIN, *(byte for byte in range(256) if byte not in set(_PLAIN))]

CHAR_OF = {
    byte: chr(byte if i < len(_PLAIN) else 0x100 + i - len(_PLAIN))
    for i, byte in enumerate(_SPELLED)
}
"""The character that stands for a byte: itself if it is printable, else one from U+0100 up."""
BYTE_OF = {char: byte for byte, char in CHAR_OF.items()}

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def spelled(token: bytes) -> str:
    """Bytes as characters."""
    return "".join(map(CHAR_OF.__getitem__, token))


def unspelled(token: str) -> bytes:
    """The inverse of `spelled`; a token that is not spelled so stands for its own text."""
    try:
        return bytes(map(BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode(errors="replace")


def byte_token(byte: int) -> str:
    """What a byte is called among tokens of characters."""
    return f"<0x{byte:02X}>"


def byte_of_token(token: str) -> int | None:
    """The byte that a token of characters stands for, if it is of that kind."""
    found = _BYTE_TOKEN.fullmatch(token)
    return int(found[1], 16) if found else None


def text_bytes(token: str) -> bytes:
    """The bytes that a token of characters stands for."""
    byte = byte_of_token(token)
    if byte is not None:
        return bytes([byte])
    return token.replace(BLANK, " ").encode(errors="replace")
