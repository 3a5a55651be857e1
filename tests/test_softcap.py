"""Capped scores: every route of attend() and its gradients against the formula in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpt.attention import attend
from gpt.config import GPTConfig
from gpt.maps import see_maps
from gpt.patterns import parse_pattern
from gpt.plan import AttentionPlan
from gpt.positions import Alibi, RelativeKeys
from gpt.softcap import capped_attention
from tests.strategies import build

CAP, SCALE = 2.0, 0.9
B, T, H, K, D = 2, 200, 4, 2, 8


def naive(q: Tensor, k: Tensor, v: Tensor, pattern: str, term: object = None) -> Tensor:
    at = torch.arange(T)
    k, v = (x.repeat_interleave(H // K, 2).transpose(1, 2) for x in (k, v))
    q = q.transpose(1, 2)
    scores = CAP * torch.tanh(SCALE * (q @ k.transpose(-1, -2)) / CAP)
    if term is not None:
        scores = scores + term(q * SCALE, at[None], at[None])  # type: ignore[operator]
    allowed = parse_pattern(pattern).allowed(at[:, None], at) & (at <= at[:, None])
    return (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("rows", [False, True], ids=["products", "block rows"])
@pytest.mark.parametrize("kind", [None, "alibi", "relative"])
@pytest.mark.parametrize("pattern", ["causal", "window:20"])
def test_values_and_gradients_are_the_formula_s(
    rows: bool, kind: str | None, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = GPTConfig(d_model=H * D, n_head=H, position="relative", relative_distance=5)
    term = {None: None, "alibi": Alibi(H), "relative": RelativeKeys(config).double()}[kind]
    given = [torch.randn(B, T, n, D, dtype=torch.float64, requires_grad=True) for n in (H, K, K)]
    learned = [*given, *(term.tables if term is not None else ())]
    if rows:
        monkeypatch.setattr("gpt.plan.SPARSE_FROM", 1)
        monkeypatch.setattr("gpt.plan.SPARSE_SHARE", 1.0)
    plan = AttentionPlan.dense(B, T, pattern=parse_pattern(pattern))
    if rows:
        plan = plan.by_block_rows(1)
    assert (plan.layer(0).groups[0].blocks is not None) == rows
    found = attend(*given, plan.layer(0), scale=SCALE, term=term, softcap=CAP)
    wanted = naive(*given, pattern, term)
    assert (found - wanted).abs().max() < 1e-12
    assert (found - attend(*given, plan.layer(0), scale=SCALE, term=term)).abs().max() > 0.1
    weight = torch.randn_like(found)
    ours = torch.autograd.grad((found * weight).sum(), learned)
    theirs = torch.autograd.grad((wanted * weight).sum(), learned)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-12


def test_scores_that_do_not_fit_at_once_and_fixed_blocks_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 600, D, dtype=torch.float64) for n in (H, K, K))
    mask = (torch.rand(1, 1, 600, 600) < 0.1) | torch.eye(600, dtype=torch.bool)
    mask[..., :512] &= torch.arange(600)[:, None] % 3 > 0  # some see nothing of the first block
    mask[..., 599] = True
    options = {"scale": SCALE, "cap": CAP, "mask": mask, "causal": False}
    with torch.no_grad():
        whole = capped_attention(q, k, v, **options)
        fixed = capped_attention(q, k, v, **options, fixed=True)
        monkeypatch.setattr("gpt.softcap.SCORES_AT_ONCE", 7 * H * 600)
        parts = capped_attention(q, k, v, **options)
    assert (parts - whole).abs().max() < 1e-14
    assert (fixed - whole).abs().max() < 1e-14


def test_maps_show_the_weights_of_capped_scores() -> None:
    config = GPTConfig(
        vocab_size=20,
        n_layer=1,
        n_head=2,
        d_model=16,
        attn_softcap=0.5,
        qk_norm=False,
        init_std=1.5,
    )
    model = build(config)
    maps: list[Tensor] = []
    with torch.no_grad():
        see_maps(model, torch.arange(12), lambda _, found: maps.append(found))
    # A score within ±0.5 leaves the smallest of n weights at e^-1 / n or more.
    assert maps[0][:, 11].min() > 1 / (12 * 2.72)
    assert maps[0][:, 11].max() < 2.72 / 12
