"""One step over a batch, and the loop around it.

`step` is the whole of generation: one forward over some tokens of some sequences, and a token
chosen for each sequence that has caught up. The server's engine calls the same function; it
differs from `generate` below only in that a scheduler picks the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpt.cache import PAGE_SIZE, KVCache
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.logprobs import logprobs
from gpt.pages import PageAllocator, pages_for
from gpt.params import NOT_FINITE, SCORED, Made, SamplingParams, TokenLogprob
from gpt.patterns import parse_patterns
from gpt.plan import AttentionPlan, Chunk
from gpt.sampling import Draw, sample
from gpt.sequence import Sequence
from gpt.stream import FinishReason, TextStream
from gpt.tokenizer import Tokenizer

__all__ = ["NOT_FINITE", "PREFILL_CHUNK", "Model", "Piece", "Texts", "generate", "step"]

PREFILL_CHUNK = 512
"""Prompt tokens a step runs at most, here and in the server: bounds the memory of a long prompt."""

MAX_BATCH = 32
"""Samples made side by side; more than that are made in rounds."""


class Model(Protocol):
    """What generation needs of a model; `gpt.model.GPT` is one."""

    @property
    def config(self) -> GPTConfig: ...

    def __call__(self, ids: Tensor, plan: AttentionPlan, cache: KVCache) -> Tensor: ...


@torch.inference_mode()
def step(
    model: Model, cache: KVCache, work: Seq[tuple[Sequence, int]], *, n_vocab: int
) -> list[Made | None]:
    """One forward over the next tokens of each sequence.

    Args:
        cache: holds the `computed` tokens of each sequence; extended in place.
        work: `(sequence, n)`: run the next n of its pending tokens. Its block table must already
            have room for them.
        n_vocab: ids from here up are padding of the embedding and never chosen.

    Returns:
        For each sequence None if tokens are still pending, else the token made, which has been
        appended to its ids. A sequence that is scored gets entries in its `scores` as its tokens
        are run, and SCORED in place of a token in the end. NOT_FINITE in place of a token says that
        logits were NaN or infinite: nothing was appended, and nothing of its mates was touched.
    """
    ids: list[int] = []
    chunks: list[Chunk] = []
    drawn: list[int] = []  # places in `work` of those that get a token
    drawn_rows: list[int] = []  # and their logits' rows
    scored: list[tuple[int, slice]] = []  # places of those that get scores, and their logits' rows
    logit_rows: list[int] = []
    for i, (sequence, n) in enumerate(work):
        if not 1 <= n <= sequence.pending:
            raise ValueError(f"cannot run {n} of {sequence.pending} pending tokens")
        start, end = sequence.computed, sequence.computed + n
        chunks.append(Chunk(start, n, sequence.pages))
        ids.extend(sequence.ids[start:end])
        if sequence.scoring:
            # After a preemption tokens are run again that have their scores already.
            rows = range(len(ids) - (end - max(start, len(sequence.scores))), len(ids))
            scored.append((i, slice(len(logit_rows), len(logit_rows) + len(rows))))
            logit_rows.extend(rows)
        elif n == sequence.pending:
            drawn.append(i)
            drawn_rows.append(len(logit_rows))
            logit_rows.append(len(ids) - 1)
    device = cache.layer(0).keys.device
    plan = AttentionPlan.paged(
        chunks,
        page_size=cache.page_size,
        pattern=parse_patterns(model.config.pattern),
        device=device,
        logit_rows=logit_rows,
    )
    logits = model(torch.tensor(ids, device=device), plan, cache)[:, :n_vocab]
    results: list[Made | None] = [None] * len(work)
    for i, rows_of in scored:
        results[i] = _score(logits[rows_of], *work[i])
    if drawn:
        last = logits[drawn_rows] if scored else logits
        for i, made in zip(drawn, _draw(last, [work[i][0] for i in drawn]), strict=True):
            results[i] = made
    for (sequence, n), result in zip(work, results, strict=True):
        sequence.computed += n
        if result is None or result.token == SCORED:
            continue
        if result.token == NOT_FINITE:
            cache.scrub(sequence.pages)
        else:
            sequence.ids.append(result.token)
    return results


def _draw(logits: Tensor, sequences: list[Sequence]) -> list[Made]:
    """The next token of each sequence, from its row of (M, V) logits."""
    draws = [
        Draw(s.params, s.choice, s.output_len, s.history if s.params.penalised else None)
        for s in sequences
    ]
    made = [Made(token) for token in sample(logits, draws)]
    asking = [i for i, s in enumerate(sequences) if s.params.logprobs is not None]
    if asking:
        tokens = [made[i].token for i in asking]
        tops = [sequences[i].params.logprobs or 0 for i in asking]
        found = logprobs(logits if len(asking) == len(made) else logits[asking], tokens, tops)
        for i, with_logprob in zip(asking, found, strict=True):
            made[i] = with_logprob
    return made


def _score(logits: Tensor, sequence: Sequence, n: int) -> Made | None:
    """Score the last tokens of a chunk of n, as many as there are rows; what `step` returns."""
    assert sequence.targets is not None
    end = sequence.computed + n
    targets = sequence.targets[end - len(logits) : end]
    scores = logprobs(logits, targets, [sequence.params.logprobs or 0] * len(targets))
    if any(score.token == NOT_FINITE for score in scores):
        return Made(NOT_FINITE)
    sequence.scores += scores
    return Made(SCORED) if n == sequence.pending else None


@dataclass(frozen=True)
class Piece:
    """A bit of one sample's text.

    Attributes:
        choice: which sample, from 0.
        token: the id just made.
        text: what it adds to the text, perhaps nothing yet.
        finish_reason: set on a sample's last piece.
        matched_stop: the stop string that ended it, if one did.
        logprob, top: as in `Made`, if they were asked for.
    """

    choice: int
    token: int
    text: str
    finish_reason: FinishReason | None = None
    matched_stop: str | None = None
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


def encode_prompt(prompt: str | Seq[int], tokenizer: Tokenizer) -> list[int]:
    """The ids of a prompt: text begins as a document does, ids are taken as they are."""
    return tokenizer.prompt(prompt) if isinstance(prompt, str) else list(prompt)


def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str | Seq[int],
    params: SamplingParams,
    *,
    num_samples: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    prefill_chunk: int = PREFILL_CHUNK,
) -> Iterator[Piece]:
    """Continue a prompt, piece by piece.

    Args:
        prompt: text, or token ids; empty starts as a document does.
        num_samples: texts to make, side by side; each has random numbers of its own.
        dtype, device: of the KV cache; the model's own.

    Raises:
        PromptError: too long, or ids beyond the vocabulary.
        InexpressibleTextError: the vocabulary has no tokens for a character.
        CheckpointError: the model's logits are not finite.
    """
    ids = encode_prompt(prompt, tokenizer)
    for first in range(0, num_samples, MAX_BATCH):
        sequences = [
            Sequence.start(
                ids,
                params,
                block_size=model.config.block_size,
                n_vocab=tokenizer.n_vocab,
                eot=tokenizer.start,
                choice=choice,
            )
            for choice in range(first, min(first + MAX_BATCH, num_samples))
        ]
        n_pages = 1 + sum(pages_for(s.max_cached, PAGE_SIZE) for s in sequences)
        texts = Texts(
            model, tokenizer, n_pages, dtype=dtype, device=device, prefill_chunk=prefill_chunk
        )
        for sequence in sequences:
            added = texts.add(sequence)
            assert added, "the pool was made to hold every sequence whole"
        while len(texts):
            for _, piece in texts.step():
                if piece is None:
                    raise not_finite()
                yield piece


def not_finite() -> CheckpointError:
    """What to say when the model has no opinion."""
    return CheckpointError(
        "the model's logits are not finite numbers: the checkpoint is damaged or its training "
        "diverged; use an earlier one"
    )


class Texts:
    """Texts that are made side by side; one may join whenever another is over.

    A text gets the pages of its whole length when it joins, so it never has to give way.

    Args:
        n_pages: size of the KV cache in pages, the null page included.
        dtype, device: of the KV cache; the model's own.
        prefill_chunk: prompt tokens in one step.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        n_pages: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._allocator = PageAllocator(max(2, n_pages), PAGE_SIZE)
        self._cache = KVCache(
            model.config, self._allocator.n_pages, PAGE_SIZE, dtype=dtype, device=device
        )
        self._prefill_chunk = prefill_chunk
        self._live: dict[Sequence, TextStream] = {}

    def __len__(self) -> int:
        """Texts that are not over."""
        return len(self._live)

    def add(self, sequence: Sequence) -> bool:
        """Let a new sequence join; False, and nothing done, if its pages are not free."""
        # All at once, so that a lone sequence's pages lie side by side and are read without a copy.
        pages = self._allocator.allocate(pages_for(sequence.max_cached, PAGE_SIZE))
        if pages is None:
            return False
        sequence.pages = pages
        self._live[sequence] = TextStream(self._tokenizer, sequence.params.stop)
        return True

    def step(self) -> list[tuple[Sequence, Piece | None]]:
        """One step over the texts: a piece for each that got a token.

        None in place of a piece says that the text's logits are not finite; it is over, as is one
        whose piece has a reason to finish.
        """
        work = _share(list(self._live), self._prefill_chunk)
        results = step(self._model, self._cache, work, n_vocab=self._tokenizer.n_vocab)
        pieces: list[tuple[Sequence, Piece | None]] = []
        for (sequence, _), made in zip(work, results, strict=True):
            if made is None:
                continue
            piece = None
            if made.token != NOT_FINITE:
                stream = self._live[sequence]
                text = stream.push(made.token, last=sequence.full)
                piece = Piece(
                    sequence.choice, made.token, text, stream.finish_reason, stream.matched_stop,
                    made.logprob, made.top,
                )  # fmt: skip
            pieces.append((sequence, piece))
            if piece is None or piece.finish_reason is not None:
                del self._live[sequence]
                self._allocator.release(sequence.pages)
        return pieces


def _share(live: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Decode steps for all that have caught up, prompt tokens for the others up to the budget."""
    work = [(s, 1) for s in live if s.pending == 1]
    for sequence in live:
        if sequence.pending > 1 and budget > 0:
            n = min(sequence.pending, budget)
            work.append((sequence, n))
            budget -= n
    return work
