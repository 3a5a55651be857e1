"""Vocabularies of other formats: read as a `gpt.tokenizer.Tokenizer`, and written from one.

What is read gives the ids that its own library gives, or is refused with the reason.
"""

from __future__ import annotations

from gpt.vocab.gguf import from_gguf, to_gguf
from gpt.vocab.huggingface import open_vocabulary
from gpt.vocab.written import to_huggingface

__all__ = ["from_gguf", "open_vocabulary", "to_gguf", "to_huggingface"]
