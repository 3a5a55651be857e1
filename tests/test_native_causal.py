"""Causal attention of whole sequences by our own kernels, held to torch's in float64."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt import attention
from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.native import build as building
from gpt.native import kernels as native
from gpt.native.causal import causal_attention
from gpt.native.kernels import Kernels
from gpt.plan import AttentionPlan

NO_COMPILER = not any(shutil.which(name) for name in building.COMPILERS)
pytestmark = pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def in_use(kernels: Kernels) -> Iterator[None]:
    native.use(kernels)
    yield
    native.use(None)


def inputs(
    B: int, T: int, H: int, K: int, D: int, seed: int = 0, scale: float = 1.0
) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = [(B, T, heads, D) for heads in (H, K, K, H)]
    return [torch.randn(shape, generator=made) * scale for shape in shapes]


def with_gradients(q: Tensor, k: Tensor, v: Tensor, y: Tensor, dy: Tensor) -> list[Tensor]:
    return [y, *torch.autograd.grad(y, (q, k, v), dy)]


@settings(max_examples=60)
@given(
    B=st.integers(1, 2), T=st.integers(1, 130), K=st.integers(1, 2), shared=st.integers(1, 3),
    D=st.integers(1, 40), scale=st.sampled_from([0.01, 1.0, 6.0]), seed=st.integers(0, 99),
)  # fmt: skip
@example(B=1, T=600, K=1, shared=2, D=64, scale=1.0, seed=0)  # rows by few, keys in shares
def test_results_and_gradients(
    B: int, T: int, K: int, shared: int, D: int, scale: float, seed: int, kernels: Kernels
) -> None:
    *given_, dy = inputs(B, T, K * shared, K, D, seed, scale)
    own = [x.requires_grad_() for x in given_]
    exact = [x.detach().double().requires_grad_() for x in given_]
    found = with_gradients(*own, causal_attention(kernels, *own, 0.3), dy)
    q, k, v = (x.transpose(1, 2) for x in exact)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    for a, b in zip(
        found, with_gradients(*exact, expected.transpose(1, 2), dy.double()), strict=True
    ):
        # Gradients by queries and keys are differences of numbers as large as `scale` says.
        bound = 2e-5 * max(float(b.detach().abs().max()), scale**3)
        assert (a.double() - b).abs().max() <= bound


def test_no_token_learns_from_a_later_one(kernels: Kernels) -> None:
    q, k, v, _ = (x.requires_grad_() for x in inputs(1, 100, 2, 2, 8))
    y = causal_attention(kernels, q, k, v, 0.3)
    by_q, by_k, by_v = torch.autograd.grad(y[0, :50].square().sum(), (q, k, v))
    for gradient in (by_q, by_k, by_v):
        assert gradient[0, :50].abs().max() > 0
        assert torch.count_nonzero(gradient[0, 50:]) == 0


def test_tokens_may_lie_apart(kernels: Kernels) -> None:
    """Views of one product, as attention without turns makes them."""
    row = torch.randn(2, 30, 3 * 4 * 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q, k, v = row.view(2, 30, 12, 8).split(4, dim=-2)
    apart = causal_attention(kernels, q, k, v, 0.3)
    own = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    together = causal_attention(kernels, *own, 0.3)
    assert torch.equal(apart, together)
    (found,) = torch.autograd.grad(apart.square().sum(), row)
    parts = torch.autograd.grad(together.square().sum(), own)
    assert torch.equal(found, torch.cat([x.flatten(-2) for x in parts], dim=-1))


def test_the_number_of_threads_changes_no_bit(kernels: Kernels) -> None:
    *given_, dy = inputs(3, 90, 4, 2, 16)
    own, before = [x.requires_grad_() for x in given_], torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(with_gradients(*own, causal_attention(kernels, *own, 0.3), dy))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, three) for one, three in zip(*results, strict=True))


def test_what_is_no_number_stays_with_those_who_see_it(kernels: Kernels) -> None:
    q, k, v, _ = inputs(1, 60, 1, 1, 8)
    k[0, 40, 0, 3] = float("nan")
    y = causal_attention(kernels, q.requires_grad_(), k, v, 0.3)
    assert torch.isfinite(y[0, :40]).all()
    assert torch.isnan(y[0, 40:]).all()


CONFIG = GPTConfig(vocab_size=20, n_layer=2, n_head=4, n_kv_head=2, d_model=32, block_size=64)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, True),
        ({"position": "learned"}, True),
        ({"qk_norm": True}, True),
        ({"position": "alibi"}, False),
        ({"pattern": "window:9"}, False),
        ({"attn_softcap": 20.0}, False),
        ({"attn_dropout": 0.1}, False),
    ],
)
def test_training_takes_them_where_it_can(
    options: dict[str, object], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*args: object) -> Tensor:
        calls.append(1)
        return causal_attention(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "causal_attention", counted)
    model = GPT(CONFIG.replace(**options))
    ids = torch.randint(20, (3, 40), generator=torch.Generator().manual_seed(0))
    model(ids, targets=ids).backward()
    assert len(calls) == 2 * wanted
    calls.clear()
    with torch.no_grad():
        model(ids)
    packed = AttentionPlan.packed(ids, eot=0, pattern=model.pattern)
    model(ids, packed, targets=ids).backward()
    assert not calls, "what generates, and documents that share a sequence, take other ways"


def test_longer_texts_than_it_is_good_for_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LONGEST", 39)
    monkeypatch.setattr(attention, "causal_attention", None)
    model = GPT(CONFIG)
    ids = torch.zeros(1, 40, dtype=torch.int64)
    model(ids, targets=ids).backward()
