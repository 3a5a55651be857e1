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
from gpt.cachespec import CacheSpec
from gpt.config import GPTConfig
from gpt.errors import CheckpointError, SamplingError, UserError
from gpt.logprobs import logprobs
from gpt.pages import CachePages, most_pages
from gpt.params import NO_TOKEN, NOT_FINITE, SCORED, Made, SamplingParams, TokenLogprob
from gpt.plan import AttentionPlan, Chunk
from gpt.sampling import Draw, sample
from gpt.sequence import Sequence
from gpt.starter import Starter
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
    model: Model,
    cache: KVCache,
    work: Seq[tuple[Sequence, int]],
    *,
    n_vocab: int,
    fixed: bool = False,
) -> list[Made | None]:
    """One forward over the next tokens of each sequence.

    Args:
        cache: holds the `computed` tokens of each sequence; extended in place.
        work: `(sequence, n)`: run the next n of its pending tokens. Its block tables must already
            have room for them.
        n_vocab: ids from here up are padding of the embedding and never chosen.
        fixed: attention as for `AttentionPlan.paged`.

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
        chunks.append(Chunk(start, n, sequence.tables))
        ids.extend(sequence.ids[start:end])
        # After a preemption tokens are run again that have their scores already.
        rows = range(max(start, len(sequence.scores)), min(end, len(sequence.targets)))
        if rows:
            scored.append((i, slice(len(logit_rows), len(logit_rows) + len(rows))))
            logit_rows.extend(len(ids) - end + row for row in rows)
        if n == sequence.pending and not sequence.scoring:
            drawn.append(i)
            drawn_rows.append(len(logit_rows))
            logit_rows.append(len(ids) - 1)
    device = cache.layer(0).keys.device
    plan = AttentionPlan.paged(
        chunks,
        page_size=cache.page_size,
        pattern=cache.spec.patterns,
        device=device,
        logit_rows=logit_rows,
        fixed=fixed,
        in_place=cache.read_in_place,
        conv_width=cache.spec.conv_width,
    )
    logits = model(torch.tensor(ids, device=device), plan, cache)[:, :n_vocab]
    results: list[Made | None] = [None] * len(work)
    for i, rows_of in scored:
        results[i] = _score(logits[rows_of], work[i][0])
    if drawn:
        last = logits[drawn_rows] if scored else logits
        for i, made in zip(drawn, _draw(last, [work[i][0] for i in drawn]), strict=True):
            results[i] = results[i] or made
    for i, ((sequence, n), result) in enumerate(zip(work, results, strict=True)):
        sequence.computed += n
        if result is None and sequence.scoring and not sequence.pending:
            results[i] = Made(SCORED)
        elif result is not None and result.token >= 0:
            sequence.ids.append(result.token)
            if sequence.guide is not None:
                sequence.guide.push(result.token)
    return results


def _draw(logits: Tensor, sequences: list[Sequence]) -> list[Made]:
    """The next token of each sequence, from its row of (M, V) logits."""
    draws = [
        Draw(
            s.params,
            s.choice,
            s.output_len,
            s.history if s.params.penalised else None,
            s.banned,
            None if s.guide is None else s.guide.bitmask(),
        )
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


def _score(logits: Tensor, sequence: Sequence) -> Made | None:
    """Score the next targets, as many as there are rows. NOT_FINITE if that cannot be done."""
    first = len(sequence.scores)
    targets = sequence.targets[first : first + len(logits)]
    scores = logprobs(logits, targets, [sequence.top_scores] * len(targets))
    if any(score.token == NOT_FINITE for score in scores):
        return Made(NOT_FINITE)
    sequence.scores += scores
    return None


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
        SamplingError: settings that do not fit the vocabulary, or a constraint that no text meets.
        CheckpointError: the model's logits are not finite.
    """
    starter = Starter(model.config, tokenizer)
    spec = CacheSpec.of(model.config)
    ids = starter.encode(prompt)
    for first in range(0, num_samples, MAX_BATCH):
        sequences = [
            starter.start(ids, params, choice)
            for choice in range(first, min(first + MAX_BATCH, num_samples))
        ]
        n_pages = [
            1 + sum(most_pages(m, s.max_cached, prefill_chunk, PAGE_SIZE) for s in sequences)
            for m in spec.memories
        ]
        texts = Texts(
            model, tokenizer, n_pages, dtype=dtype, device=device, prefill_chunk=prefill_chunk
        )
        for sequence in sequences:
            added = texts.add(sequence)
            assert added, "the pool was made to hold every sequence whole"
        while len(texts):
            for _, piece in texts.step():
                if isinstance(piece, UserError):
                    raise piece
                yield piece


