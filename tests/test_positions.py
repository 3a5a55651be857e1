"""Position schemes, each held to what its paper says. (That they train and decode alike, and are
those of an independent reference: test_parity.)"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt.attention
import gpt.model
from gpt.attention import attend
from gpt.blocksparse import block_sparse_attention
from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.patterns import LayerPatterns, parse_pattern
from gpt.plan import AttentionPlan, Chunk, Group, LayerPlan
from gpt.positions import Alibi, RelativeKeys, ScoreTerm, sinusoidal
from gpt.rotary import frequencies, rotary_table, rotate
from tests.strategies import build

SMALL = GPTConfig(vocab_size=32, block_size=12, n_layer=2, d_model=16, n_head=2, init_std=0.4)
CAUSAL = parse_pattern("causal")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- Rotary -------------------------------------------------------------------------------------

YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_block_size": 2048}


@pytest.mark.parametrize(
    ("changes", "turns", "magnitude"),
    # Of Hugging Face Transformers 5.24, heads of 16.
    [
        (
            {"rope_base": 5e5, "rope_scaling": "llama3", "rope_factor": 8.0,
             "rope_original_block_size": 8192},
            [1.0, 0.193923, 0.037606, 0.00729267, 0.000524846, 3.4281e-05, 6.64787e-06,
             1.28917e-06],
            1.0,
        ),
        (
            YARN,
            [1.0, 0.316228, 0.1, 0.0256935, 0.00625, 0.0013835, 0.00025, 7.90569e-05],
            1.138629436111989,
        ),
        (
            {**YARN, "rope_truncate": False, "rope_beta_fast": 16.0, "rope_beta_slow": 2.0,
             "rope_attention_factor": 1.5},
            [1.0, 0.316228, 0.1, 0.0266075, 0.00426162, 0.000790569, 0.00025, 7.90569e-05],
            1.5,
        ),
        (  # no pair turns 32 times within so little
            {**YARN, "rope_original_block_size": 32},
            [1.0, 0.197642, 0.025, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05],
            1.138629436111989,
        ),
        (  # every pair does, and is stretched for all that
            {**YARN, "rope_base": 1.5},
            [0.25, 0.237645, 0.225901, 0.214736, 0.204124, 0.194036, 0.184447, 0.175332],
            1.138629436111989,
        ),
        ({**YARN, "rope_dims": 8}, [1.0, 0.1, 0.00625, 0.00025], 1.138629436111989),
        (
            {"rope_scaling": "linear", "rope_factor": 4.0},
            [0.25, 0.0790569, 0.025, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05],
            1.0,
        ),
        (
            {"rope_scaling": "ntk", "rope_factor": 4.0},
            [1.0, 0.259413, 0.067295, 0.0174572, 0.00452862, 0.00117478, 0.000304753,
             7.90569e-05],
            1.0,
        ),
    ],
)  # fmt: skip
def test_scaled_angles_are_those_of_published_models(
    changes: dict, turns: list[float], magnitude: float
) -> None:
    config = GPTConfig(head_dim=16, **changes)
    torch.testing.assert_close(
        frequencies(config), torch.tensor(turns, dtype=torch.float64), rtol=5e-6, atol=0
    )
    assert config.rope_magnitude == pytest.approx(magnitude, rel=1e-12)
    table = rotary_table(torch.tensor([7]), config, torch.float64)
    size = (table.cos.square() + table.sin.square()).sqrt()
    torch.testing.assert_close(size, torch.full_like(size, magnitude))


def test_interleaved_heads_are_half_split_ones_in_another_order() -> None:
    """As converters between the two kinds of checkpoints rely on: reordering the rows of the
    query and key projections within each head makes one of the other."""
    half = build(SMALL.replace(qk_norm=False))
    pairs = build(SMALL.replace(qk_norm=False, rope_layout="interleaved"))
    pairs.load_state_dict(half.state_dict())
    order = torch.arange(8).view(2, 4).T.flatten()  # 0 4 1 5 2 6 3 7
    with torch.no_grad():
        for block in pairs.blocks:
            rows = block.attn.qkv.weight.view(6, 8, 16)  # 2 query, 2 key, 2 value heads
            rows[:4] = rows[:4, order]
    ids = torch.arange(12)[None]
    torch.testing.assert_close(pairs(ids), half(ids))


@pytest.mark.parametrize("layout", ["half-split", "interleaved"])
def test_only_the_first_numbers_of_a_head_are_turned(layout: str) -> None:
    config = GPTConfig(head_dim=8, rope_dims=4, rope_layout=layout)
    x = random(1, 2, 8)
    y = rotate(x, rotary_table(torch.tensor([3]), config, torch.float64))
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert ((y - x)[..., :4].abs() > 1e-3).any(0).all()
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


def test_far_from_the_start_a_float32_score_still_depends_on_distance_alone() -> None:
    config = GPTConfig(head_dim=64)
    q, k = random(1, 64).float(), random(1, 64, seed=1).float()

    def score(p: int, j: int) -> torch.Tensor:
        turned = [
            rotate(x, rotary_table(torch.tensor(at), config, torch.float32))
            for x, at in ((q, p), (k, j))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(1_000_007, 1_000_000), score(7, 0), rtol=1e-5, atol=1e-5)


# --- Sinusoidal ---------------------------------------------------------------------------------


def test_waves_a_fixed_distance_apart_differ_by_one_turn() -> None:
    """Section 3.5: P[p + d] is a linear function of P[p], the same for every p."""
    table = sinusoidal(torch.arange(100), 8, torch.float64)
    assert table.abs().max() <= 1
    turn = torch.linalg.lstsq(table[:50], table[13:63]).solution
    torch.testing.assert_close(table[50:87] @ turn, table[63:])


# --- What is added to the scores ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (8, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (12, [2**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibis_slopes(heads: int, slopes: list[float]) -> None:
    assert Alibi(heads).slopes("cpu", torch.float64).tolist() == pytest.approx(slopes, rel=1e-15)
    exact = Alibi(8).slopes("cpu", torch.float32).tolist()
    assert exact == [2.0**-i for i in range(1, 9)]


def relative(distance: int, width: int = 8) -> RelativeKeys:
    torch.manual_seed(0)
    return RelativeKeys(GPTConfig(relative_distance=distance, head_dim=width, position="relative"))


@pytest.mark.parametrize("term", [Alibi(4), relative(5).double()])
def test_a_block_of_a_term_is_that_block_of_the_whole(term: ScoreTerm) -> None:
    q = random(2, 4, 12, 8)
    q_pos, k_pos = torch.arange(100, 112)[None], torch.arange(90, 115)[None]
    whole = term(q, q_pos, k_pos).expand(2, 4, 12, 25)
    block = term(q[:, :, 3:7], q_pos[:, 3:7], k_pos[:, 10:20])
    torch.testing.assert_close(block, whole[:, :, 3:7, 10:20][: len(block)], rtol=1e-14, atol=0)


def test_distances_beyond_the_last_share_its_key() -> None:
    term = relative(3).double()
    q = random(1, 2, 1, 8)
    found = term(q, torch.tensor([[10]]), torch.arange(11)[None])[0, :, 0]  # (2, 11)
    wanted = q[0, :, 0] @ term.keys.weight.T  # (2, 4)
    torch.testing.assert_close(found, wanted[:, [3] * 8 + [2, 1, 0]])


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(["causal", "window:3"]),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.sampled_from(["alibi", "relative"]),
    st.integers(1, 9),
)
def test_gradients_are_those_of_the_formula(
    pattern: str, heads: tuple[int, int], kind: str, time: int
) -> None:
    (H, K), D = heads, 8
    term = Alibi(H) if kind == "alibi" else relative(4).double()
    table = term.tables
    assert len(table) == (kind == "relative")
    q, k, v = (random(2, time, n, D, seed=n + 1).requires_grad_() for n in (H, K, K))
    rule = parse_pattern(pattern)
    plan = AttentionPlan.dense(2, time, pattern=rule).layer(0)
    weight = random(2, time, H, D, seed=9)
    out = attend(q, k, v, plan, scale=0.5, term=term)
    found = torch.autograd.grad((out * weight).sum(), (q, k, v, *table))

    at = torch.arange(time)
    distance = at[:, None] - at
    wide_k, wide_v = (x.repeat_interleave(H // K, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, wide_k) * 0.5
    if kind == "alibi":
        scores = scores - term.slopes("cpu", torch.float64)[:, None, None] * distance
    else:
        keys = term.keys.weight[distance.clamp(0, 4)]  # (t, t, D)
        scores = scores + torch.einsum("bihd,ijd->bhij", q, keys) * 0.5
    weights = scores.masked_fill(~rule.allowed(at[:, None], at), -math.inf).softmax(-1)
    wanted = torch.einsum("bhij,bjhd->bihd", weights, wide_v)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    expected = torch.autograd.grad((wanted * weight).sum(), (q, k, v, *table))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["alibi", "relative"])
def test_what_a_term_s_mask_hides_weighs_nothing(kind: str, dtype: torch.dtype) -> None:
    """A large finite number in place of -inf would do in float32, and leak or overflow in half."""
    term = Alibi(2) if kind == "alibi" else relative(4).to(dtype)
    q, k, v = (random(1, 6, 2, 8, seed=i).to(dtype) for i in range(3))
    plan = AttentionPlan.dense(1, 6, pattern=parse_pattern("window:2")).layer(0)
    with torch.no_grad():
        before = attend(1000 * q, k, v, plan, scale=1.0, term=term)
        v[:, 4:], v[:, 0] = torch.finfo(dtype).max, torch.finfo(dtype).max
        after = attend(1000 * q, k, v, plan, scale=1.0, term=term)
    assert before.isfinite().all()
    assert torch.equal(before[:, 2:4], after[:, 2:4])


def test_alibi_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    bias = Alibi.bias
    monkeypatch.setattr(Alibi, "bias", lambda *given: made.append(1) or bias(*given))
    build(SMALL.replace(position="alibi", n_layer=3))(torch.arange(12)[None])
    assert len(made) == 1


# --- The model ----------------------------------------------------------------------------------


def beyond(model: GPT, ids: list[int]) -> torch.Tensor:
    """Logits of a text that may be longer than the context."""
    cache = KVCache(model.config, 3, 16, dtype=model.dtype)
    plan = AttentionPlan.paged([Chunk(0, len(ids), [[1, 2]])], page_size=16, pattern=CAUSAL)
    with torch.inference_mode():
        return model(torch.tensor(ids), plan, cache)


@pytest.mark.parametrize(
    "position", ["none", "learned", "sinusoidal", "relative", "rotary", "alibi"]
)
def test_a_scheme_that_extrapolates_has_positions_beyond_the_context(position: str) -> None:
    config = SMALL.replace(position=position)
    ids = list(range(20))
    if not config.extrapolates:
        assert position == "learned"
        with pytest.raises(IndexError):
            beyond(build(config), ids)
        return
    longer = build(config.replace(block_size=20))(torch.tensor([ids]))[0]
    torch.testing.assert_close(beyond(build(config), ids), longer)


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "relative", "rotary", "alibi"])
def test_the_order_of_tokens_matters(position: str) -> None:
    """In one layer, without positions, the last token sees a set."""
    a, b = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[3, 1, 4, 2, 5]])
    plain = build(SMALL.replace(position="none", n_layer=1))
    torch.testing.assert_close(plain(a)[0, -1], plain(b)[0, -1])
    model = build(SMALL.replace(position=position, n_layer=1))
    assert (model(a)[0, -1] - model(b)[0, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("position", ["alibi", "relative"])
@pytest.mark.parametrize("pattern", ["window:70+sinks:3", "dilated:40:3", "bigbird:128:64:1:0"])
@pytest.mark.parametrize("borders", [False, True])
def test_block_rows_add_the_term_as_the_dense_mask_does(
    position: str, pattern: str, borders: bool
) -> None:
    """The kernel that makes the term block by block, forward and backward, in packed text too."""
    time = 600
    config = SMALL.replace(position=position, pattern=pattern, block_size=time)
    model = build(config)
    ids = torch.randint(1, config.vocab_size, (2, time), generator=torch.Generator().manual_seed(0))
    if borders:
        ids[0, [100, 101, 350]] = 0
    rule = model.pattern
    plan = AttentionPlan.packed(ids, eot=0, pattern=rule)
    # Block rows, or residue classes that are sequences of their own; not one mask over all.
    assert any(g.blocks is not None or g.t < time for g in plan.layer(0).groups)

    def run(plan: AttentionPlan) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits = model(ids, plan)
        weight = torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)
        found = torch.autograd.grad((logits.softmax(-1) * weight).sum(), list(model.parameters()))
        return logits, list(found)

    rows, dense = run(plan), run(masked(ids, rule))
    assert (rows[0] - dense[0]).abs().max() <= 1e-10 * dense[0].abs().max()
    for a, b in zip(rows[1], dense[1], strict=True):
        assert (a - b).abs().max() <= 1e-9 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("position", ["alibi", "relative"])
def test_causal_attention_with_a_term_takes_block_rows_and_no_square(
    position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, calls = 600, []

    def spy(*args: object) -> torch.Tensor:
        calls.append(args)
        return block_sparse_attention(*args)

    monkeypatch.setattr(gpt.attention, "block_sparse_attention", spy)
    monkeypatch.setattr(gpt.model, "FIXED_TERM_BY_ROWS", 600)
    model = build(SMALL.replace(position=position, block_size=time))
    ids = torch.randint(1, 32, (2, time), generator=torch.Generator().manual_seed(0))
    found = model(ids)
    assert len(calls) == model.config.n_layer
    wanted = model(ids, masked(ids, model.pattern))
    assert len(calls) == model.config.n_layer
    assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()
    model(ids[:, :500])
    assert len(calls) == model.config.n_layer, "short sequences keep the fused kernel"


def masked(ids: torch.Tensor, rule: LayerPatterns) -> AttentionPlan:
    """One dense mask, made of the predicate and the borders."""
    B, T = ids.shape
    index = torch.arange(T)
    begins = ids == 0
    begins[:, 0] = True
    starts = torch.where(begins, index, 0).cummax(-1).values
    at = index - starts
    seen = rule.kinds[0].allowed(at[:, :, None], at[:, None, :])
    seen = seen & (starts[:, :, None] == starts[:, None, :])
    return AttentionPlan(at, (LayerPlan((Group(B, T, T, at, at, mask=seen.unsqueeze(1)),)),))
