"""Muon: what its step is, that it is taken by the right parameters, and that it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.lora import LoRAConfig, adapt
from gpt.model import GPT
from gpt.training.muon import Manner, MuonAdamW, equalize, even_out
from gpt.training.newton_schulz import orthogonalize
from gpt.training.optim import OptimizerConfig, make_optimizer, parameter_groups, set_step
from tests.training.small import fit, make_module

SMALL = GPTConfig(vocab_size=20, block_size=8, n_layer=2, n_head=2, d_model=8)


def matrix(singular: torch.Tensor, rows: int, columns: int, seed: int) -> torch.Tensor:
    """A float64 matrix with these singular values."""
    random = torch.Generator().manual_seed(seed)
    k = len(singular)
    u, _ = torch.linalg.qr(torch.randn(rows, k, generator=random, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(columns, k, generator=random, dtype=torch.float64))
    return u @ torch.diag(singular) @ v.T


def equalized(found: list[torch.Tensor], rows: list[tuple[int, ...]]) -> list[torch.Tensor]:
    made = [update.clone() for update in found]
    equalize(made, [Manner(each) for each in rows])
    return made


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 24), more=st.integers(0, 60), standing=st.booleans(),
    seed=st.integers(0, 999),
    scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e8]), batch=st.integers(1, 3),
)  # fmt: skip
def test_singular_vectors_stay_and_singular_values_become_about_one(
    rows, more, standing, seed, scale, batch
):
    """Held to the singular value decomposition in float64."""
    singular = torch.logspace(0, -1.5, rows, dtype=torch.float64)
    exact = [matrix(singular, rows, rows + more, seed + i) for i in range(batch)]
    if standing:
        exact = [m.T for m in exact]
    made = orthogonalize(torch.stack(exact).float() * scale)
    for given_, found in zip(exact, made.double(), strict=True):
        u, _, vt = torch.linalg.svd(given_, full_matrices=False)
        inner = u.T @ found @ vt.T
        values = inner.diagonal()
        assert (inner - torch.diag(values)).abs().max() < 1e-3
        assert values.min() > 0.65
        assert values.max() < 1.25


def test_a_zero_gradient_moves_nothing():
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_matrices_that_share_a_layer_are_equalized_each_for_itself_and_tall_ones_go_further():
    update = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(0))
    alone = [update[:, 0:12].clone(), update[:, 12:16].clone(), update[:, 16:20].clone()]
    alone[1:] = [m * 1000 for m in alone[1:]]  # whose size says nothing
    # One parameter beside them is a matrix of the height of some.
    together = equalized([*update, alone[1][0]], [(12, 4, 4), (12, 4, 4), ()])
    for i in range(2):
        wanted = torch.cat([equalized([m[i]], [()])[0] for m in alone])
        assert torch.allclose(together[i], wanted, atol=1e-5)
    assert torch.allclose(together[2], together[0][12:16], atol=1e-5)
    size = torch.linalg.matrix_norm(torch.stack(together[:2])[:, :12], 2)
    assert torch.all(size > 0.65 * 1.5**0.5)
    assert torch.all(size < 1.25 * 1.5**0.5)


def test_the_step_is_the_nesterov_mean_equalized_after_the_decay():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    group = {"params": [weight], "kind": "muon", "weight_decay": 0.5, "momentum": 0.9}
    optimizer = MuonAdamW([group], lr=0.1)
    mean, expected = torch.zeros(4, 4), torch.ones(4, 4)
    for seed in range(3):
        gradient = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        weight.grad = gradient
        optimizer.step()
        mean = 0.9 * mean + 0.1 * gradient
        step = orthogonalize((0.1 * gradient + 0.9 * mean)[None])[0]
        expected = expected * 0.95 - 0.1 * step
        assert torch.allclose(weight, expected, atol=1e-5)


def test_a_step_is_divided_by_each_neurons_own_mean_of_squares_and_keeps_its_size():
    """Held to NorMuon's formulas, written for one matrix at a time in float64."""
    heights, beta2 = (12, 4, 4, 6), 0.8
    weight = torch.nn.Parameter(torch.zeros(26, 6))
    group = {
        "params": [weight], "kind": "muon", "momentum": 0.0, "beta2": beta2, "rows": heights,
    }  # fmt: skip
    optimizer = MuonAdamW([group], lr=0.1)
    means = [torch.zeros(max(height, 6), 1, dtype=torch.float64) for height in heights]
    expected = torch.zeros(26, 6, dtype=torch.float64)
    for seed in range(4):
        weight.grad = torch.randn(26, 6, generator=torch.Generator().manual_seed(seed))
        weight.grad[0] = 0.0
        optimizer.step()
        moved = []
        for i, gradient in enumerate(weight.grad.split(heights)):
            made = orthogonalize(gradient.clone()[None])[0].double()
            tall = made if len(made) >= 6 else made.T
            means[i] = beta2 * means[i] + (1 - beta2) * tall.pow(2).mean(1, keepdim=True)
            corrected = means[i] / (1 - beta2 ** (seed + 1))
            evened = torch.where(corrected > 0, tall / corrected.sqrt(), 0.0)
            evened *= tall.norm() / evened.norm()
            scale = max(1.0, len(made) / 6) ** 0.5
            moved.append(scale * (evened if len(made) >= 6 else evened.T))
        expected -= 0.1 * torch.cat(moved)
        assert torch.allclose(weight, expected.float(), atol=1e-5)
    assert not weight[0].any(), "what has no gradient does not move"


