"""The pieces of a training step that are kernels: held to torch's own operations in float64."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpt import attention
from gpt.attention import Attention
from gpt.config import GPTConfig
from gpt.conv import ShortConv
from gpt.lora import LoRAConfig, adapt
from gpt.model import GPT, MLP
from gpt.native import build as building
from gpt.native import gradients
from gpt.native import kernels as native
from gpt.native.causal import causal_attention
from gpt.native.kernels import Kernels
from gpt.norms import RMSNorm
from gpt.plan import AttentionPlan
from gpt.rotary import rotary_table

NO_COMPILER = not any(shutil.which(name) for name in building.COMPILERS)
pytestmark = pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler here")

GRADIENTS = ("_RMSNorm", "_Convolve", "_SquareReLU", "_TakeApart", "_AddDropped")
ALL = {*GRADIENTS, "_CausalAttention"}


@pytest.fixture(autouse=True)
def in_use(kernels: Kernels) -> Iterator[None]:
    native.use(kernels)
    yield
    native.use(None)


def nodes(y: Tensor) -> Iterator[Any]:
    """Of the graph that leads to y."""
    open_ = [y.grad_fn]
    while open_:
        node = open_.pop()
        if node is not None:
            yield node
            open_ += [before for before, _ in node.next_functions]


def ran(y: Tensor) -> set[str]:
    """Which kernels' gradients lead to y."""
    names = {type(node).__name__.removesuffix("Backward") for node in nodes(y)}
    return names & ALL


