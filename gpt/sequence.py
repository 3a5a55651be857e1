"""Sequence: one text being made, as the scheduler and the step see it. Pure Python, no torch.

A sequence has no phases. It has tokens, of which the first `computed` stand in the KV cache; a
prefill chunk and a decode step differ only in how many tokens are caught up at once.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpt.errors import PromptError, SamplingError
from gpt.history import History
from gpt.params import Made, SamplingParams
from gpt.prefix import PageKeys

if TYPE_CHECKING:
    from gpt.constraint import Guide


@dataclass(eq=False)
class Sequence:
    """A prompt and what has been made of it so far, or a text that is being scored.

    Attributes:
        ids: prompt tokens followed by the tokens made.
        params: what the request asked of the sampler.
        max_total: most tokens that `ids` may come to hold.
        choice: which of several texts for one prompt this is; separates their random numbers.
        computed: how many of `ids` have their keys and values in the cache.
        tables: a block table for each group of layers that remember the same: page `tables[g][i]`
            holds positions `i * page_size` and up, unless it was given back (`gpt.pages`). Empty:
            the sequence holds no pages.
        ends: tokens that end the text.
        guide: what a constraint allows the text, if it has one; knows each token made.
        priority: who goes first where not all can; a scheduler reads it.
        cached: tokens of the prompt that were found in the cache when it started.
        scoring: the text is scored, not continued.
        targets: what follows each of `ids`, as far as that is to be scored.
        scores: one entry for each of `targets` that has been reached.
    """

    ids: list[int]
    params: SamplingParams
    max_total: int
    choice: int = 0
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    ends: frozenset[int] = frozenset()
    guide: Guide | None = None
    priority: int = 0
    cached: int = 0
    scoring: bool = False
    targets: Seq[int] = ()
    scores: list[Made] = field(default_factory=list)
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.ids)
        self._history = History(self.prompt_len)
        self._page_keys: PageKeys | None = None

    @classmethod
    def start(
        cls,
        prompt: Seq[int],
        params: SamplingParams,
        *,
        block_size: int,
        n_vocab: int,
        eot: int | None,
        ends: Collection[int] | None = None,
        choice: int = 0,
        endless: bool = False,
        guide: Guide | None = None,
    ) -> Sequence:
        """A sequence for a prompt, checked against the model.

        An empty prompt starts from the token before a document. A prompt may fill the context: the
        token after it can still be made, but no more.

        Args:
            eot: what comes before the first token of a document: end-of-text, or a token of its own
                that the vocabulary has for it (`Tokenizer.start`).

        Args:
            ends: tokens that end a text; None: end-of-text.
            guide: the beginning of a text under the constraint of `params`; a copy is taken.
            endless: the model can go on past its context (`gpt.cachespec.CacheSpec.endless`); it
                does where `max_tokens` says so.

        Raises:
            PromptError: too long, an id beyond the vocabulary, or empty and no end-of-text token.
            SamplingError: settings that name tokens beyond the vocabulary.
        """
        if ends is None:
            ends = () if eot is None else (eot,)
        if violations := params.misfits(n_vocab, ends):
            raise SamplingError(violations)
        if not prompt:
            if eot is None:
                raise PromptError("the prompt is empty and this model has no end-of-text token")
            prompt = [eot]
        if endless and params.max_tokens is not None:
            _check_ids(prompt, "prompt", n_vocab)
            wanted = params.max_tokens
        else:
            _check(prompt, "prompt", block_size, n_vocab, ", or set max_tokens" if endless else "")
            room = block_size + 1 - len(prompt)
            wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        return cls(
            list(prompt),
            params,
            len(prompt) + wanted,
            choice,
            ends=frozenset((*(() if params.ignore_end_of_text else ends), *params.stop_tokens)),
            guide=None if guide is None else guide.copy(),
            targets=() if params.prompt_logprobs is None else list(prompt[1:]),
        )

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
        return cls([eot, *targets[:-1]], params, len(targets) + 1, scoring=True, targets=targets)

    @property
    def top_scores(self) -> int:
        """How many of the most likely tokens are wanted where it is scored."""
        return (self.params.logprobs if self.scoring else self.params.prompt_logprobs) or 0

    @property
    def banned(self) -> Collection[int]:
        """Tokens that may not be made now."""
        return self.ends if self.output_len < self.params.min_tokens else ()

    @property
    def complete(self) -> bool:
        """Whether its constraint allows nothing more."""
        return self.guide is not None and self.guide.complete

    @property
    def history(self) -> History:
        """Which tokens it has had, up to date."""
        return self._history.update(self.ids)

    def page_keys(self, page_size: int) -> Seq[bytes]:
        """By what its full pages are known to others; always of the same page size."""
        if self._page_keys is None:
            self._page_keys = PageKeys(page_size)
        return self._page_keys.of(self.ids)

    @property
    def reusable(self) -> int:
        """How many of its first tokens need not be run if somebody else has: not the last, from
        which the next token is predicted, and none whose own prediction is to be scored."""
        scored = len(self.scores)
        return min(len(self.ids) - 1, scored if scored < len(self.targets) else len(self.ids))

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


def _check(ids: Seq[int], what: str, block_size: int, n_vocab: int, instead: str = "") -> None:
    """Raises PromptError if the ids do not fit into the context or the vocabulary."""
    if len(ids) > block_size:
        raise PromptError(
            f"the {what} has {len(ids)} tokens but the model's context holds {block_size}; "
            f"shorten it by at least {len(ids) - block_size}{instead}"
        )
    _check_ids(ids, what, n_vocab)


def _check_ids(ids: Seq[int], what: str, n_vocab: int) -> None:
    for i, token in enumerate(ids):
        if not 0 <= token < n_vocab:
            raise PromptError(
                f"token id {token} at place {i} of the {what} is outside the vocabulary "
                f"(0 to {n_vocab - 1})"
            )
