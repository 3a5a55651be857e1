"""Pages that several hold, and pages that nobody holds and anybody may find."""

from __future__ import annotations

import pytest
import torch

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.pages import CachePages
from gpt.params import SamplingParams
from gpt.patterns import Memory
from gpt.pool import NULL_PAGE, PageAllocator
from gpt.prefix import PageKeys
from gpt.sequence import Sequence


def known(pool: PageAllocator, *keys: bytes) -> list[int]:
    """Pages that are held and can be found."""
    pages = pool.allocate(len(keys))
    assert pages is not None
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    return pages


def test_a_shared_page_is_free_again_when_the_last_holder_has_gone() -> None:
    pool = PageAllocator(4, 4)
    (page,) = known(pool, b"a")
    assert pool.find(b"a") == page
    pool.share([page])
    pool.check_integrity([[page], [page, NULL_PAGE]])
    pool.release([page])
    assert (pool.used, pool.free, pool.idle) == (1, 2, 0)
    pool.release([page])
    assert (pool.used, pool.free, pool.idle) == (0, 3, 1)
    assert pool.find(b"a") == page, "and it is still known"
    with pytest.raises(ValueError, match="not in use"):
        pool.release([page])
    pool.share([page])
    assert (pool.used, pool.free, pool.idle) == (1, 2, 0)
    pool.check_integrity([[page]])


def test_known_pages_go_only_when_needed_and_the_longest_unused_first() -> None:
    pool = PageAllocator(5, 4)
    first, second, third = known(pool, b"1", b"2", b"3")
    pool.release([second])
    pool.release([first, third])  # a text's last page goes first: without those before it is no use
    assert pool.allocate(1) not in ([first], [second], [third]), "there was a blank one"
    assert [pool.find(key) for key in (b"1", b"2", b"3")] == [first, second, third]
    assert pool.allocate(1) == [second]
    assert [pool.find(key) for key in (b"1", b"2", b"3")] == [first, None, third]
    pool.share([third])
    pool.release([third])  # used a moment ago
    assert pool.allocate(1) == [first]
    assert pool.allocate(1) == [third]
    assert pool.allocate(1) is None
    pool.check_integrity([[1, 2, 3, 4]])


def test_of_two_pages_with_the_same_contents_one_is_known() -> None:
    pool = PageAllocator(4, 4)
    first, second = known(pool, b"a", b"a")
    assert pool.find(b"a") == first
    pool.release([first, second])
    assert (pool.idle, len(pool.blank_pages)) == (1, 2)
    with pytest.raises(ValueError, match="not known"):
        pool.share([second])
    with pytest.raises(ValueError, match="not in use"):
        pool.publish(second, b"b")


def test_wrong_counts_and_keys_are_caught() -> None:
    pool = PageAllocator(4, 4)
    (page,) = known(pool, b"a")
    with pytest.raises(AssertionError, match="references"):
        pool.check_integrity([[page], [page]])
    pool.share([page])
    with pytest.raises(AssertionError, match="references"):
        pool.check_integrity([[page]])
    pool._page_of[b"b"] = page
    with pytest.raises(AssertionError, match="name each other"):
        pool.check_integrity([[page], [page]])


def test_a_page_is_known_by_its_text_and_all_before_it() -> None:
    keys = PageKeys(2).of([1, 2, 3, 4, 5])
    assert len(keys) == len(set(keys)) == 2, "the third is not full"
    growing = PageKeys(2)
    assert growing.of([1, 2]) == keys[:1]
    assert growing.of([1, 2, 3, 4]) == keys
    assert PageKeys(2).of([9, 2, 3, 4])[1] != keys[1]
    assert PageKeys(2).of([3, 4]) != keys[1:]
    assert PageKeys(4).of([1, 2, 3, 4]) != keys[1:]


def text(*ids: int) -> Sequence:
    return Sequence(list(ids), SamplingParams(seed=0), 1000)


def run(
    pages: CachePages, sequence: Sequence, n: int, *others: Sequence, publish: bool = True
) -> None:
    pages.release_behind(sequence)
    assert pages.grow(sequence, sequence.computed + n)
    sequence.computed += n
    if publish:
        pages.publish(sequence, n)
    pages.check_integrity([sequence, *others])


