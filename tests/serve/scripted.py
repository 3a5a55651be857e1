"""A model that says what a test tells it to: an ordinary object with the model's own interface.

It computes nothing. Where GPT would return logits it returns a row that makes one token certain, or
a row of NaN. With it the whole server runs for real, over real sockets, and the text is known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.plan import AttentionPlan
from gpt.tokenizer import Tokenizer

NAN = -1
"""In a script: the logits at this place are NaN."""
ANY = -2
"""In a script: all tokens but end-of-text are equally likely; greedy takes id 0."""


class ScriptedModel:
    """Continues a sequence as `following(position, token)` says, called for its newest token.

    Attributes:
        entered: how many forwards have begun.
        steps: for each forward let through, how many tokens it ran and how many sequences got one.
        fail_next: set to an exception to have the next forward raise it.
        fail_always: set to one that each raises.
    """

    def __init__(
        self,
        vocab_size: int,
        following: Callable[[int, int], int],
        *,
        block_size: int = 64,
        pattern: str = "causal",
    ) -> None:
        self.config = GPTConfig(
            vocab_size=vocab_size, block_size=block_size, n_layer=1, n_head=1, d_model=2,
            pattern=pattern,
        )  # fmt: skip
        self.entered = 0
        self.steps: list[tuple[int, int]] = []
        self.fail_next: BaseException | None = None
        self.fail_always: BaseException | None = None
        self._following = following
        self._permits: threading.Semaphore | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, script: Sequence[int], **options: int) -> ScriptedModel:
        """Says `script` after a prompt of one token, then end-of-text for ever."""

        def following(position: int, token: int) -> int:
            return script[position] if position < len(script) else tokenizer.eot

        return cls(tokenizer.n_vocab, following, **options)

    def hold(self) -> None:
        """From now on every forward waits for an `allow`."""
        self._permits = threading.Semaphore(0)

    def allow(self, forwards: int = 1) -> None:
        """Let that many forwards through."""
        assert self._permits is not None
        self._permits.release(forwards)

    def release(self) -> None:
        """Undo `hold`."""
        permits, self._permits = self._permits, None
        assert permits is not None
        permits.release(100)  # more than can be waiting here

    def num_params(self) -> int:
        return 0

    def __call__(self, ids: Tensor, plan: AttentionPlan, cache: KVCache) -> Tensor:
        self.entered += 1
        if (permits := self._permits) is not None:
            permits.acquire()
        assert plan.logit_rows is not None
        rows = plan.logit_rows.tolist()
        self.steps.append((len(ids), len(rows)))
        if (error := self.fail_next) is not None:
            self.fail_next = None
            raise error
        if self.fail_always is not None:
            raise self.fail_always
        logits = torch.full((len(rows), self.config.vocab_size), -1e9)  # (M, V)
        for i, row in enumerate(rows):
            token = self._following(int(plan.positions[row]), int(ids[row]))
            if token == NAN:
                logits[i] = torch.nan
            elif token == ANY:
                logits[i, :-1] = 0  # the last id is end-of-text
            else:
                logits[i, token] = 0
        return logits
