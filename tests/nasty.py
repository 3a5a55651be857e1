"""Text that is hard to split, and a vocabulary that shows how it was split."""

from __future__ import annotations

from hypothesis import strategies as st

# Letters of every case and none, marks, digits, punctuation, contractions, every kind of blank.
NASTY = "aBstlvSTé\u0301\u0e31文ǅʰªſ、。12५½Ⅷ'’./!-_\n\r\t \u00a0\u2028\x1c\x85🙂\u200d"
mixed = st.text(st.sampled_from(NASTY), max_size=200)


def pair_ranks() -> dict[bytes, int]:
    """All bytes, and any two characters of NASTY as one token: ids change where a split does."""
    parts = {char.encode()[:n] for char in NASTY for n in range(2, 5)}
    pairs = {(a + b).encode() for a in NASTY for b in NASTY}
    tokens = dict.fromkeys([*(bytes([b]) for b in range(256)), *sorted(parts), *sorted(pairs)])
    return {token: rank for rank, token in enumerate(tokens)}
