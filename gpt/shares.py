"""When the loss is made in shares of the tokens, and in how large ones (`gpt.loss`).

No torch: memory is estimated without it."""

from __future__ import annotations

LARGE = {"cpu": 2**23, "default": 2**28}
"""Logits from which on they are made in shares: on a CPU 32 MiB of float32, which is past its
caches, elsewhere 1 GiB."""

AT_ONCE = {"cpu": 2**22, "default": 2**27}
"""Logits in a share."""


def in_shares(tokens: int, vocab_size: int, device: str) -> bool:
    """Whether the loss of so many tokens is made in shares."""
    return tokens * vocab_size > LARGE.get(device, LARGE["default"])


def share_tokens(vocab_size: int, device: str) -> int:
    """Tokens in a share, a multiple of 16."""
    return max(16, AT_ONCE.get(device, AT_ONCE["default"]) // vocab_size // 16 * 16)
