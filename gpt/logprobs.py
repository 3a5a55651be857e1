"""Log-probabilities of tokens under the raw logits, for tokens that were made or are scored."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from gpt.params import LOGPROB_FLOOR, NOT_FINITE, Made, TokenLogprob

ROWS = 32
"""Rows worked on at once: a float32 copy of a long text's logits would be as large as they are."""


def logprobs(logits: Tensor, tokens: Seq[int], tops: Seq[int]) -> list[Made]:
    """Each row's log-probability of its token, in nats, computed in float32.

    Args:
        logits: (M, V), any float type.
        tokens: M ids.
        tops: for each row, how many of the most likely tokens are wanted too.

    Returns:
        M of them; its token is NOT_FINITE where a row has no proper distribution.
    """
    made: list[Made] = []
    for first in range(0, len(tokens), ROWS):
        piece = slice(first, min(first + ROWS, len(tokens)))
        made += _piece(logits[piece].float(), tokens[piece], tops[piece])
    return made


def _piece(logits: Tensor, tokens: Seq[int], tops: Seq[int]) -> list[Made]:
    proper = logits.amax(-1).isfinite().tolist()
    total = logits.logsumexp(-1)  # (M,)
    # A row that is not proper may come with no token.
    places = torch.tensor([max(token, 0) for token in tokens], device=logits.device)
    chosen = (logits.gather(-1, places[:, None])[:, 0] - total).tolist()
    most = min(max(tops, default=0), logits.shape[-1])
    if most > 0:
        best = logits.topk(most, dim=-1)
        ids = best.indices.tolist()
        values = (best.values - total[:, None]).tolist()
    made = []
    for row, (token, top) in enumerate(zip(tokens, tops, strict=True)):
        if not proper[row]:
            made.append(Made(NOT_FINITE))
            continue
        ranked = zip(ids[row][:top], values[row][:top], strict=True) if top else ()
        made.append(
            Made(
                token,
                max(chosen[row], LOGPROB_FLOOR),
                tuple(TokenLogprob(i, value) for i, value in ranked if value >= LOGPROB_FLOOR),
            )
        )
    return made
