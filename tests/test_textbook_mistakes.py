"""The mistakes that attention is usually written with, each caught by a test of its own.

Where the mistake can be written down, the test also shows that it would be caught: the wrong code
fails the very check that ours passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.attention import Attention, attend
from gpt.blocks import block_plan
from gpt.blocksparse import block_sparse_attention
from gpt.cache import LayerCache
from gpt.config import GPTConfig
from gpt.patterns import parse_pattern
from gpt.plan import AttentionPlan, Chunk, LayerPlan

PATTERNS = ["causal", "window:3", "window:600", "window:80+sinks:2"]
"""The fused triangle, a mask, and at LONG tokens block rows."""

LONG = 1300


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_plan(text: str, T: int) -> LayerPlan:
    return AttentionPlan.dense(1, T, pattern=parse_pattern(text)).layer(0)


@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize("T", [6, LONG])
def test_attending_over_heads_instead_of_positions(text: str, T: int) -> None:
    """A missing transpose, (T, H, D) for (H, T, D), mixes the heads of a token and no two tokens.
    The first token sees only itself, so its output is its own value, head by head."""
    q, k, v = (random(1, T, 4, 8, seed=n) for n in range(3))

    def right(y: Tensor) -> bool:
        return torch.allclose(y[:, 0], v[:, 0])

    assert right(attend(q, k, v, dense_plan(text, T), scale=0.5))
    wrong = F.scaled_dot_product_attention(q, k, v, scale=0.5)  # over H, silently
    assert wrong.shape == q.shape
    assert not right(wrong)


@pytest.mark.parametrize("new", [1, 3, 70])
@pytest.mark.parametrize("text", ["causal", "window:40", "window:8+sinks:2"])
def test_an_upper_left_aligned_causal_mask_on_a_cached_step(text: str, new: int) -> None:
    """The last of `new` tokens after 90 cached ones sees all 90 + new. Aligned to the upper left
    it would see the first `new` keys: the triangle must stand at the lower right."""
    before, page_size = 90, 16
    pages = range(1, 12)
    q, k, v = (random(before + new, 2, 8, seed=n) for n in range(3))
    cache = LayerCache(torch.zeros(2, 192, 8).double(), torch.zeros(2, 192, 8).double(), page_size)

    def step(start: int, end: int) -> Tensor:
        plan = AttentionPlan.paged(
            [Chunk(start, end - start, [pages])], page_size=page_size, pattern=parse_pattern(text)
        )
        part = slice(start, end)
        return attend(q[part], k[part], v[part], plan.layer(0), cache, scale=0.5)

    step(0, before)
    whole = attend(*(x[None] for x in (q, k, v)), dense_plan(text, before + new), scale=0.5)[0]

    def right(y: Tensor) -> bool:
        return torch.allclose(y, whole[before:])

    assert right(step(before, before + new))
    heads_first = (x.transpose(0, 1) for x in (q[before:], k, v))
    wrong = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.5)
    assert not right(wrong.transpose(0, 1))


def by_block_rows(q: Tensor, k: Tensor, v: Tensor, text: str) -> Tensor:
    return block_sparse_attention(q, k, v, block_plan(parse_pattern(text), q.shape[2]), 1.0)


def by_the_plan(q: Tensor, k: Tensor, v: Tensor, text: str) -> Tensor:
    plan = dense_plan(text, q.shape[2])
    return attend(*(x.transpose(1, 2) for x in (q, k, v)), plan, scale=1.0).transpose(1, 2)


@pytest.mark.parametrize("attention", [by_block_rows, by_the_plan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", ["causal", "window:4"])
def test_minus_a_billion_for_minus_infinity_in_half_precision(
    attention: Callable[..., Tensor], dtype: torch.dtype, text: str
) -> None:
    """float16 has no -1e9, and a score can lie further down than any number chosen for "never".
    Here what may be seen scores about -2e9 (float16: -6e4), and what may not scores 0."""
    T, low = 12, 2e9 if dtype == torch.bfloat16 else 6e4
    side = math.sqrt(low / 16)
    q = torch.full((1, 1, T, 16), side, dtype=dtype)
    k = torch.zeros(1, 1, T, 16, dtype=dtype)
    k[:, :, :6] = -side  # of the first six tokens, all keys in sight score low
    v = torch.arange(T, dtype=dtype)[None, None, :, None].expand(1, 1, T, 16).contiguous()
    if dtype == torch.float16:
        with pytest.raises(RuntimeError, match="overflow"):
            torch.zeros(1, dtype=dtype).masked_fill(torch.tensor([True]), -1e9)

    def right(y: Tensor) -> bool:
        """The fifth token sees equal scores on 0 to 4 (window: 1 to 4) and nothing else."""
        mean = 2.0 if text == "causal" else 2.5
        return bool((y[0, 0, 4].float() - mean).abs().max() < 0.05)

    assert right(attention(q, k, v, text))
    scores = q.float() @ k.float().transpose(-1, -2)
    at = torch.arange(T)
    hidden = ~parse_pattern(text).allowed(at[:, None], at)
    never = -1e9 if dtype == torch.bfloat16 else -1e4
    assert not right(scores.masked_fill(hidden, never).softmax(-1).to(dtype) @ v)


@pytest.mark.parametrize("text", ["causal", "window:3", "window:2+sinks:1", "dilated:2:3"])
def test_rows_with_nothing_to_see_giving_nan(text: str) -> None:
    """Softmax over nothing is 0 / 0. Padding makes such rows: batch-mates of unequal length, the
    last block of queries, documents' borders. Each must be finite, and so must the gradients."""
    pattern = parse_pattern(text)
    cache = LayerCache(torch.zeros(2, 64, 4), torch.zeros(2, 64, 4), 4)
    chunks = [Chunk(0, 1, [[1]]), Chunk(15, 1, [[2, 3, 4, 5]]), Chunk(3, 1, [[6]])]
    plan = AttentionPlan.paged(chunks, page_size=4, pattern=pattern).layer(0)
    q, k, v = (random(3, 2, 4, seed=n).float() for n in range(3))
    assert attend(q, k, v, plan, cache, scale=0.5).isfinite().all()

    for T in (1, 63, 64, 65):
        q, k, v = (random(2, 2, T, 4, seed=n).requires_grad_() for n in range(3))
        found = block_sparse_attention(q, k, v, block_plan(pattern, T), 0.5)
        of = torch.autograd.grad(found.sum(), (q, k, v))
        assert all(x.isfinite().all() for x in (found, *of))

    ids = torch.zeros(2, 9, dtype=torch.int64)  # documents of a single token
    q, k, v = (random(2, 9, 2, 4, seed=n).requires_grad_() for n in range(3))
    found = attend(q, k, v, AttentionPlan.packed(ids, eot=0, pattern=pattern).layer(0), scale=0.5)
    of = torch.autograd.grad(found.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (found, *of))
    assert torch.allclose(found, v), "each token sees itself alone"

    nothing = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).bool(), float("-inf"))
    assert nothing.softmax(-1).isnan().all()


@pytest.mark.parametrize("D", [16, 64, 256])
def test_scaling_by_d_instead_of_its_root(D: int) -> None:
    """Queries and keys of unit variance give scores of unit variance: by 1/D they would shrink to
    a standard deviation of 1/sqrt(D) and every head would be a plain mean."""
    scale = Attention(GPTConfig(vocab_size=8, d_model=2 * D, n_head=2, n_layer=1)).scale
    q, k = random(1, 1, 2000, D), random(1, 1, 2000, D, seed=1)
    pairs = (q * k).sum(-1)

    def right(scale: float) -> bool:
        return bool(0.8 < (pairs * scale).std() < 1.2)

    assert right(scale)
    assert not right(1 / D)
    assert not right(1.0)
    # And it is what the kernels multiply by.
    of = (q[:, :, :40], k[:, :, :40], random(1, 1, 40, D, seed=2))
    wanted = F.scaled_dot_product_attention(*of, is_causal=True)  # torch's default is 1/sqrt(D)
    found = attend(*(x.transpose(1, 2) for x in of), dense_plan("causal", 40), scale=scale)
    assert torch.allclose(found.transpose(1, 2), wanted)
