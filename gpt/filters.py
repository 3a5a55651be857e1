"""What changes logits before a draw: penalties, bias, masks, and the filters that keep some of the
vocabulary.

All of it works on (M, V) rows at once. A row that does not ask for a thing keeps its numbers, and
what no row asks for is not computed.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gpt.history import History
from gpt.params import SamplingParams

PREFIX = 1024
"""Top-p and typical look at this many tokens before they sort the whole vocabulary."""

TINY, HUGE = 1e-30, 1e30
"""Factors stay within these, so that float32 holds them and nearly every product."""


class Penalised(Protocol):
    """What penalties need to know of a row; `gpt.sampling.Draw` is one."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def history(self) -> History | None: ...


def within_range(value: float) -> float:
    """A positive setting, bounded so that float32 can divide and multiply by it."""
    return min(max(value, TINY), HUGE)


def penalise(logits: Tensor, rows: Seq[Penalised]) -> Tensor:
    """Repetition penalty, then frequency and presence penalties, as `SamplingParams` defines them.

    Args:
        logits: (M, V), any float type; unchanged.
        rows: M of them.

    Returns:
        (M, V): `logits` itself if no row has a penalty, else float32. What was impossible stays so,
        and nothing else becomes so.
    """
    places = [i for i, row in enumerate(rows) if row.params.penalised]
    if not places:
        return logits
    # Only tokens that stand in the texts are touched: D of all rows together, not M * V.
    histories = []
    for i in places:
        history = rows[i].history
        if history is None:
            raise ValueError("penalties need the tokens that the text has had")
        histories.append(history)
    device = logits.device
    lengths = [len(history.tokens) for history in histories]

    def gathered(arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device)

    def spread(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths)).to(device)

    counts = gathered([np.frombuffer(history.counts, dtype=np.int64) for history in histories])
    # Places in the flat (M * V) numbers: one index is three times as fast as a row and a token.
    where = gathered(
        [
            np.frombuffer(history.tokens, dtype=np.int64) + row * logits.shape[-1]
            for row, history in zip(places, histories, strict=True)
        ]
    )
    params = [rows[i].params for i in places]
    repetition = spread([within_range(p.repetition_penalty) for p in params])
    frequency = spread([p.frequency_penalty for p in params])
    presence = spread([p.presence_penalty for p in params])

    shaped = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    flat = shaped.view(-1)
    old = flat.index_select(0, where)  # (D,)
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - frequency * counts - presence * (counts > 0)
    largest = torch.finfo(torch.float32).max
    flat.index_copy_(0, where, torch.where(old == -torch.inf, old, new.clamp(-largest, largest)))
    return shaped


