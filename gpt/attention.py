"""Attention: one implementation, for training, prefill, decode and everything in between.

Vaswani et al., "Attention is all you need", arXiv 1706.03762. Each token asks a question (query q),
each token it may see offers an answer (value v) under a heading (key k); the answers are mixed by
how well question and heading match:

    out = softmax(scale * q k^T + term) v

(With a soft-cap the scores go through a tanh ahead of the term: `gpt.softcap`.)

**Why 1/sqrt(D).** If q and k have D independent components of mean 0 and variance 1, their dot
product has variance D. Without the factor the scores of a 64-wide head have a standard deviation of
8, softmax puts nearly all its weight on one key, and its gradient vanishes; with 1/sqrt(D) they
have variance 1 whatever D is. Dividing by D instead goes too far: scores shrink to 1/sqrt(D), all
weights look alike, and the head is a mean.

**Heads.** Each head mixes D of the channels by its own scores. Query head h reads key and value
head `h // (H / K)`: with K < H several query heads share one (grouped-query attention), which
divides the cache by H / K:

    H = 8, K = 2      q  0 1 2 3 4 5 6 7
                      kv 0 0 0 0 1 1 1 1

**Where tokens stand** is told by the embedding, by turning q and k (`gpt.rotary`), or by a term
that is added to the scores (`gpt.positions`).

**Who may look at whom** is the plan's to say (`gpt.plan`), where the keys come from is the cache's
(`gpt.cache`). With no cache the keys are those of the tokens at hand; with one, the tokens' keys
are stored first and those of the whole sequence read back. That is the only difference between
training and generation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.blocksparse import block_sparse_attention
from gpt.blockwork import Extra
from gpt.cache import LayerCache
from gpt.config import GPTConfig
from gpt.native import gradients
from gpt.native import kernels as native
from gpt.native.causal import LONGEST, causal_attention
from gpt.norms import RMSNorm
from gpt.plan import Group, LayerPlan
from gpt.positions import ScoreTerm, score_term
from gpt.rotary import RotaryTable, rotate
from gpt.softcap import cap_scores, capped_attention

FIXED_QUERIES = 8
"""In a group that is fixed queries come in multiples of these: see `gpt.deterministic`."""


IN_PLACE_QUERIES = 16
"""A chunk of a prompt up to this long reads its keys where they lie, as single tokens do. For more
queries torch's tiles repay the copy that they need."""


