"""Pages, sequences and plans: the host's half of a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.errors import PromptError
from gpt.pages import NULL_PAGE, PageAllocator, pages_for
from gpt.params import SamplingParams
from gpt.patterns import Causal, SlidingWindow
from gpt.plan import AttentionPlan, Chunk
from gpt.sequence import Sequence


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60))
def test_pages_are_owned_once_and_all_come_back(moves: list[tuple[bool, int]]) -> None:
    pool = PageAllocator(10, 4)
    tables: list[list[int]] = []
    for take, n in moves:
        if take:
            pages = pool.allocate(n)
            assert (pages is None) == (n > 9 - sum(map(len, tables)))
            if pages is not None:
                assert NULL_PAGE not in pages
                tables.append(pages)
        elif tables:
            pool.release(tables.pop(n % len(tables)))
        pool.check_integrity(tables)
        assert pool.free + pool.used == pool.capacity == 9
    for table in tables:
        pool.release(table)
    assert pool.free == 9


def test_a_page_given_back_twice_or_leaked_is_caught() -> None:
    pool = PageAllocator(4, 4)
    pages = pool.allocate(2)
    assert pages is not None
    with pytest.raises(AssertionError, match="leaked"):
        pool.check_integrity([pages[:1]])
    with pytest.raises(AssertionError, match="two sequences"):
        pool.check_integrity([pages, pages[:1]])
    pool.release(pages)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(pages)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens, 16) == pages


def start(prompt: list[int], **changes: int) -> Sequence:
    params = SamplingParams(seed=0, **changes)  # type: ignore[arg-type]
    return Sequence.start(prompt, params, block_size=8, n_vocab=10, eot=9)


def test_a_sequence_ends_with_the_context_or_max_tokens() -> None:
    assert start([1, 2]).max_total == 9  # the ninth token is made from the eighth, needs no place
    assert start([1, 2]).max_cached == 8
    assert start([1, 2], max_tokens=3).max_total == 5
    assert start([1, 2], max_tokens=100).max_total == 9
    assert start([1] * 8).max_total == 9
    assert start([]).ids == [9]


def test_a_sequence_that_cannot_start_says_why() -> None:
    with pytest.raises(PromptError, match=r"9 tokens .* holds 8"):
        start([1] * 9)
    with pytest.raises(PromptError, match="token id 10 at place 1"):
        start([1, 10])
    with pytest.raises(PromptError, match="no end-of-text"):
        Sequence.start([], SamplingParams(), block_size=8, n_vocab=9, eot=None)


def paged(shapes: list[tuple[int, int]], pattern: object = None, size: int = 4) -> AttentionPlan:
    """A plan of (start, length) chunks over pages that lie side by side."""
    chunks, page = [], 1
    for start, n in shapes:
        need = pages_for(start + n, size)
        chunks.append(Chunk(start, n, [range(page, page + need)]))
        page += need
    return AttentionPlan.paged(chunks, page_size=size, pattern=pattern or Causal())


def test_each_token_is_in_one_group_and_one_slot() -> None:
    plan = paged([(0, 3), (7, 1), (2, 6), (5, 1), (100, 1)])
    rows = torch.cat([g.rows for g in plan.layer(0).groups if g.rows is not None])
    assert sorted(rows.tolist()) == list(range(12))
    assert plan.layer(0).slots is not None
    assert len(set(plan.layer(0).slots.tolist())) == 12
    assert plan.positions.tolist() == [0, 1, 2, 7, 2, 3, 4, 5, 6, 7, 5, 100]


def test_decodes_share_a_group_only_with_like_lengths() -> None:
    """One long context must not pad the short ones."""
    plan = paged([(7, 1), (5, 1), (6, 1), (1000, 1)])
    assert sorted((g.b, g.s) for g in plan.layer(0).groups) == [(1, 1001), (3, 8)]
    many = paged([(length, 1) for length in range(1, 2000, 3)])
    for group in many.layer(0).groups:
        assert group.mask is not None or group.b == 1
        if group.mask is not None and group.s > 32:
            assert group.mask.sum() >= 0.75 * group.mask.numel()


def test_the_fused_causal_route_is_kept_wherever_it_is_exact() -> None:
    (fresh,) = paged([(0, 6)]).layer(0).groups
    assert fresh.causal
    assert fresh.mask is None
    (several,) = paged([(0, 6), (0, 6)]).layer(0).groups
    assert (several.b, several.causal, several.rows) == (2, True, None)
    (later,) = paged([(3, 6)]).layer(0).groups
    # Aligned to the lower right: the fused triangle is wrong.
    assert not later.causal
    assert later.mask is not None
    assert later.mask[0, 0].sum(-1).tolist() == [4, 5, 6, 7, 8, 9]
    (decode,) = paged([(6, 1)]).layer(0).groups
    assert decode.mask is None
    (window,) = paged([(0, 6)], SlidingWindow(2)).layer(0).groups
    assert not window.causal
    assert window.mask is not None
    assert window.mask[0, 0].sum(-1).tolist() == [1, 2, 2, 2, 2, 2]


def test_a_lone_sequence_with_pages_side_by_side_is_read_without_a_copy() -> None:
    config = GPTConfig(vocab_size=4, n_layer=1)
    cache = KVCache(config, 8, 4)
    keys, _ = cache.layer(0).read(paged([(6, 1)]).layer(0).groups[0])
    assert keys.untyped_storage().data_ptr() == cache.layer(0).keys.untyped_storage().data_ptr()
    scattered = AttentionPlan.paged([Chunk(6, 1, [[3, 1]])], page_size=4, pattern=Causal())
    assert scattered.layer(0).groups[0].first_slot is None


def test_page_bytes_are_what_the_cache_takes() -> None:
    config = GPTConfig(vocab_size=4, n_layer=3, n_head=4, n_kv_head=2, d_model=32)
    cache = KVCache(config, 7, 16, dtype=torch.bfloat16)
    held = sum(
        t.untyped_storage().nbytes()
        for i in range(3)
        for t in (cache.layer(i).keys, cache.layer(i).values)
    )
    assert [each * 7 for each in KVCache.page_bytes(config, 16, torch.bfloat16)] == [held]
