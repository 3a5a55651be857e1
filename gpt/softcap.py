"""Attention whose scores are capped, where no fused kernel of torch's can do it.

    out = softmax(c * tanh(scale * q k^T / c) + term) v

A score never leaves (-c, c), so no weight saturates and the gradient of a large score fades instead
of exploding (Gemma 2, arXiv 2408.00118, section 2). `scaled_dot_product_attention` has no place for
it between the product and the softmax. So `gpt.attention.attend` takes, by shape: block rows for
whole sequences that are long (`gpt.blocksparse`), two small products for single tokens, and what is
here for the rest. Where no gradient is wanted, a few queries at a time bound the memory for scores.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES_AT_ONCE = 2**24
"""Scores that exist at a time where no gradient is wanted: 64 MiB of float32."""

FIXED_KEYS = 512
"""Keys that are added up at a time in a group that is fixed: see `gpt.deterministic`."""


def cap_scores(scores: Tensor, cap: float) -> Tensor:
    """c * tanh(scores / c)."""
    return torch.tanh(scores / cap) * cap


def capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    cap: float,
    mask: Tensor | None,
    causal: bool,
    dropout: float = 0.0,
    fixed: bool = False,
) -> Tensor:
    """Softmax attention with capped scores.

    Args:
        q: (b, H, t, D).
        k, v: (b, K, s, D); query head h reads key head h // (H / K).
        mask: (b or 1, 1 or H, t, s) bool, True where a query may look, or numbers to add.
        causal: keys are the queries' own positions, none may look ahead; there is no mask then.
        dropout: probability of dropping a weight.
        fixed: add up in an order that does not depend on s.

    Returns:
        (b, H, t, D), of q's type.
    """
    b, H, t, _ = q.shape
    s = k.shape[2]
    if causal:
        mask = torch.ones(t, s, dtype=torch.bool, device=q.device).tril()[None, None]
    if fixed:
        return _in_blocks(q, k, v, scale, cap, mask)
    # Autograd would keep the scores of every share all the same.
    at_once = t if torch.is_grad_enabled() else max(1, SCORES_AT_ONCE // (b * H * s))
    parts = []
    for first in range(0, t, at_once):
        few = slice(first, first + at_once)
        own = None if mask is None else mask[:, :, few]
        weights = _scores(q[:, :, few], k, scale, cap, own).softmax(-1)
        if dropout:
            weights = F.dropout(weights, dropout)
        parts.append(_mix(weights.to(v.dtype), v))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _scores(q: Tensor, k: Tensor, scale: float, cap: float, mask: Tensor | None) -> Tensor:
    """(b, H, t, s), float32 at the least, -inf where a query may not look."""
    b, H, t, D = q.shape
    K = k.shape[1]
    # Query heads that share a key head are rows of one product.
    found = q.reshape(b, K, H // K * t, D) @ k.transpose(-1, -2)
    found = found.view(b, H, t, -1)
    found = found.to(torch.promote_types(found.dtype, torch.float32))
    scores = cap_scores(found * scale, cap)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, float("-inf"))
    return scores + mask


def _mix(weights: Tensor, v: Tensor) -> Tensor:
    """(b, H, t, s) weights of (b, K, s, D) values."""
    b, H, t, s = weights.shape
    K = v.shape[1]
    return (weights.view(b, K, H // K * t, s) @ v).view(b, H, t, -1)


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, mask: Tensor | None
) -> Tensor:
    """The same, `FIXED_KEYS` keys at a time, each time as many: blocks in which nothing is seen add
    exact zeros, so a query's result is that of the keys it sees, whoever else reads more.
    """
    s = k.shape[2]
    short = -s % FIXED_KEYS
    k, v = F.pad(k, (0, 0, 0, short)), F.pad(v, (0, 0, 0, short))
    if mask is not None:
        hidden = False if mask.dtype == torch.bool else float("-inf")
        mask = F.pad(mask, (0, short), value=hidden)
    out: Tensor | None = None
    top: Tensor | None = None
    total: Tensor | None = None
    for first in range(0, s, FIXED_KEYS):
        few = slice(first, first + FIXED_KEYS)
        own = None if mask is None else mask[..., few]
        scores = _scores(q, k[:, :, few], scale, cap, own)
        most = scores.amax(-1, keepdim=True)
        new = most if top is None else torch.maximum(top, most)
        # A row that sees nothing yet has -inf for its maximum; minus itself that would be NaN.
        against = new.masked_fill(new.isneginf(), 0)
        weights = (scores - against).exp()
        part, sums = _mix(weights.to(v.dtype), v[:, :, few]), weights.sum(-1, keepdim=True)
        if out is None or top is None or total is None:
            out, total = part.to(sums.dtype), sums
        else:
            faded = (top - against).exp()
            out, total = out * faded + part, total * faded + sums
        top = new
    assert out is not None
    assert total is not None
    return (out / total).to(q.dtype)
