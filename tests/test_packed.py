"""Packed documents: in a block of several, each gets the logits and gradients it gets alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.patterns import parse_pattern
from gpt.plan import AttentionPlan
from tests.strategies import BLOCK_SIZE, build, configs

EOT = 0


def documents(block: list[int]) -> list[list[int]]:
    """A block cut in front of every end-of-text."""
    parts: list[list[int]] = []
    for i, token in enumerate(block):
        if token == EOT or i == 0:
            parts.append([])
        parts[-1].append(token)
    return parts


def run(model: GPT, ids: torch.Tensor, one_group: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    plan = AttentionPlan.packed(ids, eot=EOT, pattern=model.pattern, one_group=one_group)
    logits = model(ids, plan)
    return logits, grads(model, logits)


def grads(model: GPT, logits: torch.Tensor) -> list[torch.Tensor]:
    weight = torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = (logits.softmax(-1) * weight).sum()
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@settings(deadline=None, max_examples=60)
@given(configs(), st.data(), st.booleans())
def test_each_document_is_as_if_alone(
    config: GPTConfig, data: st.DataObject, one_group: bool
) -> None:
    model = build(config)
    time = data.draw(st.sampled_from([1, 2, 9, BLOCK_SIZE]))
    # End-of-text often: first, last, side by side, and not at all.
    token = st.one_of(st.just(EOT), st.integers(1, config.vocab_size - 1), st.integers(1, 3))
    block = st.lists(token, min_size=time, max_size=time)
    plain = st.lists(st.integers(1, 9), min_size=time, max_size=time)
    blocks = data.draw(st.lists(st.one_of(block, plain), min_size=1, max_size=4))
    ids = torch.tensor(blocks)
    before = ids.clone()

    logits, gradients = run(model, ids, one_group)
    alone = torch.stack(
        [
            torch.cat([model(torch.tensor([part]))[0] for part in documents(block)])
            for block in blocks
        ]
    )
    assert torch.equal(ids, before), "the caller's ids are not touched"
    assert (logits - alone).abs().max() <= 1e-10 * alone.abs().max()
    for found, wanted in zip(gradients, grads(model, alone), strict=True):
        assert (found - wanted).abs().max() <= 1e-8 * max(1.0, float(wanted.abs().max()))


def test_blocks_without_a_border_keep_the_fused_kernel() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [EOT, 2, 3, 4], [1, EOT, 3, 4]])
    plan = AttentionPlan.packed(ids, eot=EOT, pattern=parse_pattern("causal"))
    assert [(g.b, g.causal) for g in plan.layer(0).groups] == [(2, True), (1, False)]
    assert plan.positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 2]]
    unbroken = AttentionPlan.packed(ids[:2], eot=EOT, pattern=parse_pattern("causal"))
    assert [(g.b, g.causal, g.rows) for g in unbroken.layer(0).groups] == [(2, True, None)]


@pytest.mark.parametrize("pattern", ["causal", "window:3"])
def test_one_group_has_the_same_shapes_whatever_the_text(pattern: str) -> None:
    shapes = set()
    for ids in (torch.ones(2, 6, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.int64)):
        plan = AttentionPlan.packed(ids, eot=EOT, pattern=parse_pattern(pattern), one_group=True)
        (group,) = plan.layer(0).groups
        assert group.mask is not None
        shapes.add((tuple(plan.positions.shape), tuple(group.mask.shape), group.causal))
    assert shapes == {((2, 6), (2, 1, 6, 6), False)}
