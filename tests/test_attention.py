"""attend(): every kernel against the naive reference, and the mistakes that textbooks warn of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.attention import Attention, attend
from gpt.cache import LayerCache
from gpt.config import GPTConfig
from gpt.patterns import parse_pattern
from gpt.plan import AttentionPlan, Chunk
from tests import reference

PATTERNS = ["causal", "window:1", "window:3", "window:50"]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(1, 13),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1)]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from(PATTERNS),
    st.integers(0, 99),
)
def test_dense_attention_is_the_reference(
    batch: int, time: int, heads: tuple[int, int], width: int, pattern: str, seed: int
) -> None:
    (H, K) = heads
    q = random(batch, time, H, width, seed=seed)
    k, v = random(2, batch, time, K, width, seed=seed + 1)
    plan = AttentionPlan.dense(batch, time, pattern=parse_pattern(pattern)).layer(0)
    found = attend(q, k, v, plan, scale=0.7)
    for b in range(batch):
        wanted = reference.attention(q[b].numpy(), k[b].numpy(), v[b].numpy(), 0.7, pattern)
        np.testing.assert_allclose(found[b].numpy(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2), (4, 1)])
def test_every_kernel_of_a_mixed_step_is_the_reference(pattern: str, H: int, K: int) -> None:
    """A fresh prefill, two decodes of unequal length, a later chunk: one step, four sequences."""
    D, page_size = 4, 4
    shapes = [(0, 6), (8, 1), (5, 1), (3, 5)]  # (tokens in the cache, new tokens)
    cache = LayerCache(random(K, 64, D, seed=1), random(K, 64, D, seed=2), page_size)
    chunks, free = [], [9, 3, 12, 5, 1, 7, 14, 2, 11, 4]
    histories = []
    for i, (start, n) in enumerate(shapes):
        pages = [free.pop() for _ in range(-(-(start + n) // page_size))]
        chunks.append(Chunk(start, n, [pages]))
        k, v = random(2, start, K, D, seed=10 + i)
        if start:
            plan = AttentionPlan.paged(
                [Chunk(0, start, [pages])], page_size=page_size, pattern=parse_pattern("causal")
            )
            cache.write(k, v, plan.layer(0))
        histories.append((k, v))
    plan = AttentionPlan.paged(chunks, page_size=page_size, pattern=parse_pattern(pattern))
    total = sum(n for _, n in shapes)
    q = random(total, H, D, seed=3)
    k, v = random(2, total, K, D, seed=4)
    found = attend(q, k, v, plan.layer(0), cache, scale=0.5).split([n for _, n in shapes])
    news = zip(*(x.split([n for _, n in shapes]) for x in (q, k, v)), strict=True)
    for (start, _), (k0, v0), (q1, k1, v1), out in zip(shapes, histories, news, found, strict=True):
        keys, values = torch.cat([k0, k1]).numpy(), torch.cat([v0, v1]).numpy()
        wanted = reference.attention(q1.numpy(), keys, values, 0.5, pattern, q_start=start)
        np.testing.assert_allclose(out.numpy(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_are_those_of_the_formula(pattern: str) -> None:
    H, K, D, T = 4, 2, 4, 9
    q, k, v = (random(2, T, n, D, seed=n).requires_grad_() for n in (H, K, K))
    plan = AttentionPlan.dense(2, T, pattern=parse_pattern(pattern)).layer(0)
    weight = random(2, T, H, D, seed=9)
    found = torch.autograd.grad((attend(q, k, v, plan, scale=0.5) * weight).sum(), (q, k, v))

    seen = torch.tensor([[reference.may_look(pattern, i, j) for j in range(T)] for i in range(T)])
    wide_k, wide_v = (x.repeat_interleave(H // K, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, wide_k) * 0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights, wide_v)
    wanted = torch.autograd.grad((out * weight).sum(), (q, k, v))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_default_scale_is_one_over_the_root_of_the_head_width() -> None:
    config = GPTConfig(vocab_size=8, d_model=64, n_head=4)
    assert Attention(config).scale == 16**-0.5
    assert Attention(config.replace(attn_scale=0.25)).scale == 0.25
    # Why: dot products of unit-variance vectors then have unit variance, whatever the width.
    for D in (4, 64, 512):
        scores = (random(4000, D) * random(4000, D, seed=1)).sum(-1) * D**-0.5
        assert abs(scores.var() - 1) < 0.15


def test_heads_are_not_mixed() -> None:
    """Changing one key head changes only the query heads that read it: no axes are confused."""
    q, k, v = random(1, 5, 4, 8), random(1, 5, 2, 8, seed=1), random(1, 5, 2, 8, seed=2)
    plan = AttentionPlan.dense(1, 5, pattern=parse_pattern("causal")).layer(0)
    before = attend(q, k, v, plan, scale=1.0)
    k[:, :, 1] += 1 + random(1, 5, 8, seed=3)
    changed = (attend(q, k, v, plan, scale=1.0) - before).abs().amax((0, 1, 3)) > 1e-6
    assert changed.tolist() == [False, False, True, True]


def test_attention_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    module = Attention(GPTConfig(vocab_size=8, d_model=16, attn_dropout=0.5, position="learned"))
    x = torch.randn(2, 6, 16)
    plan = AttentionPlan.dense(2, 6, pattern=parse_pattern("causal")).layer(0)
    assert not torch.equal(module.train()(x, None, plan), module(x, None, plan))
    assert torch.equal(module.eval()(x, None, plan), module(x, None, plan))
