"""The compiled kernels, held to float64 and to torch's own, and what happens without them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.deterministic import make_deterministic
from gpt.lora import LoRAConfig, adapt
from gpt.model import GPT, Block
from gpt.native import build as building
from gpt.native import kernels as native
from gpt.native import linear as products
from gpt.native import precision
from gpt.native.blocks import Steps
from gpt.native.build import build
from gpt.native.kernels import Kernels
from gpt.native.linear import RoutedLinear, Routes, route, speed_up
from gpt.plan import AttentionPlan, Chunk

NO_COMPILER = not any(shutil.which(name) for name in building.COMPILERS)
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler here")


@pytest.fixture(scope="module")
def library() -> Path:
    """Kept between runs in the user's cache, as the program itself keeps it."""
    return build()


@pytest.fixture(params=range(len(native.LEVELS)), ids=lambda level: native.LEVELS[level])
def kernels(request: pytest.FixtureRequest, library: Path) -> Iterator[Kernels]:
    found = Kernels(library, request.param)
    if found.level != request.param:
        pytest.skip("not on this processor")
    native.use(found)
    yield found
    native.use(None)


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    native.use(None)
    native._refused = None


def bound(dtype: torch.dtype) -> float:
    """Of the largest number: float32 sums are off by 1e-7; bf16 results are rounded to 2^-8."""
    return 2e-6 if dtype == torch.float32 else 2**-8


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


@needs_compiler
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(1, 1, 1), (1, 50, 768), (2, 7, 33), (3, 100, 17), (7, 19, 1600), (15, 64, 64), (33, 257, 96)],
)
def test_products_are_those_of_float64(
    kernels: Kernels, dtype: torch.dtype, M: int, N: int, K: int
) -> None:
    torch.manual_seed(M)
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((M, K), (N, K), (N,)))
    for b in (bias, None):
        exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
        assert error(kernels.linear(x, weight, b), exact) <= bound(dtype)


@needs_compiler
def test_products_keep_what_is_not_a_number(kernels: Kernels) -> None:
    x = torch.tensor([[1.0, torch.nan], [1.0, torch.inf], [1.0, 2.0]])
    for dtype in native.DTYPES:
        found = kernels.linear(x.to(dtype), torch.ones(1, 2, dtype=dtype))
        assert found[0].isnan().all()
        assert found[1].isinf().all()
        assert found[2] == 3


def model(dtype: torch.dtype, **options: Any) -> GPT:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 61, "block_size": 128, "n_layer": 2, "n_head": 4, "d_model": 64,
        "init_std": 0.2,
    }  # fmt: skip
    return GPT(GPTConfig(**{**settings, **options})).eval().to(dtype)


