"""Requests at once, and requests in a minute, by a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.limits import Limits, OverLimitError, Quota


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_places_are_held_and_given_back() -> None:
    quota, limits = Quota(), Limits(concurrent=2)
    with quota.places(limits), quota.places(limits):
        with pytest.raises(OverLimitError, match="2 requests of this key are running, 2 may"):
            quota.places(limits).__enter__()
        assert quota.running == 2
    with pytest.raises(ZeroDivisionError), quota.places(limits):
        _ = 1 / 0
    assert quota.running == 0


def test_a_batch_gets_the_places_that_there_are() -> None:
    quota, limits = Quota(), Limits(concurrent=5)
    with quota.places(limits), quota.places(limits, 100) as granted:
        assert granted == 4
        with pytest.raises(OverLimitError):
            quota.places(limits).__enter__()
    with quota.places(limits, 3) as granted:
        assert granted == 3


def test_a_minutes_worth_at_once_and_then_as_it_grows_back() -> None:
    clock = Clock()
    quota, limits = Quota(clock), Limits(per_minute=30)
    for _ in range(30):
        with quota.places(limits):
            pass
    with pytest.raises(OverLimitError, match="30 requests a minute") as over:
        quota.places(limits).__enter__()
    assert over.value.retry_after == pytest.approx(2)
    assert quota.running == 0
    clock.now += over.value.retry_after + 1e-6
    with quota.places(limits):
        pass
    clock.now += 3600  # idle time is not saved up beyond a minute's worth
    with quota.places(limits, 40), pytest.raises(OverLimitError) as over:
        quota.places(limits).__enter__()
    assert over.value.retry_after == pytest.approx(22), "a batch is paid off afterwards"


@given(
    per_minute=st.integers(1, 100),
    steps=st.lists(st.tuples(st.floats(0, 90), st.integers(1, 5)), max_size=60),
)
def test_no_more_than_the_rate_and_one_burst(per_minute: int, steps: list) -> None:
    clock = Clock()
    quota, limits, let_in = Quota(clock), Limits(per_minute=per_minute), 0
    for seconds, wanted in steps:
        clock.now += seconds
        try:
            with quota.places(limits, wanted):
                let_in += wanted
        except OverLimitError as error:
            clock.now += error.retry_after + 1e-6  # whoever waits as told is let in
            with quota.places(limits, wanted):
                let_in += wanted
    elapsed = clock.now - 100
    assert let_in <= per_minute + elapsed * per_minute / 60 + 5
