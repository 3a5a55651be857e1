"""How likely a model finds a given text: the log-probability of each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from gpt.cache import PAGE_SIZE, KVCache
from gpt.cachespec import CacheSpec
from gpt.generate import PREFILL_CHUNK, Model, fault, step
from gpt.pages import CachePages, most_pages
from gpt.params import NOT_FINITE, Made, SamplingParams
from gpt.starter import Starter
from gpt.tokenizer import Tokenizer


def score(
    model: Model,
    tokenizer: Tokenizer,
    text: str | Seq[int],
    *,
    top: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    prefill_chunk: int = PREFILL_CHUNK,
) -> list[Made]:
    """The log-probability of each token of a text, given those before it; the first one follows
    what a document begins with: the tokenizer's `start`.

    Args:
        text: text, or token ids; at least one token, and no more than the context holds.
        top: how many of the most likely tokens are wanted at each place, 0 to 20.
        dtype, device: of the KV cache; the model's own.
        prefill_chunk: tokens run at once: bounds the memory that their logits take.

    Returns:
        One entry for each token; the log-probabilities add up to that of the text, in nats.

    Raises:
        PromptError: empty, too long, or ids beyond the vocabulary.
        InexpressibleTextError: the vocabulary has no tokens for a character.
        SamplingError: `top` is out of range.
        CheckpointError: the model's logits are not finite.
    """
    starter = Starter(model.config, tokenizer)
    sequence = starter.score(text, SamplingParams(logprobs=top, seed=0))
    memories = CacheSpec.of(model.config).memories
    n_pages = [1 + most_pages(m, sequence.max_cached, prefill_chunk, PAGE_SIZE) for m in memories]
    cache = KVCache(model.config, n_pages, PAGE_SIZE, dtype=dtype, device=device)
    pages = CachePages(memories, n_pages, PAGE_SIZE)
    while sequence.pending:
        n = min(sequence.pending, prefill_chunk)
        pages.release_behind(sequence)
        grown = pages.grow(sequence, sequence.computed + n)
        assert grown, "the pools were made for it"
        (made,) = step(model, cache, [(sequence, n)], n_vocab=tokenizer.n_vocab)
        if made is not None and made.token == NOT_FINITE:
            raise fault(made.token)
    return sequence.scores
