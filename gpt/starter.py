"""From a prompt and settings to a Sequence that a model can run. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import TYPE_CHECKING

from gpt.cachespec import CacheSpec
from gpt.config import GPTConfig
from gpt.params import Constraint, SamplingParams
from gpt.sequence import Sequence
from gpt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gpt.constraint import ConstraintCompiler, Guide

KEPT_CONSTRAINTS = 32
"""Constraints that are kept compiled: a program that asks for JSON asks for the same each time."""


class Starter:
    """Makes sequences for one model. Threads may share it.

    Attributes:
        endless: texts may go past the model's context if `max_tokens` says so.
    """

    def __init__(self, config: GPTConfig, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.block_size = config.block_size
        self.endless = CacheSpec.of(config).endless
        self.ends = tokenizer.end_ids
        self._compiler: ConstraintCompiler | None = None
        self._guide = lru_cache(KEPT_CONSTRAINTS)(self._compile)

    def encode(self, prompt: str | Seq[int]) -> list[int]:
        """The ids of a prompt: text begins as a document does, ids are taken as they are.

        Raises:
            InexpressibleTextError: the vocabulary has no tokens for a character.
        """
        return self.tokenizer.prompt(prompt) if isinstance(prompt, str) else list(prompt)

    def start(self, prompt: str | Seq[int], params: SamplingParams, choice: int = 0) -> Sequence:
        """A sequence that continues the prompt.

        Args:
            prompt: text, or token ids; empty starts as a document does.
            choice: which of several texts for the prompt.

        Raises:
            PromptError: too long, or ids beyond the vocabulary.
            InexpressibleTextError: the vocabulary has no tokens for a character.
            SamplingError: settings that do not fit the vocabulary, a constraint among them.
        """
        constraint = params.constraint
        return Sequence.start(
            self.encode(prompt),
            params,
            block_size=self.block_size,
            n_vocab=self.tokenizer.n_vocab,
            eot=self.tokenizer.start,
            ends=self.ends,
            choice=choice,
            endless=self.endless,
            guide=None if constraint is None else self._guide(constraint),
        )

    def score(self, text: str | Seq[int], params: SamplingParams) -> Sequence:
        """A sequence that scores the text; what it raises is as for `start`."""
        return Sequence.score(
            self.tokenizer.encode(text) if isinstance(text, str) else list(text),
            params,
            block_size=self.block_size,
            n_vocab=self.tokenizer.n_vocab,
            eot=self.tokenizer.start,
        )

    def _compile(self, constraint: Constraint) -> Guide:
        if self._compiler is None:
            from gpt.constraint import ConstraintCompiler

            self._compiler = ConstraintCompiler(self.tokenizer, self.ends)
        return self._compiler.compile(constraint)