def test_a_hit_is_whole_pages_of_the_same_beginning() -> None:
    pages = CachePages([Memory()], 20, 4, prefix_cache=True)
    first = text(*range(14))
    run(pages, first, 14)
    assert pages.find(text(*range(14)), 13).tokens == 12
    assert pages.find(text(*range(14)), 11).tokens == 8
    assert pages.find(text(*range(7), 99, *range(8, 14)), 13).tokens == 4
    assert pages.find(text(99, *range(1, 14)), 13).tokens == 0
    second = text(*range(14))
    pages.adopt(second, pages.find(second, 13))
    assert (second.computed, second.tables) == (12, [first.tables[0][:3]])
    pages.check_integrity([first, second])
    assert (pages.used, pages.free) == (4, [15])
    pages.release(first)
    pages.release(second)
    assert (pages.used, pages.free) == (0, [19])


def test_what_a_step_filled_is_not_found_unless_it_is_published() -> None:
    pages = CachePages([Memory()], 20, 4, prefix_cache=True)
    first = text(*range(14))
    run(pages, first, 5)
    run(pages, first, 9, publish=False)
    pages.release(first)
    assert pages.find(text(*range(14)), 13).tokens == 4
    assert pages.pools[0].idle == 1


def test_a_group_with_a_window_needs_what_a_query_at_the_end_sees() -> None:
    """A hit is as long as every group can serve, and as short as the pages of one that are gone."""
    memories = [Memory(), Memory(6, 1)]
    pages = CachePages(memories, [40, 13], 4, prefix_cache=True)
    first = text(*range(40))
    for n in (8, 8, 8, 8):
        run(pages, first, n)
    # A query at 32 sees 27 on, which is in page 6, and the first page.
    hit = pages.find(text(*range(40)), 39)
    assert hit.tokens == 32
    window = hit.tables[1]
    assert [page != NULL_PAGE for page in window] == [True] + [False] * 5 + [True] * 2
    assert NULL_PAGE not in hit.tables[0]
    # Behind the window they stay as long as there is room, and serve texts that part earlier.
    parting = text(*range(16), *range(90, 99))
    assert pages.find(parting, 24).tokens == 16
    taken = text(*range(100, 130))
    run(pages, taken, 27, first)  # 7 of the 12 pages of the window's group; 4 blank, 3 known go
    pages.release_behind(first)
    assert pages.find(parting, 24).tokens < 16
    assert pages.find(text(*range(40)), 39).tokens == 32, "these are held"
    second = text(*range(40))
    pages.adopt(second, pages.find(second, 39))
    pages.check_integrity([first, taken, second])
    held = pages.used
    pages.release(first)
    assert pages.used == held, "the other still holds them all"
    pages.release(second)
    pages.release(taken)
    assert pages.used == 0
    pages.check_integrity([])


def test_without_the_pages_of_the_sinks_there_is_no_hit() -> None:
    pages = CachePages([Memory(6, 1)], 12, 4, prefix_cache=True)
    first = text(*range(40))
    run(pages, first, 32)
    (table,) = first.tables
    late = table[4:]
    pages.release(first)
    assert pages.find(first, 32).tokens == 32
    (pool,) = pages.pools
    pool.share(late)
    assert pool.allocate(pool.free) is not None, "takes all that is not held"
    assert pages.find(first, 32).tokens == 0


def test_a_text_whose_scores_are_wanted_starts_where_they_end() -> None:
    scoring = Sequence.score([1, 2, 3, 4], SamplingParams(), block_size=9, n_vocab=9, eot=0)
    assert scoring.reusable == 0
    asked = SamplingParams(seed=0, prompt_logprobs=0)
    start = Sequence.start([1] * 6, asked, block_size=9, n_vocab=9, eot=0)
    assert start.reusable == 0
    plain = Sequence.start([1] * 6, SamplingParams(seed=0), block_size=9, n_vocab=9, eot=0)
    assert plain.reusable == 5, "the last is computed: from it the next is predicted"


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_pages_with_numbers_that_are_not_finite_are_told(fault: float) -> None:
    config = GPTConfig(
        vocab_size=4, n_layer=3, n_head=2, d_model=8, pattern=["causal", "window:3", "causal"]
    )
    cache = KVCache(config, 5, 2)
    cache.layer(2).keys[1, 7, 2] = fault  # page 3 of the first group
    cache.layer(1).values[0, 2, 0] = fault  # page 1 of the second
    assert cache.broken([[1, 2, 3, 4], [2, 3, 1]]) == [{3}, {1}]
    assert cache.broken([[], []]) == [set(), set()]
