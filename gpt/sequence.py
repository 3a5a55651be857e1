"""Sequence: one text being made, as the scheduler and the step see it. Pure Python, no torch.

A sequence has no phases. It has tokens, of which the first `computed` stand in the KV cache; a
prefill chunk and a decode step differ only in how many tokens are caught up at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from gpt.errors import PromptError
from gpt.history import History
from gpt.params import Made, SamplingParams


@dataclass(eq=False)
class Sequence:
    """A prompt and what has been made of it so far, or a text that is being scored.

    Attributes:
        ids: prompt tokens followed by the tokens made.
        params: what the request asked of the sampler.
        max_total: most tokens that `ids` may come to hold.
        choice: which of several texts for one prompt this is; separates their random numbers.
        computed: how many of `ids` have their keys and values in the cache.
        pages: the block table: page `pages[i]` holds positions `i * page_size` and up.
        targets: of a text to be scored: the token that should follow each of `ids`.
        scores: of a text to be scored: one entry for each of `targets` that has been reached.
    """

    ids: list[int]
    params: SamplingParams
    max_total: int
    choice: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    targets: list[int] | None = None
    scores: list[Made] = field(default_factory=list)
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.ids)
        self._history = History(self.prompt_len)

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

        An empty prompt starts from the token before a document. A prompt may fill the context: the
        token after it can still be made, but no more.

        Args:
            eot: what comes before the first token of a document: end-of-text, or a token of its own
                that the vocabulary has for it (`Tokenizer.start`).

        Raises:
            PromptError: too long, an id beyond the vocabulary, or empty and no end-of-text token.
        """
        if not prompt:
            if eot is None:
                raise PromptError("the prompt is empty and this model has no end-of-text token")
            prompt = [eot]
        _check(prompt, "prompt", block_size, n_vocab)
        room = block_size + 1 - len(prompt)
        wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        return cls(list(prompt), params, len(prompt) + wanted, choice)

    @classmethod
    def score(
        cls,
        ids: Seq[int],
        params: SamplingParams,
        *,
        block_size: int,
        n_vocab: int,
        eot: int | None,
    ) -> Sequence:
        """A sequence that predicts each of `ids` from those before it, and makes no token.

        The first is predicted from `eot`, as at the beginning of a document. The sequence is
        over when nothing is pending; `scores` then has one entry for each of `ids`.

        Args:
            params: `logprobs` says how many alternatives are wanted; nothing else matters.

        Raises:
            PromptError: empty, too long, an id beyond the vocabulary, or no end-of-text token.
        """
        if not ids:
            raise PromptError("the text to score is empty; give at least one token")
        if eot is None:
            raise PromptError("this model has no end-of-text token from which a text could begin")
        _check(ids, "text to score", block_size, n_vocab)
        targets = list(ids)
        # As if one token were still to be made: every token that is run needs a place in the cache.
        return cls([eot, *targets[:-1]], params, len(targets) + 1, targets=targets)

    @property
    def scoring(self) -> bool:
        """Whether this text is scored, not continued."""
        return self.targets is not None

    @property
    def history(self) -> History:
        """Which tokens it has had, up to date."""
        return self._history.update(self.ids)

    @property
    def pending(self) -> int:
        """Tokens not yet in the cache; the step that brings it to 0 makes the next token, or ends
        a text that is scored."""
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


def _check(ids: Seq[int], what: str, block_size: int, n_vocab: int) -> None:
    """Raises PromptError if the ids do not fit into the context or the vocabulary."""
    if len(ids) > block_size:
        raise PromptError(
            f"the {what} has {len(ids)} tokens but the model's context holds {block_size}; "
            f"shorten it by at least {len(ids) - block_size}"
        )
    for i, token in enumerate(ids):
        if not 0 <= token < n_vocab:
            raise PromptError(
                f"token id {token} at place {i} of the {what} is outside the vocabulary "
                f"(0 to {n_vocab - 1})"
            )
