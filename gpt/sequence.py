"""Sequence: one text being made, as the scheduler and the step see it. Pure Python, no torch.

A sequence has no phases. It has tokens, of which the first `computed` stand in the KV cache; a
prefill chunk and a decode step differ only in how many tokens are caught up at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from gpt.errors import PromptError
from gpt.params import SamplingParams


@dataclass(eq=False)
class Sequence:
    """A prompt and what has been made of it so far.

    Attributes:
        ids: prompt tokens followed by the tokens made.
        params: what the request asked of the sampler.
        max_total: most tokens that `ids` may come to hold.
        choice: which of several texts for one prompt this is; separates their random numbers.
        computed: how many of `ids` have their keys and values in the cache.
        pages: the block table: page `pages[i]` holds positions `i * page_size` and up.
    """

    ids: list[int]
    params: SamplingParams
    max_total: int
    choice: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.ids)

    @classmethod
    def start(
        cls,
        prompt: Seq[int],
        params: SamplingParams,
        *,
        block_size: int,
        n_vocab: int,
        eot: int | None,
        choice: int = 0,
    ) -> Sequence:
        """A sequence for a prompt, checked against the model.

        An empty prompt starts from end-of-text, the border between documents. A prompt may fill the
        context: the token after it can still be made, but no more.

        Raises:
            PromptError: too long, an id beyond the vocabulary, or empty and no end-of-text token.
        """
        if not prompt:
            if eot is None:
                raise PromptError("the prompt is empty and this model has no end-of-text token")
            prompt = [eot]
        if len(prompt) > block_size:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens but the model's context holds {block_size}; "
                f"shorten it by at least {len(prompt) - block_size}"
            )
        for i, token in enumerate(prompt):
            if not 0 <= token < n_vocab:
                raise PromptError(
                    f"token id {token} at place {i} of the prompt is outside the vocabulary "
                    f"(0 to {n_vocab - 1})"
                )
        room = block_size + 1 - len(prompt)
        wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        return cls(list(prompt), params, len(prompt) + wanted, choice)

    @property
    def pending(self) -> int:
        """Tokens not yet in the cache; the step that brings it to 0 makes the next token."""
        return len(self.ids) - self.computed

    @property
    def output_len(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def full(self) -> bool:
        """Whether no further token may be made."""
        return len(self.ids) >= self.max_total

    @property
    def max_cached(self) -> int:
        """Most tokens that will ever stand in the cache: the last token made needs no place."""
        return self.max_total - 1
