"""How likely a model finds a given text: the log-probability of each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from gpt.cache import PAGE_SIZE, KVCache
from gpt.generate import PREFILL_CHUNK, Model, not_finite, step
from gpt.pages import pages_for
from gpt.params import NOT_FINITE, Made, SamplingParams
from gpt.sequence import Sequence
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
    sequence = Sequence.score(
        tokenizer.encode(text) if isinstance(text, str) else list(text),
        SamplingParams(logprobs=top, seed=0),
        block_size=model.config.block_size,
        n_vocab=tokenizer.n_vocab,
        eot=tokenizer.start,
    )
    n_pages = pages_for(sequence.max_cached, PAGE_SIZE)
    cache = KVCache(model.config, 1 + n_pages, PAGE_SIZE, dtype=dtype, device=device)
    sequence.pages = list(range(1, 1 + n_pages))
    while sequence.pending:
        work = [(sequence, min(sequence.pending, prefill_chunk))]
        (made,) = step(model, cache, work, n_vocab=tokenizer.n_vocab)
        if made is not None and made.token == NOT_FINITE:
            raise not_finite()
    return sequence.scores