def gradients_of(module: nn.Module, y: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Of a sum of y with weights that are all different, by the inputs and the parameters."""
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).sin().view(y.shape)
    return list(torch.autograd.grad((y * weights).sum(), [*inputs, *module.parameters()]))


def held_to_torch(
    module: nn.Module,
    x: Tensor,
    run: Callable[[nn.Module, Tensor], Tensor],
    *wanted: str,
    summands: float = 1e-3,
) -> None:
    """Results and all gradients, against the same in float64 without kernels.

    Args:
        summands: how large are the numbers whose sum may be near 0.
    """
    x = x.requires_grad_()
    y = run(module, x)
    assert ran(y) == set(wanted)
    exact, x64 = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
    y64 = run(exact, x64)
    assert not ran(y64)
    pairs = zip(
        [y, *gradients_of(module, y, x)], [y64, *gradients_of(exact, y64, x64)], strict=True
    )
    for found, expected in pairs:
        scale = expected.abs().max().clamp_min(summands)
        assert (found.double() - expected).abs().max() <= 3e-6 * scale * x.shape[-2] ** 0.5


def random_weights(module: nn.Module, seed: int) -> nn.Module:
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=made))
    return module


@settings(max_examples=40)
@given(
    rows=st.integers(1, 70), batch=st.integers(1, 3), C=st.integers(1, 40),
    scale=st.sampled_from([1e-4, 1.0, 1e4]), seed=st.integers(0, 99),
)  # fmt: skip
def test_norm(rows: int, batch: int, C: int, scale: float, seed: int) -> None:
    x = torch.randn(batch, rows, C, generator=torch.Generator().manual_seed(seed)) * scale
    norm = RMSNorm(C, eps=1e-5)
    random_weights(norm, seed)
    factors = (x.detach().square().mean(-1) + 1e-5).rsqrt()
    summands = float(factors.max() * norm.weight.detach().abs().max())
    held_to_torch(norm, x, lambda module, x: module(x), "_RMSNorm", summands=summands)


@settings(max_examples=40)
@given(
    batch=st.integers(1, 3), T=st.integers(1, 90), C=st.integers(1, 20), k=st.integers(2, 9),
    ends=st.none() | st.integers(1, 12), seed=st.integers(0, 99),
)  # fmt: skip
def test_convolution_within_sequences_and_documents(
    batch: int, T: int, C: int, k: int, ends: int | None, seed: int
) -> None:
    x = torch.randn(batch, T, C, generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(T)
    if ends is not None:  # documents of so many tokens, which begin elsewhere in each sequence
        positions = (positions + 5 * torch.arange(batch)[:, None]) % ends
        positions = torch.minimum(positions, torch.arange(T))
    conv = random_weights(ShortConv(GPTConfig(d_model=C, n_head=1, head_dim=2, conv_width=k)), seed)
    held_to_torch(conv, x, lambda module, x: module(x, positions), "_Convolve")


@settings(max_examples=40)
@given(rows=st.integers(1, 40), seed=st.integers(0, 99))
def test_squared_relu(rows: int, seed: int) -> None:
    config = GPTConfig(d_model=12, n_head=1, mlp="relu2", d_ff=37)
    x = torch.randn(2, rows, 12, generator=torch.Generator().manual_seed(seed))
    mlp = random_weights(MLP(config), seed)
    held_to_torch(mlp, x, lambda module, x: module(x), "_SquareReLU")


def test_squared_relu_of_what_is_no_number(kernels: Kernels) -> None:
    odd = [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 3.0, -3.0, 1e30]
    x = torch.tensor(odd * 3, requires_grad=True)
    y = gradients.square_relu(kernels, x)
    assert torch.equal(y.nan_to_num(7), torch.relu(x).square().nan_to_num(7))
    (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(torch.relu(x).square().sum(), x)
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


@settings(max_examples=40)
@given(
    K=st.integers(1, 3), shared=st.integers(1, 2), D=st.sampled_from([2, 6, 8, 20]),
    turned=st.sampled_from([None, "half-split", "interleaved"]), normed=st.booleans(),
    part=st.booleans(), apart=st.booleans(), T=st.integers(1, 50), seed=st.integers(0, 99),
)  # fmt: skip
def test_queries_keys_and_values(
    K: int, shared: int, D: int, turned: str | None, normed: bool, part: bool, apart: bool, T: int,
    seed: int,
) -> None:  # fmt: skip
    options: dict[str, Any] = {"position": "none"}
    if turned:
        options = {"rope_layout": turned, "rope_dims": 2 if part else None}
    config = GPTConfig(
        d_model=10, n_head=K * shared, n_kv_head=K, head_dim=D, qk_norm=normed, **options
    )
    positions = torch.arange(T) * 3
    if apart:  # each sequence has its own
        positions = torch.stack([positions, positions.flip(0)])
    heads = random_weights(Attention(config), seed)
    x = torch.randn(2, T, 10, generator=torch.Generator().manual_seed(seed))

    def run(module: nn.Module, x: Tensor) -> Tensor:
        table = rotary_table(positions, config, x.dtype) if turned else None
        assert isinstance(module, Attention)
        q, k, v = module.project(x, table)
        # The matrix behind them has no part in this, but must have a gradient.
        return torch.cat([q, k, v], dim=-2) + 0 * module.out.weight.sum()

    held_to_torch(heads, x, run, *(["_TakeApart"] if turned or normed else []))


CONFIG = GPTConfig(
    vocab_size=30, n_layer=2, n_head=4, n_kv_head=2, d_model=24, block_size=32, mlp="relu2",
    qk_norm=True, conv_width=3, tie_embeddings=False,
)  # fmt: skip


def loss_of(model: GPT, documents: bool = False) -> Tensor:
    ids = torch.randint(1, 30, (3, 33), generator=torch.Generator().manual_seed(1))
    plan = None
    if documents:
        ids[:, ::7] = 0
        plan = AttentionPlan.packed(ids[:, :-1], eot=0, pattern=model.pattern)
    return model(ids[:, :-1], plan, targets=ids[:, 1:])


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_whole_model_learns_the_same(documents: bool, recompute: bool) -> None:
    model = random_weights(GPT(CONFIG), 0)
    assert isinstance(model, GPT)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.3)
    model.activation_checkpointing = recompute
    y = loss_of(model, documents)
    if not recompute:
        attention = set() if documents else {"_CausalAttention"}
        assert ran(y) == {"_RMSNorm", "_Convolve", "_SquareReLU", "_TakeApart"} | attention
    found = gradients_of(model, y)
    exact = copy.deepcopy(model).double()
    expected = gradients_of(exact, loss_of(exact, documents))
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max() <= 1e-4 * b.abs().max()


@given(
    rows=st.integers(1, 60), C=st.integers(1, 40), p=st.sampled_from([0.05, 0.3, 0.9]),
    scale=st.sampled_from([1.0, 0.25]), onto=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40)
def test_dropout_keeps_or_drops_and_learns_through_what_it_kept(
    kernels: Kernels, rows: int, C: int, p: float, scale: float, onto: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, branch = torch.randn(rows, C, requires_grad=True), torch.randn(rows, C, requires_grad=True)
    state = torch.get_rng_state()
    y = gradients.add_dropped(kernels, x if onto else None, branch, p, scale)
    added = y - x if onto else y
    kept = added.abs() > 1e-5 * x.abs().clamp_min(1)
    expected = torch.where(kept, branch * scale / (1 - p), 0)
    assert torch.allclose(added, expected, rtol=1e-4, atol=1e-5)
    dy = torch.randn(rows, C)
    found = torch.autograd.grad(y, [branch, *([x] if onto else [])], dy)
    assert torch.allclose(found[0], torch.where(kept, dy * scale / (1 - p), 0))
    assert not onto or torch.equal(found[1], dy)
    torch.set_rng_state(state)
    again = gradients.add_dropped(kernels, x if onto else None, branch, p, scale)
    assert torch.equal(again, y), "a resumed run drops what a straight one does"


def test_dropout_is_as_often_as_it_says_and_knows_no_neighbours(kernels: Kernels) -> None:
    n, p = 2**20, 0.2
    ones = torch.ones(n)
    torch.manual_seed(0)
    masks = [gradients.add_dropped(kernels, None, ones, p) > 0 for _ in range(4)]

    def far(events: Tensor, probability: float) -> float:
        """In standard deviations."""
        count = len(events)
        sigma = (probability * (1 - probability) / count) ** 0.5
        return abs(float(events.double().mean()) - probability) / sigma

    both = (1 - p) ** 2
    for mask in masks:
        assert far(mask, 1 - p) < 4.5
        for step in (1, 2, 3, 8, 64, 128, 256, 1024, 2**16):
            assert far((mask[::2] & mask.roll(step)[::2])[: n // 2], both) < 5
    for i in range(4):
        for j in range(i):
            assert far(masks[i] & masks[j], both) < 5


def test_dropout_is_the_same_when_a_block_is_computed_again() -> None:
    model = GPT(CONFIG.replace(dropout=0.3))
    found = []
    for recompute in (False, True):
        model.activation_checkpointing = recompute
        torch.manual_seed(7)
        y = loss_of(model)
        found.append([y, *gradients_of(model, y)])
    assert all(map(torch.equal, *found))
    assert "_AddDropped" in ran(y)
    model.eval()
    assert torch.equal(loss_of(model), loss_of(model))


def test_the_number_of_threads_changes_no_bit(kernels: Kernels) -> None:
    made, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    rows = [torch.randn(5, 300, 16, generator=made).requires_grad_() for _ in range(3)]
    weights = [torch.randn(n, generator=made).requires_grad_() for n in (16, 48, 4, 4)]
    table = rotary_table(torch.arange(300), CONFIG.replace(head_dim=4), torch.float32)
    heads = gradients.Heads(2, 1, 4, 1e-6, False)

    def found() -> list[Tensor]:
        torch.manual_seed(0)
        q, k, v = gradients.take_apart(
            kernels, rows[0], heads, (weights[2], weights[3]), (table.cos, table.sin)
        )
        conv = weights[1].view(16, 1, 3)
        y = torch.cat([
            gradients.rms_norm(kernels, rows[1], weights[0], 1e-6),
            gradients.convolve(kernels, rows[2], conv, torch.arange(300)),
            gradients.square_relu(kernels, rows[1]),
            gradients.add_dropped(kernels, rows[0], rows[1], 0.3),
            q.flatten(-2), k.flatten(-2), v.flatten(-2),
        ], dim=-1)  # fmt: skip
        return [y, *gradients_of(nn.Module(), y, *rows, *weights)]

    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(found())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, three) for one, three in zip(*results, strict=True))


def test_gradients_that_nobody_wants_are_not_made() -> None:
    model = GPT(CONFIG)
    adapt(model, LoRAConfig(rank=2))
    loss_of(model).backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GRADIENTS:
        monkeypatch.setattr(getattr(gradients, name), "apply", None)
    monkeypatch.setattr(attention, "causal_attention", None)


@pytest.mark.parametrize("why", ["float64", "no gradients", "autocast", "compiled"])
def test_what_they_are_not_for_runs_through_torch(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = GPT(CONFIG.replace(dropout=0.1))
    if why == "float64":
        model.double()
    if why == "compiled":
        torch._dynamo.reset()
        model = torch.compile(model, backend="eager", fullgraph=True)
    nothing_of_ours(monkeypatch)
    half = torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast")
    with torch.set_grad_enabled(why != "no gradients"), half:
        assert torch.isfinite(loss_of(model))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own tracing is
def test_transformed_functions_run_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_of_ours(monkeypatch)
    norm, x = RMSNorm(6, eps=1e-5), torch.randn(4, 6)
    sum_of = torch.func.grad(lambda x: norm(x).square().sum())
    assert torch.isfinite(sum_of(x)).all()
    assert torch.func.vmap(norm)(x).shape == (4, 6)
    with torch.autograd.forward_ad.dual_level():
        assert norm(torch.autograd.forward_ad.make_dual(x, x)).shape == (4, 6)
    traced = torch.jit.trace(norm, x)
    assert torch.allclose(traced(x), norm.weight * x / (x.square().mean(-1, True) + 1e-5).sqrt())


def test_what_is_stored_with_another_sign_is_read_rightly() -> None:
    norm, x = RMSNorm(6, eps=1e-5), torch.randn(4, 6)
    negative = torch._neg_view(x)
    assert torch.allclose(norm(negative), norm(-x), atol=1e-6)


def test_second_derivatives_are_refused_and_not_wrong(kernels: Kernels) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    for y in (
        RMSNorm(8, eps=1e-5)(x).sum(),
        gradients.square_relu(kernels, x).sum(),
        gradients.add_dropped(kernels, None, x, 0.5).sum(),
        causal_attention(kernels, *[x.view(1, 3, 2, 4)] * 3, 0.5).sum(),
    ):
        with pytest.raises(RuntimeError, match="no second derivatives; set ANTIPHON_NATIVE=off"):
            torch.autograd.grad(y, x, create_graph=True)


def test_no_token_at_all_has_no_gradient(kernels: Kernels) -> None:
    norm, conv = RMSNorm(24, eps=1e-5), ShortConv(CONFIG)
    norm(torch.zeros(0, 24)).sum().backward()
    conv(torch.zeros(0, 5, 24), torch.arange(5)).sum().backward()
    for weight in (norm.weight, conv.weight):
        assert weight.grad is not None
        assert torch.count_nonzero(weight.grad) == 0


def test_without_kernels_there_is_torch() -> None:
    native.use(None)
    y = loss_of(GPT(CONFIG))
    assert not ran(y)
    y.backward()
