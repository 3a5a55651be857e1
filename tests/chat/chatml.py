"""A chat template as many models have it, and a vocabulary with its special tokens."""

from __future__ import annotations

from gpt.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

THINKING = (
    "{% for m in messages %}{% set said = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in said %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + said | trim + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Leaves out of earlier answers what the model thought aloud."""

NAMES = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]


def tokenizer() -> Tokenizer:
    return Tokenizer.bytes(NAMES)


def spelt(ids: list[int], vocabulary: Tokenizer) -> str:
    """The ids as text in which special tokens stand in white brackets."""
    names = {token: name for name, token in vocabulary.special.items()}
    parts = [f"⟦{names[i]}⟧".encode() if i in names else vocabulary.token_bytes(i) for i in ids]
    return b"".join(parts).decode()
