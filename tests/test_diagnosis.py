"""Measurements inside the model, held to plain loops and to heads built by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt import diagnosis, maps
from gpt.config import GPTConfig
from gpt.diagnosis import gradient_norms, head_statistics, measure
from gpt.model import GPT
from gpt.patterns import parse_pattern
from gpt.plan import AttentionPlan

T = 24


def make_gpt(**changes):
    torch.manual_seed(0)
    config = {"n_layer": 2, "n_head": 4, "d_model": 32, "block_size": T, **changes}
    return GPT(GPTConfig(vocab_size=50, **config))


def some_ids(rows=2):
    return torch.randint(50, (rows, T), generator=torch.Generator().manual_seed(1))


def report(gpt, ids=None):
    ids = some_ids() if ids is None else ids
    return measure(gpt, lambda: gpt(ids))


def by_loops(q, k, allowed, scale):
    """The statistics of one head of one sequence, query by query: q, k (T, D)."""
    entropies, shares, largest = [], [], 0.0
    per_key = [[] for _ in k]
    offsets = [[] for _ in range(diagnosis.OFFSETS)]
    for i, query in enumerate(q):
        keys = [j for j in range(len(k)) if allowed(i, j)]
        scores = torch.tensor([float(query @ k[j]) * scale for j in keys], dtype=torch.float64)
        largest = max(largest, float(scores.abs().max()))
        weights = dict(zip(keys, scores.softmax(0).tolist(), strict=True))
        for j, p in weights.items():
            per_key[j].append(p)
        if len(keys) > 1:
            entropies.append(-sum(p * math.log(p) for p in weights.values() if p > 0))
            shares.append(entropies[-1] / math.log(len(keys)))
            for distance, seen in enumerate(offsets):
                if i - distance in weights:
                    seen.append(weights[i - distance])
    often = [sum(seen) / len(seen) for seen in per_key if len(seen) * 2 >= len(q)]
    return {
        "entropy": sum(entropies) / len(entropies),
        "entropy_share": sum(shares) / len(shares),
        "logit_max": largest,
        "fixed": max(often, default=0.0),
        "offset": max(sum(seen) / len(seen) for seen in offsets if seen),
    }


@settings(max_examples=25, deadline=None)
@given(
    pattern=st.sampled_from(["causal", "window:2", "window:3", "window:9"]),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1)]),
    time=st.integers(2, 12),
    at_once=st.sampled_from([1, 40, 2**22]),
    seed=st.integers(0, 2**16),
)
def test_statistics_are_those_of_plain_loops(pattern, heads, time, at_once, seed):
    H, K = heads
    torch.manual_seed(seed)
    q, k = torch.randn(1, time, H, 6), torch.randn(1, time, K, 6)
    rule = parse_pattern(pattern)
    plan = AttentionPlan.dense(1, time, pattern=rule).layer(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "SCORES_AT_ONCE", at_once)
        found = head_statistics(q, k, plan, scale=0.7)
    for h in range(H):
        wanted = by_loops(
            q[0, :, h],
            k[0, :, h // (H // K)],
            lambda i, j: bool(rule.allowed(torch.tensor(i), torch.tensor(j))),
            0.7,
        )
        for name, value in wanted.items():
            assert float(found[name][h]) == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("position", ["alibi", "relative"])
def test_what_a_scheme_adds_to_the_scores_is_counted(position):
    """Entropies are those of the weights that the model really uses."""
    gpt = make_gpt(position=position, init_std=0.5)
    attn, seen = gpt.blocks[0].attn, []
    attn.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    found = report(gpt, some_ids(1))[0].entropy
    with torch.no_grad():
        q, k, _ = attn.project(seen[0], None)
    at = torch.arange(T)
    distance = at[:, None] - at
    for h in range(4):
        scores = q[0, :, h] @ k[0, :, h].T * attn.scale
        if position == "alibi":
            scores = scores - distance * 2.0 ** (-2 * (h + 1))
        else:
            far = distance.clamp(0, 32)
            scores = scores + attn.scale * torch.einsum(
                "id,ijd->ij", q[0, :, h], attn.term.keys.weight.detach()[far]
            )
        weights = scores.masked_fill(distance < 0, -math.inf).softmax(-1)
        wanted = torch.special.entr(weights).sum(-1)[1:].mean()
        assert found[h] == pytest.approx(float(wanted), abs=1e-5)


def test_documents_of_one_block_are_looked_at_apart():
    ids = torch.tensor([[7, 1, 2, 0, 3, 4, 5, 0, 6, 1, 2, 3], [1] * 12, [0, 1, 2, 3] * 3])
    rule = parse_pattern("causal")
    plan = AttentionPlan.packed(ids, eot=0, pattern=rule).layer(0)
    assert len(plan.groups) == 2
    torch.manual_seed(0)
    q, k = torch.randn(3, 12, 2, 4), torch.randn(3, 12, 2, 4)
    found = head_statistics(q, k, plan, scale=0.5)
    entropy, queries, fixed = 0.0, 0, 0.0
    for b in range(3):
        begin = [0] * 12
        for i in range(1, 12):
            begin[i] = i if ids[b, i] == 0 else begin[i - 1]
        one = by_loops(q[b, :, 1], k[b, :, 1], lambda i, j, begin=begin: begin[i] <= j <= i, 0.5)
        choices = sum(begin[i] < i for i in range(12))
        entropy += one["entropy"] * choices
        queries += choices
        fixed += one["fixed"] / 3
    assert float(found["entropy"][1]) == pytest.approx(entropy / queries, abs=1e-5)
    assert float(found["fixed"][1]) == pytest.approx(fixed, abs=1e-5)


def set_queries(gpt, layer, head, to):
    """Give one head constant queries (or none) through its rows of the projection."""
    attn = gpt.blocks[layer].attn
    D = attn.head_dim
    with torch.no_grad():
        attn.qkv.weight[head * D : (head + 1) * D] = to


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False, "position": "learned"}])
def test_a_head_without_queries_is_uniform(changes):
    gpt = make_gpt(**changes)
    set_queries(gpt, 1, 2, 0.0)
    layer = report(gpt)[1]
    mean_log = sum(math.log(n) for n in range(2, T + 1)) / (T - 1)
    assert layer.entropy_share[2] == pytest.approx(1, abs=1e-6)
    assert layer.entropy[2] == pytest.approx(mean_log, abs=1e-5)
    assert layer.logit_max[2] == 0
    others = [share for head, share in enumerate(layer.entropy_share) if head != 2]
    assert changes or max(others) < 0.99


def test_a_head_in_which_one_key_wins_is_collapsed():
    q = torch.ones(2, T, 1, 4)
    k = torch.zeros(2, T, 1, 4)
    k[0, 0], k[1, 3] = 20.0, 20.0
    plan = AttentionPlan.dense(2, T, pattern=parse_pattern("causal")).layer(0)
    found = head_statistics(q, k, plan, scale=0.5)
    assert float(found["fixed"]) == pytest.approx(1, abs=1e-4)
    assert float(found["offset"]) < 0.2
    assert float(found["logit_max"]) == 40
    # The three queries before the key of the second sequence have no favourite.
    assert float(found["entropy_share"]) == pytest.approx(2 / (2 * (T - 1)), abs=1e-4)


def test_a_head_that_reads_the_token_before_is_sharp_but_moves_along():
    q = torch.nn.functional.one_hot(torch.arange(T)).float().view(1, T, 1, T)
    k = torch.nn.functional.one_hot(torch.arange(T) + 1, T + 1)[:, :T].float().view(1, T, 1, T)
    plan = AttentionPlan.dense(1, T, pattern=parse_pattern("causal")).layer(0)
    found = head_statistics(q, k, plan, scale=50.0)
    assert float(found["entropy_share"]) < 0.01
    assert float(found["offset"]) == pytest.approx(1, abs=1e-4)
    assert float(found["fixed"]) < 0.2


def test_what_a_head_adds_is_measured_and_a_dead_one_adds_nothing():
    gpt = make_gpt(n_head=1, residual_scale=0.5)
    layer = report(gpt)[0]
    assert layer.head_rms[0] == pytest.approx(layer.attn_rms, rel=1e-4)
    gpt = make_gpt()
    attn = gpt.blocks[0].attn
    with torch.no_grad():
        attn.out.weight[:, attn.head_dim : 2 * attn.head_dim] = 0
    found = report(gpt)[0].head_rms
    assert found[1] == 0
    assert min(found[0], *found[2:]) > 1e-4


def test_branches_are_measured_as_they_reach_the_stream():
    gpt = make_gpt(residual_scale=0.25, norm_place="post")
    branch = []
    gpt.blocks[0].mlp.register_forward_hook(lambda _, __, y: branch.append(y))
    layer = report(gpt)[0]
    assert layer.mlp_rms == pytest.approx(float(branch[0].square().mean().sqrt()) / 4, rel=1e-5)
    assert layer.stream_rms == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(("mlp", "asleep"), [("relu2", -1.0), ("gelu", -9.0)])
def test_hidden_units_that_never_wake_are_counted(mlp, asleep):
    gpt = make_gpt(mlp=mlp, bias=True, norm="layernorm")
    up = gpt.blocks[0].mlp.up
    with torch.no_grad():
        up.weight[:32] = 0
        up.bias[:32] = asleep
        up.weight[32:64] = 0  # awake, if only just, for GELU
        up.bias[32:64] = 1.0
    assert report(gpt)[0].dead_units == pytest.approx(32 / 128, abs=0.02)
    assert report(make_gpt(mlp="swiglu"))[0].dead_units is None


def test_measuring_leaves_the_model_and_the_random_numbers_alone():
    gpt = make_gpt(dropout=0.5)
    gpt.train()
    gpt.blocks[1].eval()
    gpt(some_ids()).sum().backward()
    gradients = [p.grad.clone() for p in gpt.parameters()]
    state = torch.get_rng_state()
    first, second = report(gpt), report(gpt)
    assert first == second  # dropout is off meanwhile
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, gradients, [p.grad for p in gpt.parameters()]))
    assert [gpt.training, gpt.blocks[0].training, gpt.blocks[1].training] == [True, True, False]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in gpt.modules())
    with pytest.raises(ZeroDivisionError):
        measure(gpt, lambda: 1 // 0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in gpt.modules())
    assert gpt.training


def test_a_compiled_model_is_measured_past_the_compiler_and_not_compiled_again():
    compiled = 0

    def backend(graph, _):
        nonlocal compiled
        compiled += 1
        return graph.forward

    gpt = make_gpt(n_layer=1)
    plain = report(gpt)
    gpt.compile(backend=backend, dynamic=False)
    with torch.no_grad():
        gpt(some_ids())
        before = compiled
        assert before
        assert report(gpt) == plain
        gpt(some_ids())
    assert compiled == before


def test_gradients_are_summed_up_by_part_and_as_clipping_does():
    gpt = make_gpt(position="learned", tie_embeddings=True)
    assert gradient_norms(gpt) == {}
    gpt(some_ids()).logsumexp(-1).mean().backward()
    found = gradient_norms(gpt)
    assert list(found) == ["embed", "0", "1", "head", "total"]
    block = torch.nn.utils.clip_grad_norm_(gpt.blocks[1].parameters(), math.inf)
    assert found["1"] == pytest.approx(float(block), rel=1e-5)
    total = torch.nn.utils.clip_grad_norm_(gpt.parameters(), math.inf)
    assert found["total"] == pytest.approx(float(total), rel=1e-5)
