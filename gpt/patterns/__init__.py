"""Attention patterns: which earlier positions a token may look at.

A pattern is a predicate on absolute positions. The predicate *is* the definition, and the oracle
that the tests hold every kernel to; what else a pattern says (`gpt.patterns.base`) follows from it
and lets `gpt.plan` pick a kernel that never touches what nobody may see. The known patterns are in
`gpt.patterns.family`, how a configuration spells them in `gpt.patterns.text`.

Nothing here imports torch until a predicate is asked: reading a configuration checks its patterns.
"""

from gpt.patterns.base import LayerPatterns, Memory, Pattern
from gpt.patterns.family import BigBird, Causal, Dilated, Fixed, SlidingWindow
from gpt.patterns.text import check_pattern, parse_pattern, parse_patterns, trust

__all__ = [
    "BigBird",
    "Causal",
    "Dilated",
    "Fixed",
    "LayerPatterns",
    "Memory",
    "Pattern",
    "SlidingWindow",
    "check_pattern",
    "parse_pattern",
    "parse_patterns",
    "trust",
]
