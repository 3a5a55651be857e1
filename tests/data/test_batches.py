from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.data.batches import IGNORE, EvalBlocks, Span, TrainBlocks
from gpt.errors import DataError


def loader(n=60, block_size=5, batch_size=4, seed=1, **options):
    return TrainBlocks(
        np.arange(n), block_size=block_size, batch_size=batch_size, seed=seed, **options
    )


def take(blocks, count):
    return [targets.clone() for _, targets, _ in itertools.islice(iter(blocks), count)]


def test_an_epoch_has_each_token_as_a_target_exactly_once():
    for epoch in range(3):
        blocks = loader()  # 60 tokens, 12 blocks, 3 batches an epoch
        targets = torch.cat(take(blocks, 3 * (epoch + 1))[3 * epoch :])
        assert sorted(targets.flatten().tolist()) == list(range(60))


@given(n=st.integers(5, 70), batch_size=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_no_token_comes_twice_in_an_epoch_and_all_batches_are_full(n, batch_size, seed):
    blocks = loader(n=n, batch_size=batch_size, seed=seed)
    per_epoch = n // 5
    rows = torch.cat(take(blocks, -(-2 * per_epoch // batch_size)))
    for epoch in (rows[:per_epoch], rows[per_epoch : 2 * per_epoch]):
        seen = epoch.flatten().tolist()
        assert len(set(seen)) == len(seen) == per_epoch * 5


def test_the_target_is_the_token_after_round_the_end_of_the_ring():
    for ids, targets, _ in itertools.islice(iter(loader()), 6):
        assert torch.equal((ids + 1) % 60, targets)
        assert torch.equal(ids[:, 1:], targets[:, :-1])


def test_the_order_is_a_matter_of_seed_and_epoch_alone():
    assert all(map(torch.equal, take(loader(), 7), take(loader(), 7)))
    assert not torch.equal(take(loader(seed=1), 1)[0], take(loader(seed=2), 1)[0])
    first, second = take(loader(), 6)[:3], take(loader(), 6)[3:]
    assert not torch.equal(torch.cat(first), torch.cat(second))


def test_blocks_begin_elsewhere_in_each_epoch():
    rows = torch.cat(take(loader(), 3 * 8))
    assert len({int(row[0]) % 5 for row in rows}) > 1


@pytest.mark.parametrize("done", [1, 2, 3, 4, 8])
def test_the_state_goes_on_with_the_next_batch_inside_an_epoch_and_across_its_end(done):
    straight = take(loader(), 12)
    first = loader()
    take(first, done)
    second = loader()
    second.load_state_dict(first.state_dict())
    assert all(map(torch.equal, take(second, 12 - done), straight[done:]))


def test_a_second_iterator_goes_on_where_the_first_was_left():
    blocks = loader()
    both = take(blocks, 2) + take(blocks, 2)
    assert all(map(torch.equal, both, take(loader(), 4)))


def test_two_processes_see_together_what_one_sees_with_twice_the_batch():
    one = take(loader(batch_size=8), 5)
    halves = [take(loader(batch_size=4, rank=r, world_size=2), 5) for r in (0, 1)]
    both = [torch.cat(pair) for pair in zip(*halves, strict=True)]
    assert all(map(torch.equal, one, both))


def test_a_text_shorter_than_a_block_is_refused_with_both_numbers():
    loader(n=5)
    with pytest.raises(DataError, match="has 4 tokens, but one block needs 5"):
        loader(n=4)


def evaluation(n, batch_size=2, block_size=4, **options):
    return EvalBlocks(
        np.arange(100, 100 + n), eot=7, block_size=block_size, batch_size=batch_size, **options
    )


@given(n=st.integers(1, 40), batch_size=st.integers(1, 6), block_size=st.integers(1, 6))
def test_evaluation_has_every_token_as_a_target_once_in_order(n, batch_size, block_size):
    blocks = evaluation(n, batch_size, block_size)
    batches = list(blocks)
    assert len(batches) == len(blocks)
    ids = torch.cat([ids.flatten() for ids, _, _ in batches])
    targets = torch.cat([targets.flatten() for _, targets, _ in batches])
    assert targets[:n].tolist() == list(range(100, 100 + n))
    assert ids[:n].tolist() == [7, *range(100, 100 + n - 1)]
    assert set(targets[n:].tolist()) <= {IGNORE}
    assert len(targets) - n < block_size


def test_evaluation_twice_gives_the_same_batches():
    blocks = evaluation(11)
    assert all(torch.equal(a, b) for x, y in zip(blocks, blocks, strict=True)
               for a, b in zip(x[:2], y[:2], strict=True))  # fmt: skip


@given(n=st.integers(1, 60), world_size=st.integers(1, 4))
def test_processes_share_the_evaluation_out(n, world_size):
    whole = [targets.flatten() for _, targets, _ in evaluation(n)]
    shares = [
        [t.flatten() for _, t, _ in evaluation(n, rank=r, world_size=world_size)]
        for r in range(world_size)
    ]
    # Sharded processes run each forward together, so all have as many.
    assert {len(share) for share in shares} == {-(-len(whole) // world_size)}
    found = sorted(int(t) for share in shares for batch in share for t in batch if t != IGNORE)
    assert found == list(range(100, 100 + n))


def test_nothing_to_evaluate_is_refused():
    with pytest.raises(DataError, match="held-out text is empty"):
        evaluation(0)


# Weights


def mixed(weights, sizes=(40, 60, 20), **options):
    edges = [0, *itertools.accumulate(sizes)]
    spans = [
        Span(f"s{i}", a, b, w)
        for i, ((a, b), w) in enumerate(zip(itertools.pairwise(edges), weights, strict=True))
    ]
    return loader(n=edges[-1], spans=spans, **options), spans


def of_source(row, spans):
    [found] = {next(i for i, s in enumerate(spans) if s.start <= t < s.stop) for t in row.tolist()}
    return found


def test_the_order_of_one_source_is_the_one_it_has_always_been():
    assert loader().cuts(0).tolist()[:6] == [7, 27, 2, 57, 17, 47]
    assert loader(seed=7).cuts(2).tolist()[:6] == [5, 35, 55, 10, 45, 20]


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_equal_weights_are_no_weights(weight):
    blocks, _ = mixed([weight] * 3)
    assert all(map(torch.equal, take(blocks, 20), take(loader(n=120), 20)))


@settings(max_examples=20, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.7]), min_size=3, max_size=3).filter(
        lambda w: len(set(w)) > 1
    ),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_source_is_seen_as_often_as_its_weight_says_and_evenly(weights, seed):
    epochs = 24  # after which each of these sources has ended a lap of its own
    blocks, spans = mixed(weights, seed=seed, batch_size=1)
    rows = torch.cat(take(blocks, epochs * blocks.blocks_per_epoch))
    sources = [of_source(row, spans) for row in rows]
    for i, (span, weight) in enumerate(zip(spans, weights, strict=True)):
        there = (span.stop - span.start) // 5
        share = max(round(weight * there), 1)
        for epoch in range(epochs):
            first = epoch * blocks.blocks_per_epoch
            assert sources[first : first + blocks.blocks_per_epoch].count(i) == share
        counts = torch.bincount(rows.flatten(), minlength=120)[span.start : span.stop]
        assert set(counts.tolist()) == {epochs * share // there}


def test_a_block_ends_within_its_source():
    blocks, spans = mixed([1.0, 2.0, 0.5], batch_size=1)
    for (ids, targets, _), _ in zip(blocks, range(200), strict=False):
        span = spans[of_source(ids[0], spans)]
        size = span.stop - span.start
        assert torch.equal((ids - span.start + 1) % size, targets - span.start)


def test_weight_0_is_left_out():
    blocks, spans = mixed([1.0, 0.0, 0.0])
    assert {of_source(row, spans) for row in torch.cat(take(blocks, 20))} == {0}
    assert blocks.blocks_per_epoch == 8


def test_sources_are_mixed_not_one_after_the_other():
    blocks, spans = mixed([1.0, 2.0, 1.0], batch_size=1)
    order = [of_source(t[0], spans) for t in take(blocks, blocks.blocks_per_epoch * 2)]
    assert order != sorted(order)
    assert order[: len(order) // 2] != order[len(order) // 2 :]


@pytest.mark.parametrize("done", [1, 5, 9, 30])
def test_a_mix_goes_on_where_its_state_says_and_processes_share_it(done):
    straight = take(mixed([1.0, 2.0, 0.3])[0], 40)
    first = mixed([1.0, 2.0, 0.3])[0]
    take(first, done)
    second = mixed([1.0, 2.0, 0.3])[0]
    second.load_state_dict(first.state_dict())
    assert all(map(torch.equal, take(second, 40 - done), straight[done:]))
    halves = [
        take(mixed([1.0, 2.0, 0.3], batch_size=2, rank=r, world_size=2)[0], 40) for r in (0, 1)
    ]
    assert all(map(torch.equal, map(torch.cat, zip(*halves, strict=True)), straight))


def test_a_source_shorter_than_a_block_is_refused_by_name():
    mixed([1.0, 1.0, 1.0], sizes=(40, 60, 4))
    mixed([1.0, 2.0, 0.0], sizes=(40, 60, 4))
    with pytest.raises(DataError, match="training text of s2 has 4 tokens, but one block needs 5"):
        mixed([1.0, 2.0, 1.0], sizes=(40, 60, 4))


def test_the_next_batch_is_cut_while_the_last_one_is_in_use() -> None:
    class Watched:
        """Tokens that say when they are read."""

        def __init__(self) -> None:
            self.tokens = np.arange(1000)
            self.read = threading.Semaphore(0)

        def __len__(self) -> int:
            return len(self.tokens)

        def __getitem__(self, where: slice) -> np.ndarray:
            self.read.release()
            return self.tokens[where]

    def cutting() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("antiphon-blocks")}

    before = cutting()  # of another test's iterator that nobody has collected yet
    tokens = Watched()
    blocks = TrainBlocks(tokens, block_size=5, batch_size=1, seed=0)
    batches = iter(blocks)
    first = next(batches)
    for _ in range(2):  # the one in hand, and the one after it that nobody has asked for
        assert tokens.read.acquire(timeout=10)
    assert blocks.state_dict() == {"blocks_drawn": 1}, "what is only cut is not drawn"
    second = next(batches)
    blocks.load_state_dict({"blocks_drawn": 0})
    again = next(batches)
    assert torch.equal(again[0], first[0])
    assert torch.equal(next(batches)[0], second[0])
    batches.close()
    assert not cutting() - before
