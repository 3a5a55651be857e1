"""Pages, sequences and plans: the host's half of a step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt.cache import KVCache
from gpt.cachespec import CacheSpec
from gpt.config import GPTConfig
from gpt.errors import PromptError
from gpt.pages import CachePages, most_pages, pages_for
from gpt.params import SamplingParams
from gpt.patterns import Causal, Memory, SlidingWindow, parse_pattern, parse_patterns
from gpt.plan import AttentionPlan, Chunk
from gpt.pool import NULL_PAGE, PageAllocator
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


MEMORIES = [Memory(), Memory(1), Memory(5), Memory(4, 1), Memory(7, 9), Memory(100)]


@given(
    st.lists(st.sampled_from(MEMORIES), min_size=1, max_size=3, unique=True),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(1, 9), max_size=12),
)
def test_a_table_keeps_what_will_be_read_and_no_more_than_announced(
    memories: list[Memory], page_size: int, chunks: list[int]
) -> None:
    """Entries stay where they are; those behind the window become the null page."""
    pages = CachePages(memories, 120, page_size)
    text = Sequence([1] * (sum(chunks) + 1), SamplingParams(seed=0), 1000)
    known: dict[tuple[int, int], int] = {}
    for n in chunks:
        pages.release_behind(text)
        lacking = pages.lacking(text, text.computed + n, n)
        before = [pool.used for pool in pages.pools]
        assert pages.grow(text, text.computed + n)
        for g, (memory, table) in enumerate(zip(memories, text.tables, strict=True)):
            held = len(table) - table.count(NULL_PAGE)
            most = most_pages(memory, sum(chunks), max(chunks), page_size)
            assert held == pages.pools[g].used <= most
            assert held - before[g] <= lacking[g] <= max(0, most - before[g])
            for position in range(text.computed + n):
                i = position // page_size
                if position < memory.sinks or position >= memory.first(text.computed):
                    assert table[i] != NULL_PAGE
                assert table[i] in (NULL_PAGE, known.setdefault((g, i), table[i]))
        text.computed += n
        pages.check_integrity([text])
    pages.release(text)
    assert pages.used == 0
    assert text.tables == []


def test_pages_behind_a_window_go_and_those_of_the_sinks_stay() -> None:
    """The picture in `gpt.pages`."""
    pages = CachePages([Memory(5, 1), Memory()], 8, 4)
    text = Sequence([1] * 22, SamplingParams(seed=0), 23)
    while text.computed < 21:
        pages.release_behind(text)
        assert pages.grow(text, text.computed + 1)
        text.computed += 1
    pages.release_behind(text)
    window, full = text.tables
    assert [page != NULL_PAGE for page in window] == [True, False, False, False, True, True]
    assert NULL_PAGE not in full
    assert [pool.used for pool in pages.pools] == [3, 6]


def test_growing_takes_from_every_group_or_from_none() -> None:
    pages = CachePages([Memory(), Memory(4)], [3, 9], 4)
    text = Sequence([1] * 20, SamplingParams(seed=0), 21)
    assert pages.grow(text, 8)
    assert not pages.grow(text, 9)
    assert pages.free == [0, 6]
    with pytest.raises(AssertionError, match="no pages"):
        pages.check_integrity([text, Sequence([1], SamplingParams(seed=0), 2, computed=1)])
    text.computed = 8
    pages.pools[1].release(text.tables[1][1:])
    text.tables[1][1] = NULL_PAGE
    with pytest.raises(AssertionError, match="still needed"):
        pages.check_integrity([text])


def test_layers_that_remember_the_same_share_a_group() -> None:
    config = GPTConfig(
        vocab_size=4, n_layer=5, d_model=16,
        pattern=["window:7", "dilated:3:3", "causal", "fixed:4:1"],
    )  # fmt: skip
    spec = CacheSpec.of(config)
    assert [(group.memory, group.layers) for group in spec.groups] == [
        (Memory(7), (0, 1, 4)), (Memory(), (2, 3)),
    ]  # fmt: skip
    assert [spec.group_of(layer) for layer in range(5)] == [0, 0, 1, 1, 0]
    assert not spec.endless
    assert CacheSpec.of(config.replace(pattern=["window:7", "dilated:3:3"])).endless
    learned = config.replace(pattern="window:7", position="learned")
    assert not CacheSpec.of(learned).endless


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


def test_a_text_goes_past_the_context_only_where_it_can_and_was_told_to() -> None:
    def begin(prompt: int, endless: bool, max_tokens: int | None) -> int:
        params = SamplingParams(seed=0, max_tokens=max_tokens)
        return Sequence.start(
            [1] * prompt, params, block_size=8, n_vocab=10, eot=9, endless=endless
        ).max_total

    assert begin(2, True, 100) == 102
    assert begin(20, True, 3) == 23
    assert begin(2, True, None) == 9
    assert begin(2, False, 100) == 9
    with pytest.raises(PromptError, match="shorten it by at least 12, or set max_tokens"):
        begin(20, True, None)
    with pytest.raises(PromptError, match=r"shorten it by at least 12$"):
        begin(20, False, 3)


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


def test_the_pages_read_are_those_that_can_be_seen() -> None:
    """A window's chunk reads window and chunk, wherever it is; a decode the window alone."""
    for start in (1000, 50_000):
        (chunk,) = paged([(start, 512)], SlidingWindow(256), 16).layer(0).groups
        assert chunk.s == 256 + 512 - 1
        assert chunk.k_pos.tolist() == [list(range(start - 255, start + 512))]
        (decode,) = paged([(start, 1)], SlidingWindow(256), 16).layer(0).groups
        assert (decode.s, decode.mask) == (256, None)
        (sinks,) = paged([(start, 1)], SlidingWindow(256, sinks=4), 16).layer(0).groups
        assert sinks.s <= 16 + 17 * 16
        assert sinks.mask is not None
        seen = sinks.k_pos[sinks.mask[:, 0, 0]].tolist()
        assert seen == [0, 1, 2, 3, *range(start - 255, start + 1)]
    # Within the window, and when it starts to be full, a prompt is plain causal.
    assert paged([(0, 256)], SlidingWindow(256)).layer(0).groups[0].causal
    assert not paged([(0, 257)], SlidingWindow(256)).layer(0).groups[0].causal


