"""What a corpus is made of: `Source`, one entry of what `prepare()` and `data.source` take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Source:
    """One source of text.

    Attributes:
        source: a named corpus, a file, a folder, a glob, or `hf:NAME` or `hf:NAME:CONFIG` for a
            Hugging Face dataset.
        field: the column or key that holds the text, where the source has rows (.jsonl, .csv,
            .parquet, datasets).
        weight: how often its text is trained on for each time it would be at weight 1. It changes
            the mix of batches, not what is prepared.
        split: which split of a Hugging Face dataset.
    """

    source: str
    field: str = "text"
    weight: float = 1.0
    split: str = "train"


SourceLike: TypeAlias = "str | os.PathLike[str] | Source"
