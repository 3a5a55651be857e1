"""Block rows: the dense mask's numbers and gradients, and nothing touched that nobody may see."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpt.blocks
import gpt.blockwork
import gpt.plan
from gpt.attention import Attention, attend
from gpt.blocks import block_plan, cut
from gpt.blocksparse import block_sparse_attention
from gpt.blockwork import Extra
from gpt.config import GPTConfig
from gpt.patterns import Pattern, parse_pattern, parse_patterns
from gpt.plan import AttentionPlan
from tests import reference
from tests.strategies import build
from tests.test_parity import assert_close, run_cut

TEXTS = [
    "causal", "window:1", "window:5", "window:33", "window:6+sinks:3", "dilated:4:3", "fixed:8:2",
    "fixed:5:5", "bigbird:7:3:1:5",
]  # fmt: skip


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block rows at any length and whatever they save, as short as a test can be."""
    monkeypatch.setattr(gpt.plan, "SPARSE_FROM", 2)
    monkeypatch.setattr(gpt.plan, "SPARSE_SHARE", 9.0)
    monkeypatch.setattr(gpt.blocks, "SIZES", (8,))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, term: Tensor | None = None
) -> Tensor:
    """Attention as it is written on the blackboard; `seen` (T, T) or (b, 1, T, T)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = scale * q @ k.transpose(-1, -2)
    if term is not None:
        scores = scores + term
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


def seen_by(text: str, time: int) -> Tensor:
    return torch.tensor(
        [[reference.may_look(text, i, j) for j in range(time)] for i in range(time)]
    )


def gradients(y: Tensor, weight: Tensor, of: tuple[Tensor, ...]) -> list[Tensor]:
    return list(torch.autograd.grad((y * weight).sum(), of))


shapes = st.tuples(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)]),
    st.sampled_from([1, 2, 7, 8, 9, 40, 61]),
    st.sampled_from([1, 3, 8]),
)
amounts = st.sampled_from([1, 2**9, 2**12, 2**20])
"""Scores at a time: one head and row, several heads, several rows, all."""


@settings(deadline=None, max_examples=120)
@given(shapes, st.sampled_from(TEXTS), st.sampled_from([4, 8, 16, 64]), amounts, st.integers(0, 99))
def test_numbers_and_gradients_are_those_of_the_dense_mask(
    shape: tuple[int, tuple[int, int], int, int], text: str, size: int, amount: int, seed: int
) -> None:
    b, (H, K), T, D = shape
    q = random(b, H, T, D, seed=seed).requires_grad_()
    k, v = (random(b, K, T, D, seed=seed + n).requires_grad_() for n in (1, 2))
    weight = random(b, H, T, D, seed=seed + 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt.blockwork.SCORES_AT_ONCE, "cpu", amount)
        plan = cut(parse_pattern(text), T, size)
        found = block_sparse_attention(q, k, v, plan, 0.7)
        got = [found, *gradients(found, weight, (q, k, v))]
    wanted = dense(q, k, v, seen_by(text, T), 0.7)
    for a, e in zip(got, [wanted, *gradients(wanted, weight, (q, k, v))], strict=True):
        assert a.shape == e.shape
        assert (a - e).abs().max() <= 1e-10 * max(1.0, float(e.detach().abs().max()))


@pytest.mark.parametrize("text", ["window:100", "bigbird:70:5:2:3", "window:64+sinks:3"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 3e-3)]
)
def test_narrower_types_stay_within_their_bounds(
    text: str, dtype: torch.dtype, bound: float
) -> None:
    """Of the largest number: float32 1e-5; bfloat16 2 % and float16 0.3 %, what rounding the inputs
    and outputs to their three digits costs, with no more added on the way."""
    T = 300
    q = random(2, 4, T, 16).to(dtype).requires_grad_()
    k, v = (random(2, 2, T, 16, seed=n).to(dtype).requires_grad_() for n in (1, 2))
    weight = random(2, 4, T, 16, seed=3)
    plan = block_plan(parse_pattern(text), T)
    found = block_sparse_attention(q, k, v, plan, 0.25)
    exact = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    wanted = dense(*exact, seen_by(text, T), 0.25)
    got = [found, *gradients(found, weight.to(dtype), (q, k, v))]
    for a, e in zip(got, [wanted, *gradients(wanted, weight, exact)], strict=True):
        assert a.dtype == dtype
        assert (a.double() - e).abs().max() <= bound * e.abs().max()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("amount", [1, 2**20])
def test_keys_that_no_query_of_a_row_may_see_are_never_read(
    text: str, amount: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are poisoned with NaN, which a mask would let through: 0 times NaN is NaN."""
    monkeypatch.setitem(gpt.blockwork.SCORES_AT_ONCE, "cpu", amount)
    T, size = 61, 8
    q, k, v = (random(1, 2, T, 4, seed=n) for n in range(3))
    pattern = parse_pattern(text)
    plan = cut(pattern, T, size)
    whole = block_sparse_attention(q, k, v, plan, 0.5)
    for row in range(plan.rows):
        first, last = row * size, min((row + 1) * size, T) - 1
        near = torch.zeros(T, dtype=torch.bool)
        for span in pattern.spans(first, last):
            near[span.start : span.stop] = True
        near[max(0, first - 40 - gpt.blocks.ALIGN) : first] |= text == "dilated:4:3"
        # A lone run is read up to a multiple of ALIGN keys.
        begin = int(near.nonzero()[0])
        near[max(0, begin - gpt.blocks.ALIGN) : begin] = True
        poisoned = [x.masked_fill(~near[:, None], float("nan")) for x in (k, v)]
        found = block_sparse_attention(q, *poisoned, plan, 0.5)
        assert torch.equal(found[:, :, first : last + 1], whole[:, :, first : last + 1])


