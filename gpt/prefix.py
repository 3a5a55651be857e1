"""By what a full page of the KV cache is known to others: its text, and the text before it.

Keys and values at a position depend on every token up to there and on the model. A pool of pages is
that of one group of layers of one model, so ids are all that is left. Keys are chained, that of a
page being a digest of the one before and of its own ids: as many bytes are hashed as there are ids,
and two texts have equal keys as far as they are equal, page by page.

The digest is a cryptographic one. With a weaker one somebody could look for two prompts of one key,
and be given what was computed for somebody else's text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from hashlib import blake2b

_DIGEST_BYTES = 20


class PageKeys:
    """The keys of a text's full pages, made as they are asked for. The text may grow, and nothing
    of it change."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._keys: list[bytes] = []

    def of(self, ids: Seq[int]) -> list[bytes]:
        """The keys of all pages that the ids fill."""
        size, keys = self._page_size, self._keys
        for start in range(len(keys) * size, len(ids) - size + 1, size):
            before = keys[-1] if keys else b""
            page = array("q", ids[start : start + size]).tobytes()
            keys.append(blake2b(before + page, digest_size=_DIGEST_BYTES).digest())
        return keys
