"""Logits to tokens: greedy, filters, and draws that depend on nothing but their own identity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.errors import SamplingError
from gpt.params import NO_TOKEN, SamplingParams
from gpt.sampling import NOT_FINITE, Draw, sample, uniform

N = 4000


def draws(params: SamplingParams, count: int = N) -> list[Draw]:
    return [Draw(params, 0, index) for index in range(count)]


def frequencies(logits: list[float], params: SamplingParams) -> np.ndarray:
    tokens = sample(torch.tensor(logits).expand(N, -1), draws(params))
    return np.bincount(tokens, minlength=len(logits)) / N


def softmax(logits: list[float]) -> np.ndarray:
    weights = np.exp(np.array(logits, dtype=np.float64) - max(logits))
    return weights / weights.sum()


LOGITS = [0.3, 2.0, -1.0, 1.5, 0.0, 1.0]


def test_tokens_come_with_the_probabilities_of_softmax() -> None:
    found = frequencies(LOGITS, SamplingParams(seed=1))
    # Four standard deviations of a share of N draws.
    np.testing.assert_allclose(found, softmax(LOGITS), atol=4 * 0.5 / math.sqrt(N))


def test_temperature_divides_the_logits() -> None:
    found = frequencies(LOGITS, SamplingParams(temperature=0.5, seed=1))
    wanted = softmax([2 * x for x in LOGITS])
    np.testing.assert_allclose(found, wanted, atol=4 * 0.5 / math.sqrt(N))


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-8])
def test_no_temperature_and_next_to_none_are_greedy(temperature: float) -> None:
    """T9: temperature 0 must not divide by zero, nor a tiny one overflow."""
    assert frequencies(LOGITS, SamplingParams(temperature=temperature, seed=1))[1] == 1


def test_a_huge_temperature_is_uniform_and_keeps_forbidden_tokens_out() -> None:
    found = frequencies([1.0, 9.0, -math.inf], SamplingParams(temperature=1e38, seed=1))
    np.testing.assert_allclose(found, [0.5, 0.5, 0], atol=4 * 0.5 / math.sqrt(N))


@pytest.mark.parametrize(("top_k", "kept"), [(0, 6), (1, 1), (3, 3), (6, 6), (7, 6), (10**9, 6)])
def test_top_k_keeps_k_and_zero_or_too_many_keep_all(top_k: int, kept: int) -> None:
    """T9."""
    found = frequencies(LOGITS, SamplingParams(top_k=top_k, seed=2))
    stays = np.argsort(LOGITS)[::-1][:kept]
    assert set(np.flatnonzero(found)) == set(stays)
    wanted = softmax(LOGITS) * np.isin(np.arange(6), stays)
    np.testing.assert_allclose(found, wanted / wanted.sum(), atol=4 * 0.5 / math.sqrt(N))


def test_of_equal_logits_top_k_keeps_the_lowest_ids() -> None:
    found = frequencies([1.0, 5.0, 5.0, 5.0, 5.0], SamplingParams(top_k=2, seed=1))
    assert set(np.flatnonzero(found)) == {1, 2}


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=12),
    st.floats(0.01, 1.0),
    st.integers(0, 14),
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(
    values: list[int], top_p: float, top_k: int
) -> None:
    logits = [v / 2 for v in values]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: top_k or None]
    left = softmax([logits[i] for i in order])  # top-p acts on what top-k left
    mass = np.cumsum(left)
    if np.abs(mass - top_p).min() < 1e-5:
        return  # on the border float32 and float64 may differ
    stays = order[: int((mass < top_p).sum()) + 1] if top_p < 1 else order
    params = SamplingParams(top_p=top_p, top_k=top_k, seed=3)
    tokens = sample(torch.tensor(logits).expand(300, -1), draws(params, 300))
    assert set(tokens) <= set(stays)
    if len(stays) <= 3 and left[len(stays) - 1] > 0.05:
        assert set(tokens) == set(stays)


def test_top_p_beyond_the_sorted_prefix_is_still_exact() -> None:
    """A flat distribution over more tokens than the prefix holds: 90 % of 5,000 equal tokens."""
    params = SamplingParams(top_p=0.9, seed=1)
    tokens = sample(torch.zeros(400, 5000), draws(params, 400))
    assert max(tokens) < 4501
    assert max(tokens) > 4400


def test_rows_of_a_batch_keep_their_own_settings() -> None:
    rows = [
        SamplingParams(temperature=0, seed=1),
        SamplingParams(top_k=2, seed=1),
        SamplingParams(seed=7),
        SamplingParams(top_p=0.5, seed=1),
        SamplingParams(temperature=3.0, top_p=0.9, top_k=4, seed=9),
    ]
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0))
    together = sample(logits, [Draw(p, 0, 5) for p in rows])
    alone = [sample(logits[i : i + 1], [Draw(p, 0, 5)])[0] for i, p in enumerate(rows)]
    backwards = sample(logits.flip(0), [Draw(p, 0, 5) for p in reversed(rows)])
    assert together == alone == backwards[::-1]


def test_a_draw_depends_on_seed_choice_and_index() -> None:
    base = uniform([1], [0], [0])[0]
    assert uniform([1], [0], [0])[0] == base
    others = uniform([2, 1, 1, 0, 2**63 - 1], [0, 1, 0, 1, 0], [0, 0, 1, 0, 0])
    assert len({base, *others}) == 6


@pytest.mark.parametrize("part", [0, 1, 2])
def test_uniform_numbers_are_uniform_along_each_argument(part: int) -> None:
    arguments = [[3] * 20000, [0] * 20000, [0] * 20000]
    arguments[part] = list(range(20000))
    numbers = uniform(*arguments)
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert counts.sum() == 20000
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-squared with 19 degrees: p < 0.0002
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_named_and_its_mates_are_not_touched(
    bad: float, temperature: float
) -> None:
    logits = torch.tensor([LOGITS] * 4)
    logits[2, 4] = bad
    rows = [Draw(SamplingParams(temperature=temperature, seed=s), 0, 0) for s in range(4)]
    clean = sample(torch.tensor([LOGITS] * 4), rows)
    assert sample(logits, rows) == [*clean[:2], NOT_FINITE, clean[3]]
    assert sample(torch.full((1, 3), -math.inf), rows[:1]) == [NOT_FINITE]


def test_bfloat16_logits_are_taken() -> None:
    logits = torch.tensor([LOGITS], dtype=torch.bfloat16)
    assert sample(logits, [Draw(SamplingParams(temperature=0, seed=0), 0, 0)]) == [1]
    assert sample(logits, [Draw(SamplingParams(top_p=0.1, seed=0), 0, 0)]) == [1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -1.0),
        ("top_p", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("max_tokens", 0),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", ("x" * 1025,)),
        ("stop", ("x",) * 17),
    ],
)
def test_values_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(SamplingError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_all_violations_are_listed_at_once() -> None:
    with pytest.raises(SamplingError) as caught:
        SamplingParams(temperature=math.nan, top_k=-2, top_p=0)
    assert [field for field, _ in caught.value.violations] == ["temperature", "top_k", "top_p"]


def test_bias_is_added_to_the_logits() -> None:
    found = frequencies(LOGITS, SamplingParams(seed=1, logit_bias=((4, 2.0), (1, -1.5))))
    wanted = softmax([0.3, 0.5, -1.0, 1.5, 2.0, 1.0])
    np.testing.assert_allclose(found, wanted, atol=4 * 0.5 / math.sqrt(N))
    assert sample(
        torch.tensor([LOGITS]), [Draw(SamplingParams(temperature=0, logit_bias=((2, 9.0),)), 0, 0)]
    ) == [2]


def test_bias_does_not_make_the_impossible_possible() -> None:
    params = SamplingParams(seed=1, logit_bias=((1, 100.0),))
    assert frequencies([0.0, -math.inf, 1.0], params)[1] == 0


def test_only_allowed_tokens_are_made_with_their_own_proportions() -> None:
    found = frequencies(LOGITS, SamplingParams(seed=1, allowed_tokens=(5, 0)))
    wanted = softmax([0.3, *[-math.inf] * 4, 1.0])
    np.testing.assert_allclose(found, wanted, atol=4 * 0.5 / math.sqrt(N))


def test_each_row_has_masks_of_its_own() -> None:
    logits = torch.tensor(LOGITS).expand(4, -1).to(torch.bfloat16)
    greedy = SamplingParams(temperature=0)
    bits = np.array([1 << 4 | 1 << 2], dtype=np.int32)
    rows = [
        Draw(greedy, 0, 0),
        Draw(greedy, 0, 0, banned=(1, 3)),
        Draw(SamplingParams(temperature=0, allowed_tokens=(0, 2)), 0, 0, banned={0}),
        Draw(greedy, 0, 0, bitmask=bits),
    ]
    before = logits.clone()
    assert sample(logits, rows) == [1, 5, 2, 4]
    assert torch.equal(logits, before)


def test_nothing_left_to_make_is_no_token() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]] * 2)
    nothing = Draw(SamplingParams(allowed_tokens=(2,)), 0, 0)
    assert sample(logits, [nothing, Draw(SamplingParams(temperature=0), 0, 0)]) == [NO_TOKEN, 1]