@dataclass(frozen=True)
class OneSeesAll(Pattern):
    """Every token sees itself alone, but one of them all that came before."""

    which: int

    def allowed(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos == q_pos) | ((q_pos == self.which) & (k_pos <= q_pos))


def test_a_row_that_sees_everything_does_not_inflate_the_rest() -> None:
    plan = cut(OneSeesAll(999), 1024, 16)
    widths = {bucket.keys.shape[1]: len(bucket.rows) for bucket in plan.buckets}
    assert widths == {16: 63, 1008: 1}
    rows = torch.cat([bucket.rows for bucket in plan.buckets])
    assert sorted(rows.tolist()) == list(range(64))
    q, k, v = (random(1, 2, 1024, 4, seed=n) for n in range(3))
    at = torch.arange(1024)
    wanted = dense(q, k, v, OneSeesAll(999).allowed(at[:, None], at), 0.5)
    assert_close(block_sparse_attention(q, k, v, plan, 0.5), wanted, torch.float64)


@pytest.mark.parametrize("text", ["window:64", "window:60+sinks:4", "bigbird:64:16:2:0"])
def test_work_and_memory_grow_with_the_length_not_with_its_square(text: str) -> None:
    def cost(T: int) -> tuple[int, int, int]:
        plan = block_plan(parse_pattern(text), T)
        masks = {id(bias): bias.numel() for b in plan.buckets for bias in b.biases}
        saved: list[int] = []
        q, k, v = (torch.randn(1, 2, T, 8, requires_grad=True) for _ in range(3))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: saved.append(x.numel()) or x, lambda x: x
        ):
            block_sparse_attention(q, k, v, plan, 0.5)
        return plan.scores, sum(masks.values()), sum(saved)

    for short, long in zip(cost(2048), cost(8192), strict=True):
        assert long <= 4.6 * short
    assert cost(8192)[0] < 0.1 * 8192**2


def test_inner_rows_of_a_window_share_one_mask_and_plans_are_kept() -> None:
    plan = block_plan(parse_pattern("window:256"), 8192)
    assert plan.size == 128, "rows of 128 compute but a fifth more"
    assert block_plan(parse_pattern("window:64"), 8192).size == 64
    assert len({id(bias) for bucket in plan.buckets for bias in bucket.biases}) <= 6
    assert block_plan(parse_pattern("window:256"), 8192) is plan
    fixed = block_plan(parse_pattern("fixed:128:8"), 8192)
    # 128 keys of one's own and 8 of every earlier block, not whole blocks for the sake of 8.
    assert max(bucket.keys.shape[1] for bucket in fixed.buckets) <= 128 + 64 * 8