def test_at_first_all_neurons_move_alike():
    x = torch.randn(3, 40, 6, generator=torch.Generator().manual_seed(0))
    for update in (orthogonalize(x.clone()), orthogonalize(x.clone()).mT.contiguous()):
        along = -1 if update.shape[-2] > update.shape[-1] else -2
        before = update.norm(dim=(-2, -1))
        assert (update.norm(dim=along).std(dim=-1) > 0.05).all()
        even_out(update, torch.zeros(3, 40), 0.95)
        assert (update.norm(dim=along).std(dim=-1) < 1e-5).all()
        assert torch.allclose(update.norm(dim=(-2, -1)), before)


@pytest.mark.parametrize("mlp", ["relu2", "swiglu"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("position", ["learned", "relative"])
def test_muon_moves_the_matrices_of_the_blocks_and_each_parameter_is_in_one_group(
    mlp, tied, position
):
    gpt = GPT(SMALL.replace(mlp=mlp, tie_embeddings=tied, position=position, n_kv_head=1))
    names = {id(p): name for name, p in gpt.named_parameters()}
    groups = parameter_groups(gpt.named_parameters(), OptimizerConfig(kind="muon"), gpt.config)
    of_muon = {names[id(p)] for g in groups if g["kind"] == "muon" for p in g["params"]}
    ends = ("attn.qkv.weight", "attn.out.weight", "mlp.up.weight", "mlp.down.weight")
    assert of_muon == {f"blocks.{i}.{end}" for i in range(2) for end in ends}
    rows = {names[id(g["params"][0])]: g["rows"] for g in groups if g["kind"] == "muon"}
    assert rows["blocks.0.attn.qkv.weight"] == (8, 4, 4)
    if mlp == "swiglu":
        assert rows["blocks.0.mlp.up.weight"] == (gpt.config.mlp_width,) * 2
    placed = [id(p) for group in groups for p in group["params"]]
    assert sorted(placed) == sorted(names), "each in exactly one"


def test_the_rest_moves_as_adamw_alone_would_move_it():
    def stepped(kind: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        gpt = GPT(SMALL)
        config = OptimizerConfig(kind=kind, weight_decay=0.3)
        optimizer = make_optimizer(gpt.named_parameters(), config, gpt.config, fused=True)
        for _ in range(3):
            for p in gpt.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
            optimizer.step()
        return dict(gpt.named_parameters())

    alone, together = stepped("adamw"), stepped("muon")
    for name, p in alone.items():
        is_matrix = "blocks" in name and p.ndim == 2
        assert torch.equal(p, together[name]) != is_matrix, name


def test_each_kind_has_its_own_rate_and_decay_under_one_schedule():
    gpt = GPT(SMALL)
    config = OptimizerConfig(
        kind="muon", lr=0.002, muon_lr=0.01, weight_decay=0.2, muon_weight_decay=0.05,
        decays=("matrices", "head"), betas=(0.8, 0.9), muon_momentum=0.7,
        muon_beta2=0.6,
    )  # fmt: skip
    optimizer = make_optimizer(gpt.named_parameters(), config, gpt.config, fused=False)
    set_step(optimizer, config, 0.001, 0.5)
    muon = [g for g in optimizer.param_groups if g["kind"] == "muon"]
    (rest,) = [g for g in optimizer.param_groups if g["kind"] == "adamw"]
    assert all(g["lr"] == pytest.approx(0.005) for g in muon)
    assert all(g["weight_decay"] == pytest.approx(0.025) for g in muon)
    assert all((g["momentum"], g["beta2"]) == (0.7, 0.6) for g in muon)
    assert (rest["lr"], rest["weight_decay"], rest["betas"]) == (0.001, 0.0, (0.8, 0.9))


def test_muon_with_nothing_to_move_is_refused():
    gpt = GPT(SMALL)
    adapt(gpt, LoRAConfig(rank=2))
    with pytest.raises(ConfigError, match=r"optimizer\.kind is muon, but nothing that it moves"):
        make_optimizer(
            gpt.named_parameters(), OptimizerConfig(kind="muon"), gpt.config, fused=False
        )


@pytest.mark.parametrize(
    "group", [{"kind": "sgd"}, {"kind": "muon", "rows": (3, 2)}, {"kind": "muon", "ndim": 1}]
)
def test_a_group_that_cannot_be_stepped_is_refused(group):
    p = torch.nn.Parameter(torch.zeros(4) if group.pop("ndim", 2) == 1 else torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"kind|shape"):
        MuonAdamW([{"params": [p], **group}])


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_run_with_muon_learns_and_goes_on_to_the_last_bit(
    tmp_path: Path, corpus: Path, precision: str
):
    """Four steps, a checkpoint and four more are eight straight ones, dropout on."""
    options = {"kind": "muon", "weight_decay_schedule": "linear"}

    def module():
        return make_module(dropout=0.1, optimizer=options, config={"n_layer": 2})

    straight = fit(tmp_path, corpus, 8, module=module(), precision=precision)
    first = fit(
        tmp_path, corpus, 8, module=module(), limit_train_batches=4, max_epochs=1,
        precision=precision,
    )  # fmt: skip
    first.trainer.save_checkpoint(tmp_path / "half.ckpt")
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    assert sum("momentum" in kept for kept in state.values()) == 8
    assert sum("squares" in kept for kept in state.values()) == 8
    again = fit(
        tmp_path, corpus, 8, module=module(), ckpt_path=tmp_path / "half.ckpt", seed=1,
        precision=precision,
    )  # fmt: skip
    assert again.trainer.global_step == straight.trainer.global_step == 8
    for (name, a), b in zip(straight.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_means_of_squares_that_are_not_kept_for_a_while_begin_anew():
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    group = {"params": [weight], "kind": "muon", "beta2": 0.9}
    optimizer = MuonAdamW([group], lr=0.1)
    weight.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert optimizer.state[weight]["squares"].any()
    optimizer.param_groups[0]["beta2"] = 0.0
    optimizer.step()
    assert "squares" not in optimizer.state[weight]


def test_a_state_from_before_neurons_were_evened_out_is_taken():
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    optimizer = MuonAdamW([{"params": [weight], "kind": "muon", "beta2": 0.9}], lr=0.1)
    weight.grad = torch.ones(6, 4)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["beta2"]
    optimizer.load_state_dict(state)
    optimizer.step()
    assert weight.any()
