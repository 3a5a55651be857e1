"""Short convolutions: borders, the ring of a page, and what they are at the start.

That cached equals uncached in any cut and company is test_parity.py's to say."""

from __future__ import annotations

import pytest
import torch

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.conv import shift_plan
from gpt.model import GPT
from gpt.plan import AttentionPlan, Chunk
from tests.strategies import build

CONFIG = GPTConfig(
    vocab_size=20, block_size=32, n_layer=2, n_head=2, d_model=16, conv_width=4, init_std=0.3
)


def test_at_the_start_a_model_is_the_one_without() -> None:
    fields = {
        "conv_width": 4, "residual_scalars": True, "x0_scalars": True, "tie_embeddings": False
    }  # fmt: skip
    torch.manual_seed(0)
    without = GPT(CONFIG.replace(conv_width=0, tie_embeddings=False))
    torch.manual_seed(0)
    model = GPT(CONFIG.replace(**fields))
    ids = torch.randint(20, (2, 9))
    assert torch.equal(model(ids), without(ids))
    # And yet all of it learns from the first step.
    model(ids).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_projections_begin_at_zero_and_blocks_pass_the_stream_on() -> None:
    model = GPT(CONFIG.replace(zero_init=True))
    ids = torch.randint(20, (1, 9))
    assert torch.equal(model(ids), model.logits(model.norm(model.embed(ids))))
    assert model.blocks[0].mlp.up.weight.std() > 0.2


def test_nothing_is_seen_across_a_document_s_border() -> None:
    model = build(CONFIG)
    ids = torch.tensor([[3, 4, 5, 0, 6, 7, 8, 9, 0, 1]])
    logits = model(ids, AttentionPlan.packed(ids, eot=0, pattern=model.pattern))[0]
    for first, end in ((0, 3), (3, 8), (8, 10)):
        alone = model(ids[:, first:end])[0]
        assert (logits[first:end] - alone).abs().max() < 1e-12


def test_a_plan_made_without_the_width_is_refused() -> None:
    model = build(CONFIG)
    cache = KVCache(CONFIG, 4, 8, dtype=torch.float64)
    plan = AttentionPlan.paged([Chunk(0, 5, [[1], [1]])], page_size=8, pattern=model.pattern)
    with pytest.raises(ValueError, match="without conv_width"):
        model(torch.arange(5), plan, cache)
    with pytest.raises(ValueError, match="9 tokens of a state in 1 pages"):
        shift_plan([Chunk(4, 5, [[1, 2], [1]])], 1, 4, 8, "cpu")


def test_a_page_keeps_the_last_inputs_of_its_tokens() -> None:
    """The picture in gpt.conv: width 4, pages of 8, 10 tokens."""
    plan = shift_plan([Chunk(0, 10, [[2, 5]])], 0, 4, 8, "cpu")
    kept = dict(zip(plan.rows.tolist(), plan.slots.tolist(), strict=True))
    assert kept == {5: 2 * 3 + 2, 6: 2 * 3 + 0, 7: 2 * 3 + 1, 8: 5 * 3 + 0, 9: 5 * 3 + 1}
    step = shift_plan([Chunk(10, 1, [[2, 5]])], 0, 4, 8, "cpu")
    assert step.reads.tolist() == [kept[9], kept[8], kept[7]]
    assert step.sources.tolist() == [[0], [1], [2]]
    short = shift_plan([Chunk(1, 1, [[2]])], 0, 4, 8, "cpu")
    assert short.reads.tolist() == [2 * 3, 0, 0], "before the text is the null page"