@torch.inference_mode()
def decoded(gpt: GPT, lengths: list[int], *, fixed: bool = False, last: int = 1) -> Tensor:
    """Logits of the last tokens of texts of these lengths, side by side in pages that are not."""
    page, order = 4, torch.randperm(600, generator=torch.Generator().manual_seed(1)).tolist()
    cache = KVCache(gpt.config, 601, page, dtype=gpt.dtype)
    groups = len(cache.spec.groups)
    tables, taken = [], 0
    for n in lengths:
        own = [1 + page for page in order[taken : taken + -(-n // page)]]
        tables.append([own] * groups)
        taken += len(own)
    texts = torch.randint(
        61, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(2)
    )

    def run(chunks: list[Chunk]) -> Tensor:
        ids = [texts[i, c.start : c.end] for i, c in zip(at, chunks, strict=True)]
        plan = AttentionPlan.paged(
            chunks, page_size=page, pattern=cache.spec.patterns, fixed=fixed,
            in_place=cache.read_in_place and not fixed,
        )  # fmt: skip
        return gpt(torch.cat(ids), plan, cache)

    at = [i for i, n in enumerate(lengths) if n > last]
    if at:
        run([Chunk(0, lengths[i] - last, tables[i]) for i in at])
    at = list(range(len(lengths)))
    return run([Chunk(n - last, last, tables[i]) for i, n in enumerate(lengths)])


SHAPES: list[dict[str, Any]] = [
    {},
    {"n_kv_head": 2, "position": "rotary"},
    {"n_kv_head": 1, "pattern": "window:10"},
    {"pattern": ["window:9+sinks:3", "causal"], "position": "rotary"},
    {"pattern": "dilated:5:3", "position": "none"},
    {"position": "alibi"},
    {"position": "relative", "relative_distance": 12},
    {"head_dim": 20, "attn_softcap": 1.5},
]


@needs_compiler
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_attention_over_pages_is_that_of_torch(
    kernels: Kernels, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of texts of different lengths; the torch path is held to float64 elsewhere."""
    calls: list[int] = []
    whole = Kernels.attend

    def counted(self: Kernels, *args: Any) -> None:
        calls.extend([1] if args[4].t == 1 else [])
        whole(self, *args)

    monkeypatch.setattr(Kernels, "attend", counted)
    lengths = [1, 4, 5, 30, 17, 64, 3]
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        gpt = model(dtype, **options)
        native.use(kernels)
        found = decoded(gpt, lengths)
        assert len(calls) == 2, "each layer, all texts together"
        calls.clear()
        native.use(None)
        exact = decoded(gpt.double(), lengths)
        assert not calls
        assert error(found, exact) <= limit


@needs_compiler
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_a_short_chunk_reads_its_keys_where_they_lie(
    kernels: Kernels, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several queries of a text at once, in company and over the border of a page."""
    met: list[tuple[int, int]] = []
    whole = Kernels.attend

    def noted(self: Kernels, *args: Any) -> None:
        met.extend([(args[4].b, args[4].t)] if args[4].t == 5 else [])
        whole(self, *args)

    monkeypatch.setattr(Kernels, "attend", noted)
    lengths = [30, 17, 64, 30]
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        gpt = model(dtype, **options)
        native.use(kernels)
        found = decoded(gpt, lengths, last=5)
        assert met == [(2, 5), (1, 5), (1, 5)] * 2, "those that stand alike go together"
        met.clear()
        native.use(None)
        exact = decoded(gpt.double(), lengths, last=5)
        assert error(found, exact) <= limit


@needs_compiler
def test_what_others_left_in_a_page_does_not_matter(library: Path) -> None:
    """NaN behind a text's end and before its window."""
    gpt = model(torch.float32, pattern="window:6")
    native.use(Kernels(library))
    cache = KVCache(gpt.config, 8, 4)
    clean = KVCache(gpt.config, 8, 4)
    for layer in range(2):
        cache.layer(layer).keys.fill_(torch.nan)
        cache.layer(layer).values.fill_(torch.nan)
    ids = torch.randint(61, (14,))
    with torch.inference_mode():
        for start, length in ((0, 9), *((i, 1) for i in range(9, 14))):
            found = []
            for each in (cache, clean):
                plan = AttentionPlan.paged(
                    [Chunk(start, length, [[3, 5, 2, 7]])], page_size=4, pattern=gpt.pattern,
                    in_place=True,
                )  # fmt: skip
                found.append(gpt(ids[start : start + length], plan, each))
            assert torch.equal(*found)


@needs_compiler
def test_a_model_takes_the_ways_that_were_measured(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels(library)
    native.use(kernels)
    asked: list[int] = []
    own = Kernels.linear

    def counted(self: Kernels, x: Tensor, *rest: Any) -> Tensor:
        asked.append(x.numel() // x.shape[-1])
        return own(self, x, *rest)

    monkeypatch.setattr(Kernels, "linear", counted)
    for dtype, wide in ((torch.float32, False), (torch.bfloat16, True)):
        gpt = model(dtype)
        ids = torch.randint(61, (1, 9))
        with torch.inference_mode():
            before = gpt(ids)
            route(gpt, Routes(kernels, 8, wide))
            assert isinstance(gpt.head, RoutedLinear)
            assert gpt.head.weight is gpt.embed.weight
            assert error(gpt(ids), before.double()) < 0.03
            assert not asked, "nine rows are beyond"
            gpt(ids[:, :8])
            assert set(asked) == {8}
        asked.clear()
        gpt(ids[:, :8]).sum().backward()
        assert not asked, "they have no gradients"


@needs_compiler
def test_the_measurement_ends_and_small_models_are_left_alone(library: Path) -> None:
    native.use(Kernels(library))
    assert speed_up(model(torch.float32)) is None
    for dtype in native.DTYPES:
        routes = products.measure(Kernels(library), dtype)
        assert 0 <= routes.own_until <= max(products.ROWS)
    assert set(precision.measure(0.01)) == {1, 16}


def test_a_slow_moment_is_not_taken_for_a_slow_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else had the processor while ours were tried for the first times, the model would
    be served by torch's for as long as the process lives."""
    now, calls = 0.0, 0

    def own(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        nonlocal now, calls
        calls += 1
        late = calls <= 50
        now += 5.0 if late else 1.0 if len(x) <= 16 else 4.0
        return x

    def theirs(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        nonlocal now
        now += 3.0
        return x

    monkeypatch.setattr(products.time, "perf_counter", lambda: now)
    monkeypatch.setattr(products.F, "linear", theirs)
    fake = SimpleNamespace(linear=own)
    assert products.measure(cast(Kernels, fake), torch.float32).own_until == 16


@needs_compiler
def test_determinism_keeps_to_torch(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.use(Kernels(library))
    monkeypatch.delattr(Kernels, "attend")
    monkeypatch.delattr(Kernels, "linear")
    make_deterministic(model(torch.float32))


def test_the_flag_says_which_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, large = torch.device("cpu"), 10**9

    def measured(fast: float) -> torch.dtype:
        monkeypatch.setattr(precision, "measure", lambda: {1: fast, 16: 1.0})
        return precision.resolve("auto", large, cpu)[0]

    assert measured(1.9) == torch.bfloat16
    assert measured(1.1) == torch.float32
    assert precision.resolve("float64", large, cpu)[0] == torch.float64
    monkeypatch.setattr(precision, "measure", lambda: pytest.fail("measured"))
    assert precision.resolve("auto", large, cpu, exact=True)[0] == torch.float32
    assert precision.resolve("auto", 1000, cpu)[0] == torch.float32


@needs_compiler
def test_what_bf16_weights_cost(library: Path) -> None:
    """The bound that docs/performance.md states: mean KL below 1e-3 nats, at most one in sixty of
    the likeliest tokens another. Of random weights, whose distributions are as flat as any."""
    kernels = Kernels(library)
    native.use(kernels)
    exact, half = (model(dtype, n_layer=4) for dtype in native.DTYPES)
    route(half, Routes(kernels, 64, wide=True))
    lengths = list(range(1, 65))
    log_p, log_q = (decoded(gpt, lengths).double().log_softmax(-1) for gpt in (exact, half))
    assert float((log_p.exp() * (log_p - log_q)).sum(-1).mean()) < 1e-3
    changed = (log_p.argmax(-1) != log_q.argmax(-1)).sum()
    assert changed <= 1


# Blocks in few calls


KINDS: list[dict[str, Any]] = [
    {"norm": "layernorm", "mlp": "gelu", "bias": True, "position": "learned", "qk_norm": False},
    {"mlp": "swiglu", "position": "rotary", "n_kv_head": 2, "qk_norm": True, "head_dim": 12},
    {
        "mlp": "relu2",
        "residual_scale": 0.7,
        "pattern": "window:6",
        "d_model": 56,
        "position": "rotary",
        "rope_layout": "interleaved",
        "rope_dims": 6,
    },
    {"norm": "layernorm", "mlp": "swiglu", "bias": False, "value_embeddings": True, "d_ff": 37},
]


@needs_compiler
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("lengths", [[9], [3, 17, 1], list(range(1, 14))], ids=len)
def test_blocks_in_few_calls_are_those_of_torch(
    kernels: Kernels, options: dict[str, Any], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of different lengths; the torch path is held to float64 elsewhere."""
    calls: list[int] = []
    whole = Steps.leave

    def counted(self: Steps, y: Tensor, x: Tensor) -> Tensor:
        calls.append(len(x))
        return whole(self, y, x)

    monkeypatch.setattr(Steps, "leave", counted)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.04)):
        gpt = model(dtype, **options)
        with torch.no_grad():
            for p in gpt.parameters():
                if p.ndim == 1:  # scales and shifts that are not 1 and 0
                    p.add_(0.3 * torch.randn(p.shape).to(dtype), alpha=1.0)
        exact = copy.deepcopy(gpt).double()
        route(gpt, Routes(kernels, 16, wide=False))
        found = decoded(gpt, lengths)
        assert calls[-2:] == [len(lengths)] * 2, "each layer, all texts together"
        calls.clear()
        native.use(None)
        assert error(found, decoded(exact, lengths)) <= limit
        native.use(kernels)


@needs_compiler
@pytest.mark.parametrize(
    "options",
    [{"conv_width": 3}, {"x0_scalars": True}, {"residual_scalars": True}, {"norm_place": "post"},
     {"mlp": "gelu-exact"}],
    ids=str,
)  # fmt: skip
def test_a_block_with_something_else_in_it_stays_as_it_is(
    library: Path, options: dict[str, Any]
) -> None:
    gpt, ids = model(torch.float32, **options), torch.randint(61, (1, 9))
    native.use(Kernels(library))
    with torch.inference_mode():
        before = gpt(ids)
        route(gpt, Routes(Kernels(library), 16, wide=False))
        assert {type(block) for block in gpt.blocks} == {Block}
        assert error(gpt(ids), before.double()) < 1e-5


@needs_compiler
def test_a_block_with_adapters_stays_as_it_is(library: Path) -> None:
    """Adapted layers are linear layers, but not only that."""
    gpt = model(torch.float32)
    adapt(gpt, LoRAConfig(rank=2, matrices=("mlp.up",)))
    native.use(Kernels(library))
    route(gpt, Routes(Kernels(library), 16, wide=False))
    assert {type(block) for block in gpt.blocks} == {Block}


@needs_compiler
def test_a_bend_keeps_what_is_not_a_number(kernels: Kernels) -> None:
    """As torch does: an overflow below zero is nothing to ReLU^2, and NaN stays NaN."""
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[-inf, 1.0, 2.0, -3.0], [inf, 1.0, 2.0, 3.0], [nan, 1.0, 2.0, 3.0]])
    for before, expected in (("relu2", 5.0), ("gelu", None)):  # of -inf and the rest; None: NaN
        for dtype in native.DTYPES:
            weight, y = torch.ones(1, 4, dtype=dtype), torch.empty(3, 1, dtype=dtype)
            step = native.prepared(weight, before=before)
            kernels.chain((native.Product * 1)(step), x.to(dtype), y)
            assert y[0].isnan() if expected is None else y[0] == expected
            assert y[1].isposinf()
            assert y[2].isnan()


@needs_compiler
def test_many_rows_training_and_autocast_go_the_ways_of_torch(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels(library)
    native.use(kernels)
    gpt = model(torch.float32, dropout=0.5)
    route(gpt, Routes(kernels, 16, wide=False))
    chains: list[int] = []
    whole = Kernels.chain

    def counted(self: Kernels, products: Any, x: Tensor, *rest: Any) -> None:
        chains.append(len(products))
        whole(self, products, x, *rest)

    monkeypatch.setattr(Kernels, "chain", counted)
    ids = torch.randint(61, (1, 16))
    with torch.no_grad():
        exact = gpt(ids)
        assert chains == [1, 3, 1, 3, 1]
        chains.clear()
        gpt(torch.cat([ids, ids]))
        assert not chains, "32 rows are too many"
        with torch.autocast("cpu", torch.bfloat16):
            assert gpt(ids).dtype == torch.bfloat16
        assert not chains
        gpt.train()
        assert error(gpt(ids), exact.double()) > 0.1, "with dropout"
        assert 3 not in chains


@needs_compiler
@pytest.mark.parametrize("change", ["adapter", "matrix", "norm", "bias", "q_norm"])
def test_what_is_put_in_another_place_later_is_heeded(library: Path, change: str) -> None:
    kernels = Kernels(library)
    native.use(kernels)
    gpt = model(torch.float32, bias=True)
    route(gpt, Routes(kernels, 16, wide=False))
    ids = torch.randint(61, (1, 9))
    block = cast(Any, gpt.blocks[0])
    with torch.no_grad():
        before = gpt(ids)
        if change == "adapter":
            adapt(gpt, LoRAConfig(rank=2, matrices=("mlp.up",)))
            for name, p in gpt.named_parameters():
                if name.endswith(".b"):
                    p.fill_(0.3)
        elif change == "matrix":
            block.mlp.up = torch.nn.Linear(64, 256)
        elif change == "norm":
            block.norm_attn.weight = torch.nn.Parameter(torch.full((64,), 3.0))
        elif change == "bias":
            block.attn.out.bias.data = torch.full((64,), 3.0)
        else:
            block.attn.q_norm.weight.data = torch.full((16,), 3.0)
        found = gpt(ids)
        native.use(None)
        exact = copy.deepcopy(gpt).double()
        for each in exact.blocks:
            each.__class__ = Block
        expected = exact(ids)
    assert error(found, expected) < 1e-5
    assert error(before, expected) > 1e-2
    assert block.steps is None, "what it kept is let go"
    if change != "adapter":
        native.use(kernels)
        route(gpt, Routes(kernels, 16, wide=False))
        assert block.steps is not None, "and it can be had again"
        with torch.no_grad():
            assert error(gpt(ids), expected) < 1e-5


@needs_compiler
def test_who_looks_on_or_changes_weights_is_heeded(library: Path) -> None:
    kernels = Kernels(library)
    native.use(kernels)
    gpt = model(torch.float32)
    route(gpt, Routes(kernels, 16, wide=False))
    first = decoded(gpt, [5, 9])

    other = copy.deepcopy(gpt)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    fresh = model(torch.float32)
    fresh.load_state_dict(other.state_dict())
    assert error(decoded(other, [5, 9]), decoded(fresh, [5, 9]).double()) < 1e-5
    assert torch.equal(decoded(gpt, [5, 9]), first)

    seen: list[Tensor] = []
    block = cast(Block, gpt.blocks[0])
    handle = block.mlp.register_forward_hook(lambda *given: seen.append(given[2]))
    assert error(decoded(gpt, [5, 9]), first.double()) < 1e-5
    assert seen
    handle.remove()

    gpt.load_state_dict(other.state_dict())  # in place
    assert error(decoded(gpt, [5, 9]), decoded(fresh, [5, 9]).double()) < 1e-5
    ids = torch.randint(61, (1, 9))
    gpt.to(torch.bfloat16)
    assert error(decoded(gpt, [5, 9]), decoded(fresh, [5, 9]).double()) < 0.04
    with torch.inference_mode():
        assert error(gpt.double()(ids), fresh.double()(ids)) < 0.04, "no kernels for float64"
    gpt.train()
    gpt.float()(torch.zeros(1, 5, dtype=torch.int64)).sum().backward()
    assert gpt.embed.weight.grad is not None
