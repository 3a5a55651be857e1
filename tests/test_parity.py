"""The contract: however tokens are cut into chunks and whoever shares the batch, the logits are
those of one full forward; and those are the reference's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.cache import KVCache
from gpt.cachespec import CacheSpec
from gpt.config import GPTConfig, Position
from gpt.model import GPT
from gpt.pages import CachePages, most_pages, pages_for
from gpt.params import SamplingParams
from gpt.plan import AttentionPlan, Chunk
from gpt.pool import NULL_PAGE
from gpt.sequence import Sequence
from tests import reference
from tests.strategies import BLOCK_SIZE, build, configs, cuts, poison

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def assert_close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


@torch.inference_mode()
def run_cut(
    model: GPT,
    texts: list[list[int]],
    ways: list[list[int]],
    page_size: int,
    order: np.random.Generator,
) -> list[Tensor]:
    """Run each text in its own chunks, all side by side, over pages in random order. Sequences
    begin, wait, are preempted and end at different steps. Whatever nobody holds, among it the pages
    that fell behind a window, is full of NaN at every step."""
    spec = CacheSpec.of(model.config)
    n_pages = 1 + len(texts) * pages_for(max(map(len, texts)), page_size)
    cache = KVCache(model.config, n_pages, page_size, dtype=model.dtype)
    pages = CachePages(spec.memories, n_pages, page_size)
    sequences = [Sequence(text, SamplingParams(seed=0), len(text) + 1) for text in texts]
    rest = [list(way) for way in ways]
    logits: list[list[Tensor]] = [[] for _ in texts]
    preemptions = 2
    while any(rest):
        waiting = [i for i in range(len(texts)) if rest[i]]
        order.shuffle(waiting)
        if preemptions and order.random() < 0.1:
            preemptions -= 1
            victim = waiting[0]
            pages.release(sequences[victim])
            sequences[victim].computed = 0
            rest[victim], logits[victim] = list(ways[victim]), []
        # At least one runs, perhaps not all.
        active = waiting[: int(order.integers(1, len(waiting) + 1))]
        chunks, ids = [], []
        for i in active:
            n, sequence = rest[i].pop(0), sequences[i]
            pages.release_behind(sequence)
            for pool in pages.pools:
                order.shuffle(pool._blank)
            assert pages.grow(sequence, sequence.computed + n)
            held = [len(table) - table.count(NULL_PAGE) for table in sequence.tables]
            most = [most_pages(m, len(texts[i]), n, page_size) for m in spec.memories]
            assert all(a <= b for a, b in zip(held, most, strict=True))
            chunks.append(Chunk(sequence.computed, n, sequence.tables))
            ids += texts[i][sequence.computed : sequence.computed + n]
        poison(cache, pages)
        plan = AttentionPlan.paged(
            chunks, page_size=page_size, pattern=model.pattern, conv_width=spec.conv_width
        )
        out = model(torch.tensor(ids), plan, cache)
        for i, part in zip(active, out.split([chunk.length for chunk in chunks]), strict=True):
            logits[i].append(part)
            sequences[i].computed += part.shape[0]
            if not rest[i]:  # its pages go to others at once
                pages.release(sequences[i])
                sequences[i].computed = 0
        pages.check_integrity(sequences)
    assert pages.used == 0
    return [torch.cat(parts) for parts in logits]


@st.composite
def batches(draw: st.DrawFn) -> tuple[GPTConfig, list[list[int]], list[list[int]], int, int]:
    config = draw(configs())
    lengths = draw(
        st.lists(
            st.sampled_from([1, 2, 5, 7, 16, BLOCK_SIZE - 1, BLOCK_SIZE]), min_size=1, max_size=5
        )
    )
    token = st.integers(0, config.vocab_size - 1)
    texts = [draw(st.lists(token, min_size=n, max_size=n)) for n in lengths]
    ways = [draw(cuts(n)) for n in lengths]
    return config, texts, ways, draw(st.sampled_from([1, 4, 16])), draw(st.integers(0, 1000))


@settings(deadline=None, max_examples=150)
@given(batches())
def test_any_cut_in_any_company_gives_the_full_forward_float64(batch: tuple) -> None:
    config, texts, ways, page_size, seed = batch
    model = build(config, seed)
    found = run_cut(model, texts, ways, page_size, np.random.default_rng(seed))
    for text, logits in zip(texts, found, strict=True):
        assert_close(logits, model(torch.tensor([text]))[0], torch.float64)


@settings(deadline=None, max_examples=75)
@given(batches())
def test_any_cut_in_any_company_gives_the_full_forward_float32(batch: tuple) -> None:
    config, texts, ways, page_size, seed = batch
    # float32 is about rounding, so the weights are those of an ordinary start, not of a stress
    # test.
    model = build(config.replace(init_std=0.1), seed, torch.float32)
    found = run_cut(model, texts, ways, page_size, np.random.default_rng(seed))
    for text, logits in zip(texts, found, strict=True):
        assert_close(logits, model(torch.tensor([text]))[0], torch.float32)


@settings(deadline=None, max_examples=60)
@given(configs(), st.data())
def test_logits_are_those_of_the_reference(config: GPTConfig, data: st.DataObject) -> None:
    model = build(config)
    ids = data.draw(
        st.lists(st.integers(0, config.vocab_size - 1), min_size=1, max_size=BLOCK_SIZE)
    )
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    with torch.inference_mode():
        found = model(torch.tensor([ids]))[0]
    assert_close(found, torch.from_numpy(reference.gpt(config, state, ids)), torch.float64)


@pytest.mark.parametrize(
    "position", ["none", "learned", "sinusoidal", "relative", "rotary", "alibi"]
)
def test_bfloat16_stays_near_float32(position: Position) -> None:
    """In bf16 the mean KL from the float32 model and the rate of other argmaxes stay bounded,
    cached and uncached alike. Bounds: KL 2e-3 nats, 5 % of argmaxes, at logits of unit scale."""
    config = GPTConfig(
        vocab_size=64, block_size=64, n_layer=3, d_model=64, n_head=4, n_kv_head=2,
        position=position,
    )  # fmt: skip
    exact = build(config.replace(init_std=0.1), 1, torch.float32)
    rounded = build(config.replace(init_std=0.1), 1, torch.float32).to(torch.bfloat16)
    texts = torch.randint(0, 64, (8, 64), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        wanted = exact(torch.tensor(texts)).log_softmax(-1)
        full = rounded(torch.tensor(texts)).float().log_softmax(-1)
    cut = run_cut(rounded, texts, [[40, *[1] * 24]] * 8, 16, np.random.default_rng(0))
    for found in (full, torch.stack(cut).float().log_softmax(-1)):
        kl = (wanted.exp() * (wanted - found)).sum(-1)
        assert kl.mean() < 2e-3
        assert (wanted.argmax(-1) != found.argmax(-1)).float().mean() < 0.05


def test_one_token_decode_honours_the_window() -> None:
    """T6: window 4, 16 tokens one at a time."""
    config = GPTConfig(
        vocab_size=32, block_size=16, n_layer=2, d_model=16, pattern="window:4", init_std=0.4
    )
    model = build(config)
    text = list(range(16))
    (found,) = run_cut(model, [text], [[1] * 16], 4, np.random.default_rng(0))
    assert_close(found, model(torch.tensor([text]))[0], torch.float64)
    wide = build(config.replace(pattern="causal"))
    assert (model(torch.tensor([text])) - wide(torch.tensor([text]))).abs().max() > 1e-3


@pytest.mark.parametrize("page_size", [1, 4])
def test_texts_past_their_windows_decode_together(page_size: int) -> None:
    """One group, whose members read the sinks and one or another number of pages after them."""
    config = GPTConfig(
        vocab_size=32, block_size=24, n_layer=2, d_model=16, init_std=0.4,
        pattern=["window:6+sinks:3", "causal"],
    )  # fmt: skip
    model = build(config)
    order = np.random.default_rng(0)
    texts = [order.integers(0, 32, n).tolist() for n in (24, 23, 22, 21, 20, 19)]
    ways = [[8, *[1] * (len(text) - 8)] for text in texts]
    for text, found in zip(texts, run_cut(model, texts, ways, page_size, order), strict=True):
        assert_close(found, model(torch.tensor([text]))[0], torch.float64)


@pytest.mark.parametrize("length", [1, 5, BLOCK_SIZE])
def test_cached_logits_equal_uncached_ones_at_every_step(length: int) -> None:
    """T5: prompts of 1, 5 and block_size tokens."""
    config = GPTConfig(vocab_size=32, block_size=BLOCK_SIZE, n_layer=2, d_model=16, init_std=0.4)
    model = build(config)
    text = list(np.random.default_rng(length).integers(0, 32, BLOCK_SIZE))
    ways = [[length, *[1] * (BLOCK_SIZE - length)]]
    (found,) = run_cut(model, [text], ways, 16, np.random.default_rng(0))
    with torch.inference_mode():
        for end in range(length, BLOCK_SIZE + 1):
            assert_close(found[:end], model(torch.tensor([text[:end]]))[0], torch.float64)
