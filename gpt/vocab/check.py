"""Whether an imported vocabulary gives the ids that the `tokenizers` library gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpt.errors import TokenizerError
from gpt.tokenizer import Tokenizer

SAMPLE = (
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\n  All: Speak, speak! ",
    "It's what they'd say: we'll, I'VE, don't; 1234567 3.14 ½ ²x 0x1F  A1b2\t\t\n \r\n\u00a0end  ",
    "naïve café, Äpfel übermäßig; El niño comió 12 piñas. Привет, мир! Γειά σου. שלום עולם",
    "مرحبا بالعالم हिन्दी में नमस्ते ไทย 日本語のテキスト、漢字。한국어 中文字符 🙂👩‍👩‍👧 ",
    "e\u0301 A\u030a \u212b \ufb01n \u1112\u1161\u11ab a\u0323\u0307",
    "def f(x: int) -> str:\n    '''doc'''\n    return {'a': x ** 2, \"b\": [1]}  # ok\n",
    "\n\tif (a<=b&&c!=d){} // http://x.y/z?q=1&r=%20\n        return;",
    " leading", "trailing \n", "   ", "\n\n\n", "\t", "a\u2028b\x85c\x00d\x7f ▁under▁score <0x41>",
)  # fmt: skip
"""Prose, contractions and numbers, other scripts, code, and blanks of all kinds."""

FIELDS = ("version", "added_tokens", "normalizer", "pre_tokenizer", "model")
"""What the ids come of; the other fields could pad to any length."""


def check_ids(tokenizer: Tokenizer, described: Mapping[str, Any]) -> bool:
    """Compare the ids of a sample with those of the `tokenizers` library, if it is installed.

    Args:
        described: what the `tokenizer.json` holds.

    Returns:
        Whether they were compared.

    Raises:
        TokenizerError: they differ, or the library cannot read it.
    """
    try:
        import tokenizers
    except ImportError:
        return False
    text = json.dumps({name: described[name] for name in FIELDS if name in described})
    try:
        reference = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 (it raises Exception itself)
        reason = (str(error).splitlines() or [""])[0][:200]
        raise TokenizerError(f"the tokenizers library cannot read it: {reason}") from None
    names = [*tokenizer.special]
    missing = tokenizer.missing_bytes
    marked = [" a\n".join(names[i : i + 50]) for i in range(0, len(names), 50)]
    for sample in [*SAMPLE, *marked, *_words(tokenizer)]:
        if not missing.isdisjoint(sample.encode()):
            continue  # it would be left out there, and is an error here
        wanted = reference.encode(sample, add_special_tokens=False).ids
        found = tokenizer.encode(sample, special=names)
        if found != wanted:
            raise TokenizerError(
                f"its ids are not those of the tokenizers library: {sample[:60]!r} becomes "
                f"{found[:12]} here and {wanted[:12]} there; please report this"
            )
    return True


def _words(tokenizer: Tokenizer) -> list[str]:
    """A few hundred tokens of the vocabulary, in a row with their neighbours."""
    step = max(1, tokenizer.n_vocab // 400)
    texts = [
        tokenizer.token_bytes(token).decode(errors="ignore")
        for token in range(0, tokenizer.n_vocab, step)
    ]
    return ["".join(texts[i : i + 8]) for i in range(0, len(texts), 8)] + texts
