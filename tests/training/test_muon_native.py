"""Muon's iteration by the compiled kernels, held to float64 and to torch's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.native import build as building
from gpt.native import kernels as native
from gpt.native import orthogonal
from gpt.native.kernels import Kernels
from gpt.training import muon, newton_schulz
from gpt.training.muon import MuonAdamW
from gpt.training.optim import OptimizerConfig, make_optimizer

NO_COMPILER = not any(shutil.which(name) for name in building.COMPILERS)
pytestmark = pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def in_use(kernels: Kernels) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    native.use(kernels)
    yield
    native.use(None)
    torch.set_num_threads(before)


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def steps(*found: Tensor, beta2: float = 0.0) -> list[Tensor]:
    """What Muon makes of gradients, at a rate of 1 and without a mean of earlier ones."""
    weights = [torch.nn.Parameter(torch.zeros_like(x)) for x in found]
    for weight, x in zip(weights, found, strict=True):
        weight.grad = x.clone()
    group = {"params": weights, "kind": "muon", "momentum": 0.0, "beta2": beta2}
    MuonAdamW([group], lr=1.0).step()
    return [-weight.detach() for weight in weights]


def exact(x: Tensor) -> Tensor:
    """The iteration as it is written, in float64."""
    scale = max(1.0, x.shape[0] / x.shape[1]) ** 0.5
    wide = x.double() if x.shape[0] <= x.shape[1] else x.double().T
    made = newton_schulz._turns(wide[None] / torch.linalg.matrix_norm(wide))[0]
    return scale * (made if x.shape[0] <= x.shape[1] else made.T)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 70), more=st.integers(0, 300), standing=st.booleans(),
    seed=st.integers(0, 999), scale=st.sampled_from([1e-12, 1.0, 1e8]),
)  # fmt: skip
def test_it_is_that_of_float64(
    kernels: Kernels, rows: int, more: int, standing: bool, seed: int, scale: float
) -> None:
    x = random(rows, rows + more, seed=seed) * scale
    x = x.T.contiguous() if standing else x
    (made,) = steps(x)
    # What is lost in the products of rows grows 3.4-fold a turn where a singular value is small.
    assert (made - exact(x)).abs().max() < 1e-4 * exact(x).abs().max()


@pytest.mark.parametrize("size", [(128, 128), (133, 150), (260, 200), (512, 96), (129, 700)])
def test_it_is_that_of_torch_where_products_are_of_several_pieces(
    kernels: Kernels, size: tuple[int, int]
) -> None:
    x = random(2, *size)
    made = steps(*x)
    native.use(None)
    for found, wanted in zip(made, steps(*x), strict=True):
        assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_the_singular_values_of_a_flat_matrix_grow_as_in_float64(kernels: Kernels) -> None:
    """Most are too small for float32 products of rows to tell from nothing."""
    for columns in (40, 46, 160):
        x = random(40, 3, seed=1) @ random(3, columns, seed=2) + 1e-4 * random(40, columns)
        (made,) = steps(x)
        assert torch.linalg.matrix_norm(made.double() - exact(x), 2) < 0.02


@pytest.mark.parametrize("beta2", [0.0, 0.95])
def test_zero_stays_zero_and_what_is_not_a_number_is_none_afterwards(
    kernels: Kernels, beta2: float
) -> None:
    shapes = [(1, 1), (1, 9), (9, 1), (5, 5), (20, 7), (33, 40)]
    for made in steps(*[torch.zeros(shape) for shape in shapes], beta2=beta2):
        assert not made.any()
    for bad in (torch.nan, torch.inf, -torch.inf):
        found = [random(*shape) for shape in shapes]
        for x in found:
            x[-1, -1] = bad
        beside = random(6, 6)
        *made, good = steps(*found, beside, beta2=beta2)
        assert all(x.isnan().all() for x in made)
        assert torch.equal(good, steps(beside, beta2=beta2)[0]), "the others are not touched"


def test_the_number_of_threads_changes_nothing() -> None:
    found = [random(*s, seed=i) for i, s in enumerate([(64, 64), (200, 64), (64, 200), (9, 5)] * 3)]
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append(steps(*found, beta2=0.95))
    finally:
        torch.set_num_threads(before)
        native.use(None)
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


def test_they_get_what_they_are_faster_for(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_: list[tuple[int, int]] = []
    whole = orthogonal.step

    def noted(kernels: Kernels, matrices: list[orthogonal.Matrix], *rest: Any) -> None:
        given_.extend((m.rows, m.columns) for m in matrices)
        whole(kernels, matrices, *rest)

    monkeypatch.setattr(orthogonal, "step", noted)
    monkeypatch.setattr(muon, "KERNELS_TO", 8)
    found = [random(8, 40), random(9, 9), random(8, 8).double(), random(8, 6).T, random(12, 8)]
    made = steps(*found)
    assert sorted(given_) == [(8, 40), (12, 8)]
    for x, y in zip(found, made, strict=True):
        assert y.dtype == x.dtype
        assert torch.allclose(y, exact(x).to(y.dtype), atol=1e-4)
    given_.clear()
    torch.set_num_threads(2)
    steps(found[0])
    assert not given_, "one of two threads would have nothing to do"


@pytest.mark.parametrize("beta2", [0.0, 0.9])
def test_a_step_is_that_of_torch(kernels: Kernels, beta2: float) -> None:
    """Of a whole optimizer, with layers of several matrices."""

    def weights() -> list[Tensor]:
        torch.manual_seed(0)
        config = GPTConfig(
            vocab_size=20, block_size=8, n_layer=2, n_head=4, n_kv_head=2, d_model=24, mlp="swiglu"
        )
        gpt = GPT(config)
        config_ = OptimizerConfig(kind="muon", lr=0.01, muon_beta2=beta2)
        optimizer = make_optimizer(gpt.named_parameters(), config_, config, fused=True)
        for seed in range(3):
            for i, p in enumerate(gpt.parameters()):
                p.grad = random(*p.shape, seed=100 * seed + i)
            optimizer.step()
        return [p.detach() for p in gpt.parameters()]

    made = weights()
    native.use(None)
    for found, wanted in zip(made, weights(), strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


def test_tensors_without_memory_are_torchs(kernels: Kernels) -> None:
    with FakeTensorMode():
        (made,) = steps(torch.zeros(4, 4))
        assert made.shape == (4, 4)


def test_a_state_of_other_shapes_is_not_written_to(kernels: Kernels) -> None:
    for name, shape in ("squares", (3,)), ("momentum", (5, 4)):
        weight = torch.nn.Parameter(torch.zeros(6, 4))
        optimizer = MuonAdamW([{"params": [weight], "kind": "muon", "beta2": 0.9}], lr=0.1)
        weight.grad = torch.ones(6, 4)
        optimizer.step()
        optimizer.state[weight][name] = torch.zeros(shape)
        with pytest.raises(RuntimeError):
            optimizer.step()