def fault(token: int) -> UserError:
    """What to say when there is no token: `token` says why."""
    if token == NO_TOKEN:
        reason = (
            "the model gives no chance to any of the tokens that may come next, or its vocabulary "
            "lacks what would have to; allow other texts"
        )
        return SamplingError([("constraint", reason)])
    return CheckpointError(
        "the model's logits are not finite numbers: the checkpoint is damaged or its training "
        "diverged; use an earlier one"
    )


def text_of(sequence: Sequence, tokenizer: Tokenizer, before: bytes = b"") -> TextStream:
    """The text that the sequence's tokens will make, after `before`."""
    params = sequence.params
    return TextStream(
        tokenizer,
        params.stop,
        ends=sequence.ends,
        stop_tokens=params.stop_tokens,
        min_tokens=params.min_tokens,
        before=before,
    )


class Texts:
    """Texts that are made side by side; one may join whenever another is over.

    Room for the most pages that a text will hold at once is set aside when it joins, so it never
    has to give way; it takes them as it grows, and gives back those that no layer will read again.

    Args:
        n_pages: pages of the KV cache for each group of layers, the null page included.
        dtype, device: of the KV cache; the model's own.
        prefill_chunk: prompt tokens in one step.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        n_pages: int | Seq[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._cache = KVCache(model.config, n_pages, PAGE_SIZE, dtype=dtype, device=device)
        self._pages = CachePages(self._cache.spec.memories, self._cache.n_pages, PAGE_SIZE)
        self._unclaimed = self._pages.capacity
        self._prefill_chunk = prefill_chunk
        self._live: dict[Sequence, TextStream] = {}

    def __len__(self) -> int:
        """Texts that are not over."""
        return len(self._live)

    @property
    def pages_used(self) -> int:
        """Pages that texts hold now, over all groups of layers."""
        return self._pages.used

    def add(self, sequence: Sequence) -> bool:
        """Let a new sequence join; False, and nothing done, if there is no room for it."""
        most = self._pages.most(sequence.max_cached, self._prefill_chunk)
        if any(n > left for n, left in zip(most, self._unclaimed, strict=True)):
            return False
        self._claim(most, -1)
        self._live[sequence] = text_of(sequence, self._tokenizer)
        return True

    def step(self) -> list[tuple[Sequence, Piece | UserError]]:
        """One step over the texts: a piece for each that got a token.

        An error in its place says why there is none; the text is over, as is one whose piece has a
        reason to finish.
        """
        work = _share(list(self._live), self._prefill_chunk)
        for sequence, n in work:
            self._pages.release_behind(sequence)
            grown = self._pages.grow(sequence, sequence.computed + n)
            assert grown, "room was set aside for every text"
        results = step(self._model, self._cache, work, n_vocab=self._tokenizer.n_vocab)
        pieces: list[tuple[Sequence, Piece | UserError]] = []
        for (sequence, _), made in zip(work, results, strict=True):
            if made is None:
                continue
            piece = fault(made.token) if made.token < 0 else self._piece(sequence, made)
            pieces.append((sequence, piece))
            if isinstance(piece, UserError) or piece.finish_reason is not None:
                del self._live[sequence]
                self._pages.release(sequence)
                self._claim(self._pages.most(sequence.max_cached, self._prefill_chunk), 1)
        return pieces

    def _piece(self, sequence: Sequence, made: Made) -> Piece:
        stream = self._live[sequence]
        text = stream.push(made.token, last=sequence.full, complete=sequence.complete)
        return Piece(
            sequence.choice, made.token, text, stream.finish_reason, stream.matched_stop,
            made.logprob, made.top,
        )  # fmt: skip

    def _claim(self, pages: list[int], sign: int) -> None:
        self._unclaimed = [a + sign * b for a, b in zip(self._unclaimed, pages, strict=True)]


def _share(live: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Decode steps for all that have caught up, prompt tokens for the others up to the budget."""
    work = [(s, 1) for s in live if s.pending == 1]
    for sequence in live:
        if sequence.pending > 1 and budget > 0:
            n = min(sequence.pending, budget)
            work.append((sequence, n))
            budget -= n
    return work
