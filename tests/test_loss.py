"""Cross-entropy in shares: loss and gradients are those of torch's own over all logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.config import GPTConfig
from gpt.loss import IGNORE, token_nats, total_nats
from gpt.model import GPT
from gpt.shares import in_shares, share_tokens

N, C, V = 23, 8, 50


def case(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, C, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(V, C, dtype=dtype, generator=generator).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < 0.3] = IGNORE
    return x, weight, targets


def whole(x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    logits = x @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 99), st.integers(1, N + 4), st.sampled_from([None, 2.0]))
def test_loss_and_gradients_are_those_of_all_logits(
    seed: int, share: int, softcap: float | None
) -> None:
    x, weight, targets = case(seed)
    # As the trainer divides it, and the accumulation weighs it.
    wanted = whole(x, weight, targets, softcap) / 17
    found = total_nats(x, weight, targets, softcap=softcap, share=share) / 17
    assert abs(found - wanted) <= 1e-12 * abs(wanted) + 1e-15
    ours = torch.autograd.grad(found, (x, weight))
    theirs = torch.autograd.grad(wanted, (x, weight))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-13
    each = token_nats(x, weight, targets, softcap=softcap, share=share)
    assert each.shape == (N,)
    assert not each[targets == IGNORE].any()
    assert abs(each.sum() / 17 - wanted) < 1e-12


def test_nothing_but_ignored_targets_is_a_loss_of_zero() -> None:
    x, weight, targets = case(0)
    found = total_nats(x, weight, torch.full_like(targets, IGNORE), share=5)
    found.backward()
    assert found == 0
    assert not x.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    x, weight, targets = case(1)
    (x, weight)[frozen].requires_grad_(False)
    learned = (x, weight)[1 - frozen]
    (found,) = torch.autograd.grad(total_nats(x, weight, targets, share=4), learned)
    (wanted,) = torch.autograd.grad(whole(x, weight, targets, None), learned)
    assert (found - wanted).abs().max() < 1e-13


def test_products_are_bf16_under_autocast_and_sums_are_not() -> None:
    x, weight, targets = case(2, torch.float32)
    exact = whole(x, weight, targets, None)
    wanted = torch.autograd.grad(exact, (x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        found = total_nats(x, weight, targets, share=4)
        usual = F.cross_entropy(F.linear(x, weight), targets, ignore_index=IGNORE, reduction="sum")
    assert found.dtype == torch.float32
    assert abs(found - exact) < 0.01 * exact
    rounded = torch.autograd.grad(usual, (x, weight))
    for ours, theirs, right in zip(
        torch.autograd.grad(found, (x, weight)), rounded, wanted, strict=True
    ):
        assert ours.dtype == torch.float32
        assert (ours - right).norm() < 1.2 * (theirs - right).norm() < 0.05 * right.norm()


def test_the_model_takes_shares_where_the_vocabulary_is_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a head of its own and a tied one, and no tensor of tokens × vocabulary on the way."""
    assert not in_shares(16 * 256, 2048, "cpu")
    assert in_shares(4 * 1024, 50257, "cpu")
    assert share_tokens(50257, "cpu") % 16 == 0
    ids = torch.randint(0, V, (2, 12), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1)
    targets[:, -1] = IGNORE
    for tied in (True, False):
        torch.manual_seed(0)
        config = GPTConfig(
            vocab_size=V, block_size=12, n_layer=1, n_head=2, d_model=C, tie_embeddings=tied,
            logit_softcap=3.0,
        )  # fmt: skip
        model = GPT(config).double()
        found: list[list[Tensor]] = []
        for large in (10**9, 1):
            monkeypatch.setattr("gpt.shares.LARGE", {"cpu": large, "default": large})
            monkeypatch.setattr("gpt.shares.AT_ONCE", {"cpu": V * 16, "default": V * 16})
            model.zero_grad()
            kept: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, kept=kept: kept.append(t) or t, lambda t: t
            ):
                nats = model(ids, targets=targets)
            assert any(t.numel() >= 24 * V for t in kept) == (large > 1)
            nats.backward()
            found.append([nats.detach(), *(p.grad for p in model.parameters())])
            each = model(ids, targets=targets, each=True)
            assert abs(each.sum() - nats) < 1e-12
        for a, b in zip(*found, strict=True):
            assert (a - b).abs().max() < 1e-13
        monkeypatch.undo()