class Masked(Protocol):
    """What bias and masks need to know of a row; `gpt.sampling.Draw` is one."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def banned(self) -> Collection[int]: ...
    @property
    def bitmask(self) -> np.ndarray | None: ...


def bias(logits: Tensor, rows: Seq[Masked]) -> Tensor:
    """Add each row's `logit_bias`: (M, V) → (M, V). What was impossible stays so.

    Returns:
        `logits` itself if no row has one, else float32.
    """
    V = logits.shape[-1]
    pairs = [
        (row * V + token, value)
        for row, each in enumerate(rows)
        for token, value in each.params.logit_bias
    ]
    if not pairs:
        return logits
    where, values = (
        torch.tensor(column, device=logits.device) for column in zip(*pairs, strict=True)
    )
    shaped = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    shaped.view(-1).index_add_(0, where, values.to(torch.float32))
    return shaped


def mask(logits: Tensor, rows: Seq[Masked]) -> Tensor:
    """Rule out what a row may not make: what is not in `allowed_tokens`, what is `banned` at this
    place, what its constraint does not allow.

    Args:
        logits: (M, V); unchanged.
        rows: M of them; a bitmask is (ceil(V / 32),) int32, bit `token % 32` of word `token // 32`
            set where the token is allowed.

    Returns:
        (M, V) with -inf there: `logits` itself if no row has a mask.
    """
    V, device = logits.shape[-1], logits.device
    only = [(i, row.params.allowed_tokens) for i, row in enumerate(rows)]
    allowed = [(i, tokens) for i, tokens in only if tokens is not None]
    bitmasks = [(i, row.bitmask) for i, row in enumerate(rows)]
    words = [(i, bits) for i, bits in bitmasks if bits is not None]
    banned = [i * V + token for i, row in enumerate(rows) for token in row.banned]
    if not (allowed or words or banned):
        return logits

    def places(found: list[int]) -> Tensor:
        return torch.tensor(found, dtype=torch.long, device=device)

    out = logits.clone(memory_format=torch.contiguous_format)
    flat = out.view(-1)
    if allowed:
        where = places([i * V + token for i, tokens in allowed for token in tokens])
        kept = flat[where]
        out.index_fill_(0, places([i for i, _ in allowed]), -torch.inf)
        flat.index_copy_(0, where, kept)
    if words:
        packed = np.stack([bits for _, bits in words]).view(np.uint8)
        bits = np.unpackbits(packed, axis=1, count=V, bitorder="little")
        hidden = torch.from_numpy(bits).to(device) == 0
        if len(words) == len(rows):
            out.masked_fill_(hidden, -torch.inf)
        else:
            at = places([i for i, _ in words])
            out.index_copy_(0, at, out[at].masked_fill(hidden, -torch.inf))
    if banned:
        flat.index_fill_(0, places(banned), -torch.inf)
    return out


def keep(logits: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """Top-k, top-p, min-p and typical, in this order: what is not kept becomes -inf.

    Args:
        logits: (M, V) float32, already divided by the temperature, the largest of a row 0.
        params: M of them.

    Returns:
        (M, V); at least one token of each row is kept.
    """
    device = logits.device
    most = _most_likely(logits, params)
    if most is not None:
        logits = _keep_largest(logits, logits, most)
    if any(p.min_p > 0 for p in params):
        floor = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        below = logits < torch.tensor(floor, dtype=torch.float32, device=device)[:, None]
        logits = logits.masked_fill(below, -torch.inf)
    asking = [i for i, p in enumerate(params) if p.typical_p < 1]
    if asking:
        wanted = torch.tensor([params[i].typical_p for i in asking], device=device)[:, None]
        if len(asking) == len(params):
            return _typical(logits, wanted)
        rows = torch.tensor(asking, device=device)
        logits = logits.index_copy(0, rows, _typical(logits[rows], wanted))
    return logits


def _most_likely(logits: Tensor, params: Seq[SamplingParams]) -> Tensor | None:
    """How many of the most likely tokens top-k and top-p keep: (M, 1), or None for all."""
    V = logits.shape[-1]
    top_k = [p.top_k if 0 < p.top_k < V else V for p in params]
    top_p = [p.top_p for p in params]
    if min(top_k) == V and min(top_p) == 1:
        return None
    k = torch.tensor(top_k, device=logits.device)[:, None]
    if min(top_p) == 1:
        return k
    # Top-p acts on what top-k left over, so only its k tokens count, and their mass is the whole.
    prefix = min(V, max(PREFIX, max(x for x in top_k if x < V) if min(top_k) < V else 0))
    p = torch.tensor(top_p, device=logits.device)[:, None]
    while True:
        values = logits.topk(prefix, dim=-1).values.exp()  # (M, prefix), falling
        inside = torch.arange(prefix, device=logits.device) < k
        running = (values * inside).cumsum(-1)
        whole = torch.where(k < V, running[:, -1:], logits.exp().sum(-1, keepdim=True))
        enough = running >= p * whole
        if prefix == V or bool((enough.any(-1, keepdim=True) | (p >= 1)).all()):
            break
        prefix = V
    needed = torch.where(enough.any(-1, keepdim=True), enough.int().argmax(-1, keepdim=True) + 1, k)
    return torch.where(p < 1, torch.minimum(needed, k), k)


def _keep_largest(logits: Tensor, key: Tensor, count: Tensor) -> Tensor:
    """Set all but the `count` (M, 1) of largest `key` to -inf; of equals, the lowest ids stay."""
    V = logits.shape[-1]
    filtered = count < V
    most = int(torch.where(filtered, count, 1).max())  # rows that keep all must not sort all
    ranked = key.topk(most, dim=-1).values
    border = ranked.gather(-1, count.clamp(max=most) - 1)  # the smallest key that stays
    above = key > border
    equal = key == border
    room = count - above.sum(-1, keepdim=True)
    stays = above | (equal & (equal.cumsum(-1) <= room)) | ~filtered
    return logits.masked_fill(~stays, -torch.inf)


def _typical(logits: Tensor, wanted: Tensor) -> Tensor:
    """Keep the tokens whose surprisal is nearest to the entropy, until they have mass `wanted`.

    Meister et al., "Locally typical sampling", arXiv 2202.00666.
    """
    V = logits.shape[-1]
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(p == 0, 0)).sum(-1, keepdim=True)
    key = -(entropy + log_p).abs()  # falling with the distance; what is impossible comes last
    prefix = min(V, PREFIX)
    while True:
        ranked = _ranked(key, prefix)
        mass = p.gather(-1, ranked).cumsum(-1)
        enough = mass >= wanted
        needed = torch.where(
            enough.any(-1, keepdim=True), enough.int().argmax(-1, keepdim=True) + 1, V
        )
        # Of equals at the prefix's end topk took any: the last key must not be needed.
        last = key.gather(-1, ranked[:, -1:])
        before = key.gather(-1, ranked.gather(-1, needed.clamp(max=prefix) - 1)) > last
        if prefix == V or bool((enough.any(-1, keepdim=True) & before).all()):
            return _keep_largest(logits, key, needed)
        prefix = V


def _ranked(key: Tensor, count: int) -> Tensor:
    """Places of the `count` largest keys, falling, equals in the order of their ids."""
    if count == key.shape[-1]:
        return key.sort(dim=-1, descending=True, stable=True).indices
    found = key.topk(count, dim=-1).indices.sort(dim=-1).values
    order = key.gather(-1, found).sort(dim=-1, descending=True, stable=True).indices
    return found.gather(-1, order)