class Attention(nn.Module):
    """Multi-head self-attention with shared key and value heads."""

    def __init__(self, config: GPTConfig, layer: int = 0) -> None:
        super().__init__()
        H, K, D, C = config.n_head, config.kv_heads, config.head_width, config.d_model
        self.sizes = (H, K, K)
        self.head_dim = D
        self.scale = config.score_scale
        self.softcap = config.attn_softcap
        self.dropout = config.attn_dropout
        self.qkv = nn.Linear(C, (H + 2 * K) * D, bias=config.has_qkv_bias)
        self.out = nn.Linear(H * D, C, bias=config.bias)
        self.q_norm = RMSNorm(D, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, eps=config.norm_eps) if config.qk_norm else None
        self.term = score_term(config)
        own = config.has_value_embedding(layer)
        self.values = ValueEmbedding(config) if own else None

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTable | None,
        plan: LayerPlan,
        cache: LayerCache | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """Let every token look at what the plan allows it.

        Args:
            x: (B, T, C), or (N, C) for a paged plan.
            rotary: angles of the tokens' positions (`gpt.rotary.rotary_table`), or None.
            ids: (B, T) or (N,) of the tokens; only value embeddings read them.

        Returns:
            The same shape as x.
        """
        y = self.mix(*self.project(x, rotary), plan, cache, ids)
        return self.out(y)  # type: ignore[no-any-return]  # as every module's call is

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: LayerPlan,
        cache: LayerCache | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """What lies between the two matrices, of what `project` returns: (..., H * D)."""
        if self.values is not None:
            assert ids is not None, "tokens have values of their own, so it must be known which"
            v = self.values(v, ids)
        dropout = self.dropout if self.training else 0.0
        y = attend(
            q, k, v, plan, cache,
            scale=self.scale, dropout=dropout, term=self.term, softcap=self.softcap,
        )  # fmt: skip
        return y.flatten(-2)

    def project(self, x: Tensor, rotary: RotaryTable | None) -> tuple[Tensor, Tensor, Tensor]:
        """Questions, headings and answers of the tokens: (..., H, D), (..., K, D), (..., K, D)."""
        qkv, norms = self.qkv(x), None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight)
        if (norms or rotary) and (kernels := gradients.suit(qkv, *(norms or ()))) is not None:
            eps = 0.0 if self.q_norm is None else float(self.q_norm.eps or 0)
            table = None if rotary is None else (rotary.cos, rotary.sin)
            mixed = rotary is not None and rotary.interleaved
            heads = gradients.Heads(*self.sizes[:2], self.head_dim, eps, mixed)
            return gradients.take_apart(kernels, qkv, heads, norms, table)
        q, k, v = self.heads(qkv)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        return q, k, v

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the product, (..., (H + 2 K) * D), as `project` returns them."""
        qkv = qkv.view(*qkv.shape[:-1], -1, self.head_dim)  # (..., H + 2 K, D)
        # torch gives `split` no types.
        return qkv.split(self.sizes, dim=-2)  # type: ignore[no-any-return, no-untyped-call]


class ValueEmbedding(nn.Module):
    """A value that a token has from its id alone, beside the one that the stream makes.

        v_t = W_v x_t + a E[id_t]        E: (V, K * D), a learned, 1 at the start

    A way around the layers below for what a token *is* (Zhou et al., "Value residual learning",
    arXiv 2410.17897; as tables of their own in modded-nanogpt, 2024). The cache holds the sum, so
    later steps know nothing of it.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.kv_heads * config.head_width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, v: Tensor, ids: Tensor) -> Tensor:
        """(..., K, D) values of the tokens `ids` (...)."""
        own = self.embed(ids).to(v.dtype).view(v.shape)
        return torch.addcmul(v, own, self.scale.to(v.dtype))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: LayerPlan,
    cache: LayerCache | None = None,
    *,
    scale: float,
    dropout: float = 0.0,
    term: ScoreTerm | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Mix values by how well queries match keys. The only place that picks a kernel.

    Args:
        q: (..., H, D), the leading shape holding the plan's tokens in order.
        k, v: (..., K, D) of the same tokens; stored in `cache` first, if there is one.
        scale: multiplies the scores.
        dropout: probability of dropping a weight.
        term: is added to the scores, before the mask.
        softcap: scaled scores are kept within it by a tanh, before the term is added.

    Returns:
        (..., H, D), like q.
    """
    H, D = q.shape[-2:]
    if cache is not None:
        cache.write(k, v, plan)
    y = None
    for group in plan.groups:
        if cache is not None and _in_place(q, group, cache, dropout):
            y = q.new_empty(q.shape) if y is None else y
            _read_in_place(q, group, cache, y, scale, term, softcap)
            continue
        shape = (group.b, group.t, H, D)
        queries = _rows(q, group).reshape(shape).transpose(1, 2)  # (b, H, t, D)
        if cache is not None:
            keys, values = cache.read(group)  # (b, K, s, D)
        else:
            keys = _rows(k, group).reshape(group.b, group.s, -1, D).transpose(1, 2)
            values = _rows(v, group).reshape(group.b, group.s, -1, D).transpose(1, 2)
        dtype = torch.float32 if native.widens(q) else q.dtype
        queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
        part = _kernel(queries, keys, values, group, scale, dropout, term, softcap)
        part = part.transpose(1, 2).to(q.dtype)
        if len(plan.groups) == 1 and group.rows is None:
            return part.reshape(q.shape)
        assert group.rows is not None, "several groups must say which rows are theirs"
        y = q.new_empty(q.shape) if y is None else y
        y.view(-1, H, D)[group.rows] = part.reshape(-1, H, D)
    assert y is not None, "a plan has a group"
    return y


def _in_place(q: Tensor, group: Group, cache: LayerCache, dropout: float) -> bool:
    """Whether the group's keys are read where they lie: few tokens on a processor, if kernels
    for it could be compiled (`gpt.native`)."""
    few = group.t == 1 or (group.t <= IN_PLACE_QUERIES and not group.causal)
    if not few or group.fixed or group.blocks is not None or dropout:
        return False
    return native.serves(cache.keys) and q.dtype == cache.keys.dtype and native.in_rows(q)


def _read_in_place(
    q: Tensor,
    group: Group,
    cache: LayerCache,
    y: Tensor,
    scale: float,
    term: ScoreTerm | None,
    softcap: float | None,
) -> None:
    """Attention of few tokens, written into their rows of y."""
    kernels, bias = native.current(), group.bias
    assert kernels is not None, "asked before"
    if term is not None and bias is None:
        shape = (group.b, group.t, *q.shape[-2:])
        queries = _rows(q, group).reshape(shape).transpose(1, 2)  # (b, H, t, D)
        bias = group.hide(term(queries * scale, group.q_pos, group.k_pos))
    kernels.attend(
        q, cache.keys, cache.values, y, group, cache.page_size, scale, bias, softcap or 0.0
    )


def _rows(x: Tensor, group: Group) -> Tensor:
    """The group's tokens of (..., heads, D), flat; all of them if the group is all there is."""
    return x if group.rows is None else x.reshape(-1, *x.shape[-2:])[group.rows]


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    scale: float,
    dropout: float,
    term: ScoreTerm | None,
    softcap: float | None,
) -> Tensor:
    """(b, H, t, D) queries against (b, K, s, D) keys, by the fastest exact route for the shape."""
    causal, mask = group.causal, group.mask
    if group.blocks is not None and dropout == 0:
        extra = Extra(term, group.q_pos, group.k_pos, group.first_key, softcap)
        found: Tensor = block_sparse_attention(q, k, v, group.blocks, scale, extra)
        return found
    if term is not None:
        # A fused kernel takes a term only as a mask of numbers, -inf where a query may not look.
        # (-1e9 would be no mask: half precision has no such number, and a row of them is a mean.)
        causal, mask = False, group.bias
        if mask is None:
            mask = group.hide(term(q * scale, group.q_pos, group.k_pos))
        if q.device.type != "cpu":
            mask = mask.to(bias_dtype(q))
    elif group.blocks is not None:
        # Weights that are dropped must be known again in the backward pass; the fused kernels keep
        # them, at the price of the whole square.
        mask = group.sight(torch.arange(group.t, device=q.device))
    if group.fixed:
        assert mask is not None, "a fixed group hides its keys by a mask"
        short = -group.t % FIXED_QUERIES
        q, mask = F.pad(q, (0, 0, 0, short)), F.pad(mask, (0, 0, 0, short), value=1)
    elif group.t == 1 and q.device.type == "cpu" and dropout == 0 and not causal:
        return _one_query(q, k, v, mask, scale, softcap)
    elif causal and mask is None and dropout == 0 and softcap is None and group.t == group.s:
        kernels = gradients.suit(q, k, v) if group.t <= LONGEST else None
        if kernels is not None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return causal_attention(kernels, q, k, v, scale).transpose(1, 2)
    if softcap is not None:
        found = capped_attention(
            q, k, v,
            scale=scale, cap=softcap, mask=mask, causal=causal, dropout=dropout, fixed=group.fixed,
        )  # fmt: skip
        return found[:, :, : group.t]
    found = F.scaled_dot_product_attention(
        q, k, v,
        attn_mask=None if causal else mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return found[:, :, : group.t]


def bias_dtype(x: Tensor) -> torch.dtype:
    """In which a term of the scores is made for queries like x. The CPU's kernels take a finer one
    than theirs; others do not, and autocast would convert it anew in every layer."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(x.dtype, torch.float32) if device == "cpu" else x.dtype


def _one_query(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """A single query per sequence as two small matrix products.

    The fused CPU kernel works in tiles of queries and wastes nearly all of each on one query; query
    heads that share a key head make the rows of the product instead. Heads go first because that is
    how the cache lays keys out: both products then run without copying them.
    """
    b, H, _, D = q.shape
    K = k.shape[1]
    heads = q.view(b, K, H // K, D).transpose(0, 1)  # (K, b, G, D)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)  # (K, b, s, D)
    scores = (heads @ keys.transpose(-1, -2)) * scale  # (K, b, G, s)
    if softcap is not None:
        scores = cap_scores(scores, softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask[:, 0], float("-inf"))  # mask: (b, 1, 1, s)
    elif mask is not None:  # (b or 1, H, 1, s)
        scores = scores + mask.view(-1, K, H // K, mask.shape[-1]).transpose(0, 1)
    weights = scores.softmax(-1).to(v.dtype)
    return (weights @ values).transpose(0, 1).reshape(b, H, 1, D)