# --- Terms of the scores --------------------------------------------------------------------------


class Learned(nn.Module):
    """A learned key per distance: its term depends on queries, positions and a table."""

    def __init__(self, D: int, H: int) -> None:
        super().__init__()
        self.keys = nn.Parameter(random(10, D, seed=7))
        self.slopes = nn.Parameter(random(H, seed=8))
        self.unused = nn.Parameter(random(2, seed=8))

    def forward(self, q: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        distance = (q_pos[:, :, None] - k_pos[:, None]).clamp(0, 9)[:, None]  # (b|1, 1, t, s)
        by_distance = q @ self.keys.T  # (b, H, t, 10)
        spread = by_distance.gather(-1, distance.expand(*q.shape[:3], -1))
        return spread - self.slopes[:, None, None] * distance


class Straight(nn.Module):
    """A term of the positions alone: the same for all sequences if those are, (1, H, t, s)."""

    def __init__(self, D: int, H: int) -> None:
        super().__init__()
        self.slopes = nn.Parameter(random(H, seed=8))

    def forward(self, q: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.slopes[:, None, None] * (q_pos[:, :, None] - k_pos[:, None])[:, None] / 30


@pytest.mark.parametrize("make", [Learned, Straight])
@pytest.mark.parametrize("text", ["causal", "window:9", "fixed:8:2"])
@pytest.mark.parametrize("amount", [1, 2**12, 2**20])
@pytest.mark.parametrize("own_positions", [False, True])
def test_a_term_is_added_per_block_and_learns(
    make: type[nn.Module], text: str, amount: int, own_positions: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(gpt.blockwork.SCORES_AT_ONCE, "cpu", amount)
    b, H, K, T, D = 3, 4, 2, 37, 4
    q = random(b, H, T, D).requires_grad_()
    k, v = (random(b, K, T, D, seed=n).requires_grad_() for n in (1, 2))
    weight = random(b, H, T, D, seed=3)
    term = make(D, H)
    term.tables = tables = tuple(term.parameters())
    positions = torch.arange(T)[None]
    if own_positions:  # each sequence counts from a place of its own
        positions = positions + torch.tensor([[0], [5], [2]]) * (torch.arange(T) % 3)
    extra = Extra(term, positions, positions)
    plan = cut(parse_pattern(text), T, 8)
    found = block_sparse_attention(q, k, v, plan, 0.7, extra)
    wanted = dense(q, k, v, seen_by(text, T), 0.7, term(q * 0.7, positions, positions))
    assert_close(found, wanted, torch.float64)
    of = (q, k, v, *tables)
    got = torch.autograd.grad((found * weight).sum(), of)
    exact = torch.autograd.grad((wanted * weight).sum(), of, allow_unused=True)
    for a, e in zip(got, exact, strict=True):
        e = torch.zeros_like(a) if e is None else e
        assert (a - e).abs().max() <= 1e-10 * max(1.0, float(e.detach().abs().max()))


def test_queries_do_not_see_past_the_first_key_of_their_document() -> None:
    b, T = 3, 50
    q, k, v = (random(b, 2, T, 4, seed=n).requires_grad_() for n in range(3))
    starts = torch.zeros(b, T, dtype=torch.int64)
    starts[1, 20:], starts[2, 1:], starts[2, 49:] = 20, 1, 49
    plan = cut(parse_pattern("window:30"), T, 8)
    found = block_sparse_attention(q, k, v, plan, 0.7, Extra(first_key=starts))
    same = (starts[:, :, None] == starts[:, None])[:, None]
    wanted = dense(q, k, v, seen_by("window:30", T) & same, 0.7)
    weight = random(b, 2, T, 4, seed=5)
    for a, e in zip(
        [found, *gradients(found, weight, (q, k, v))],
        [wanted, *gradients(wanted, weight, (q, k, v))],
        strict=True,
    ):
        assert_close(a, e, torch.float64)


# --- Through the plan and the model ---------------------------------------------------------------


@pytest.mark.usefixtures("sparse")
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("T", [3, 40, 61])
def test_attend_is_the_reference_by_block_rows(text: str, T: int) -> None:
    q, k, v = random(2, T, 4, 8), random(2, T, 2, 8, seed=1), random(2, T, 2, 8, seed=2)
    plan = AttentionPlan.dense(2, T, pattern=parse_pattern(text)).layer(0)
    causal = parse_pattern(text).causal_until >= T
    assert any(g.blocks is not None for g in plan.groups) or causal or text == "dilated:4:3"
    found = attend(q, k, v, plan, scale=0.7)
    for b in range(2):
        wanted = reference.attention(q[b].numpy(), k[b].numpy(), v[b].numpy(), 0.7, text)
        np.testing.assert_allclose(found[b].numpy(), wanted, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("sparse")
@pytest.mark.parametrize("text", ["window:5", "window:6+sinks:3", "dilated:6:3", "fixed:8:2"])
def test_what_the_plan_says_is_in_sight_is_what_the_kernels_let_through(text: str) -> None:
    T = 40
    ids = torch.ones(2, T, dtype=torch.int64)
    ids[1, [7, 29]] = 0
    plan = AttentionPlan.packed(ids, eot=0, pattern=parse_pattern(text)).layer(0)
    sight = torch.zeros(2 * T, 2 * T, dtype=torch.bool)
    for group in plan.groups:
        rows = torch.arange(2 * T) if group.rows is None else group.rows
        found = group.sight(torch.arange(group.t)).expand(group.b, 1, -1, -1)
        for of, seen in zip(rows.view(group.b, group.t), found[:, 0], strict=True):
            sight[of[:, None], of] = seen
    place = torch.cat([torch.arange(T), torch.arange(7), torch.arange(22), torch.arange(11)])
    document = torch.tensor([0] * T + [1] * 7 + [2] * 22 + [3] * 11)
    for i in range(2 * T):
        wanted = [
            bool(document[i] == document[j]) and reference.may_look(text, place[i], place[j])
            for j in range(2 * T)
        ]
        assert sight[i].tolist() == wanted


@pytest.mark.usefixtures("sparse")
@pytest.mark.parametrize("pattern", ["window:9", "bigbird:9:4:1:3", ["window:4", "causal"]])
def test_the_model_by_block_rows_is_the_cached_one(pattern: str | list[str]) -> None:
    config = GPTConfig(
        vocab_size=32, block_size=150, n_layer=2, n_head=4, n_kv_head=2, d_model=16,
        pattern=pattern, init_std=0.4,
    )  # fmt: skip
    model = build(config)
    texts = [list(np.random.default_rng(n).integers(0, 32, n)) for n in (150, 131)]
    found = run_cut(model, texts, [[100, 20, *[1] * 30], [1, 130]], 16, np.random.default_rng(0))
    for text, logits in zip(texts, found, strict=True):
        assert_close(logits, model(torch.tensor([text]))[0], torch.float64)
    model.activation_checkpointing = True
    ids = torch.tensor(texts[:1])
    again = torch.autograd.grad(model(ids).sum(), tuple(model.parameters()))
    model.activation_checkpointing = False
    for a, e in zip(
        again, torch.autograd.grad(model(ids).sum(), tuple(model.parameters())), strict=True
    ):
        assert torch.equal(a, e)


@pytest.mark.usefixtures("sparse")
@pytest.mark.parametrize("text", ["window:5", "window:5+sinks:2", "dilated:3:4"])
def test_documents_of_a_block_are_as_if_alone(text: str) -> None:
    model = build(GPTConfig(vocab_size=9, block_size=48, n_layer=2, d_model=16, pattern=text))
    ids = torch.randint(1, 9, (3, 48), generator=torch.Generator().manual_seed(0))
    ids[0, 17] = ids[0, 30] = ids[2, 1] = 0
    for one_group in (False, True):
        plan = AttentionPlan.packed(ids, eot=0, pattern=model.pattern, one_group=one_group)
        found = model(ids, plan)
        borders = [[0, 17, 30, 48], [0, 48], [0, 1, 48]]
        for row, ends in zip(range(3), borders, strict=True):
            alone = [model(ids[row : row + 1, i:j])[0] for i, j in pairwise(ends)]
            assert_close(found[row], torch.cat(alone), torch.float64)


def test_block_rows_are_taken_where_they_pay_and_the_fused_kernel_where_it_is_exact() -> None:
    def kind(text: str, T: int) -> str:
        groups = AttentionPlan.dense(1, T, pattern=parse_pattern(text)).layer(0).groups
        kinds = {"causal" if g.causal else "blocks" if g.blocks else "mask" for g in groups}
        assert len(kinds) == 1
        return kinds.pop()

    assert kind("causal", 4096) == "causal"
    assert kind("window:256", 1024) == kind("fixed:32:4", 1024) == "blocks"
    assert kind("window:256", 300) == "mask"  # short
    assert kind("window:1024", 1024) == kind("window:1000+sinks:24", 1024) == "causal"
    assert kind("window:1000", 1024) == "mask"  # nearly everything
    assert kind("dilated:300:4", 1024) == "causal"  # within a residue class
    assert kind("dilated:64:2", 2048) == "blocks"


@pytest.mark.usefixtures("sparse")
def test_dropout_leaves_the_block_rows_and_keeps_the_pattern() -> None:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=8, d_model=16, attn_dropout=0.5, position="learned")
    module = Attention(config).train()
    x = torch.randn(1, 40, 16)
    plan = AttentionPlan.dense(1, 40, pattern=parse_pattern("window:4")).layer(0)
    assert plan.groups[0].blocks is not None
    assert not torch.equal(module(x, None, plan), module(x, None, plan))
    changed = x.clone()
    changed[0, 10] += 1
    torch.manual_seed(1)
    before = module(x, None, plan)
    torch.manual_seed(1)
    other = (module(changed, None, plan) != before).any(-1)[0]
    assert set(other.nonzero()[:, 0].tolist()) <= {10, 11, 12, 13}


@pytest.mark.usefixtures("sparse")
def test_a_compiled_model_has_the_same_numbers() -> None:
    torch._dynamo.reset()
    config = GPTConfig(vocab_size=32, block_size=40, n_layer=2, d_model=16, n_head=2,
                       pattern=["window:5", "window:6+sinks:2"], init_std=0.3)  # fmt: skip
    model = build(config, dtype=torch.float32)
    ids = torch.randint(0, 32, (2, 40), generator=torch.Generator().manual_seed(0))

    def run() -> list[Tensor]:
        logits = model(ids)
        return [logits, *torch.autograd.grad(logits.square().sum(), tuple(model.parameters()))]

    plain = run()
    model.compile(dynamic=False, backend="eager")
    for a, e in zip(run(), plain, strict=True):
        assert (a - e).abs().max() <= 1e-5 * max(1.0, float(e.detach().abs().max()))


def test_autocast_reaches_the_kernel() -> None:
    q, k, v = (random(1, 2, 100, 8, seed=n).float().requires_grad_() for n in range(3))
    plan = block_plan(parse_pattern("window:20"), 100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = block_sparse_attention(q, k, v, plan, 0.5)
    assert found.dtype == torch.bfloat16
    (dq,) = torch.autograd.grad(found.float().sum(), q)
    assert dq.dtype == torch.float32


def test_layer_patterns_share_one_plan_per_kind() -> None:
    plan = AttentionPlan.dense(1, 8, pattern=parse_patterns(["window:2", "causal", "window:2"]))
    assert len(plan.kinds) == 2
    assert plan.layer(0) is plan.layer(2) is plan.layer(3)
    assert plan.layer(1) is plan.layer(4)
    assert plan.layer(1).groups[0].causal