def test_decodes_past_their_window_share_a_group_however_long_they_are() -> None:
    shapes = [(300, 1), (1007, 1), (1008, 1), (5555, 1), (40_000, 1)]
    for pattern in (SlidingWindow(64), SlidingWindow(64, sinks=2), parse_pattern("dilated:16:4")):
        (group,) = paged(shapes, pattern, 16).layer(0).groups
        assert group.b == 5
        assert group.s <= 16 * 6
        assert group.mask is not None
        wanted = [[k for k in range(p + 1) if pattern.allowed(torch.tensor(p), torch.tensor(k))]
                  for p, _ in shapes[:3]]  # fmt: skip
        for i, keys in enumerate(wanted):
            assert group.k_pos[i][group.mask[i, 0, 0]].tolist() == keys


def test_kinds_of_one_memory_share_slots_and_tables() -> None:
    patterns = parse_patterns(["window:7", "dilated:3:3", "causal"])
    table = [5, 2, 9, 4]
    plan = AttentionPlan.paged(
        [Chunk(13, 1, [[NULL_PAGE, 3, 1, 6], table])], page_size=4, pattern=patterns
    )
    window, dilated, full = plan.kinds
    assert window.slots is dilated.slots
    assert window.slots is not None
    assert full.slots is not None
    assert (window.slots.tolist(), full.slots.tolist()) == ([6 * 4 + 1], [4 * 4 + 1])
    assert window.groups[0].pages is dilated.groups[0].pages
    assert window.groups[0].pages is not None
    assert window.groups[0].pages.tolist() == [[3, 1, 6]]
    assert full.groups[0].pages is not None
    assert full.groups[0].pages.tolist() == [table]


def test_a_page_that_is_begun_and_not_filled_is_zeroed_first() -> None:
    def begun(start: int, n: int) -> list[int]:
        plan = AttentionPlan.paged([Chunk(start, n, [[7, 8, 9]])], page_size=4, pattern=Causal())
        pages = plan.layer(0).begun
        return [] if pages is None else pages.tolist()

    assert [begun(*shape) for shape in [(0, 3), (0, 4), (0, 9), (4, 1), (5, 1), (2, 5)]] == [
        [7], [], [9], [8], [], [8],
    ]  # fmt: skip


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


def test_a_state_s_pool_has_as_many_pages_as_the_largest_other() -> None:
    """So a prompt whose keys are still to be found finds the state, too; its pages are small."""
    config = GPTConfig(
        vocab_size=9, block_size=256, n_layer=2, n_head=2, d_model=8, conv_width=4,
        pattern=["window:20", "causal"],
    )  # fmt: skip
    spec = CacheSpec.of(config)
    assert spec.memories == (Memory(20), Memory(), Memory(4))
    assert spec.page_bytes(16, 4) == [2 * 8 * 16 * 4] * 2 + [2 * 2 * 8 * 3 * 4]
    options = {"page_size": 16, "itemsize": 4, "texts": 5, "chunk": 32}
    window, full, state = spec.pool_sizes(256, **options, budget=math.inf)
    assert full == state == 1 + 5 * 16 > window
    fewer = spec.pool_sizes(256, **options, budget=60_000)
    assert fewer[1] == fewer[2] < full
    assert sum(a * b for a, b in zip(fewer, spec.page_bytes(16, 4), strict=True)) <= 60_000
    assert CacheSpec.of(config.replace(pattern="window:20")).endless
