"""Penalties and filters against an independent float64 reference, one row at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpt import filters
from gpt.filters import keep, penalise
from gpt.history import History
from gpt.params import SamplingParams
from gpt.sampling import Draw, sample, uniform

CLOSE = 1e-5
"""Nearer to a border than this, float32 may fall on the other side of it."""


class NearBorderError(Exception):
    """The right answer hangs on a rounding; not what these tests are about."""


def away(values: np.ndarray, border: float) -> None:
    if np.any(np.abs(values - border) < CLOSE):
        raise NearBorderError


def reference_penalties(
    logits: list[float], params: SamplingParams, prompt: list[int], text: list[int]
) -> list[float]:
    found = list(logits)
    for token in range(len(found)):
        if token in prompt or token in text:
            if found[token] > 0:
                found[token] /= params.repetition_penalty
            else:
                found[token] *= params.repetition_penalty
        found[token] -= params.frequency_penalty * text.count(token)
        found[token] -= params.presence_penalty * (token in text)
    return found


def probabilities(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def reference_filters(logits: list[float], params: SamplingParams) -> np.ndarray:
    """(V,) probabilities of what is kept, from the definitions of `SamplingParams`."""
    x = np.array(logits, dtype=np.float64) / params.temperature
    ids = np.arange(len(x))
    if 0 < params.top_k < len(x):
        order = sorted(ids, key=lambda i: (-x[i], i))
        x[order[params.top_k :]] = -np.inf
    if params.top_p < 1:
        p = probabilities(x)
        order = sorted(ids, key=lambda i: (-x[i], i))
        mass = np.cumsum(p[order])
        away(mass, params.top_p)
        x[order[int(np.argmax(mass >= params.top_p)) + 1 :]] = -np.inf
    if params.min_p > 0:
        ratio = np.exp(x - x.max())
        if params.min_p < 1:
            away(ratio, params.min_p)
        x[ratio < params.min_p] = -np.inf
    if params.typical_p < 1:
        p = probabilities(x)
        possible = [i for i in ids if p[i] > 0]
        entropy = -sum(p[i] * math.log(p[i]) for i in possible)
        distance = {i: abs(-math.log(p[i]) - entropy) for i in possible}
        for i in possible:
            for j in possible:
                if x[i] != x[j] and abs(distance[i] - distance[j]) < CLOSE:
                    raise NearBorderError
        # Equals in exact arithmetic stay equals here: `round` undoes the last digits.
        order = sorted(possible, key=lambda i: (round(distance[i], 9), i))
        mass = np.cumsum(p[order])
        away(mass, params.typical_p)
        kept = order[: int(np.argmax(mass >= params.typical_p)) + 1]
        x[[i for i in ids if i not in kept]] = -np.inf
    return probabilities(x)


def settled(logits: list[float], params: SamplingParams) -> np.ndarray:
    try:
        return reference_filters(logits, params)
    except NearBorderError:
        assume(False)
        raise AssertionError from None


def kept(rows: list[list[float]], params: list[SamplingParams]) -> np.ndarray:
    """(M, V) probabilities after the filters."""
    logits = torch.tensor(rows)
    logits = logits - logits.amax(-1, keepdim=True)
    logits = logits / torch.tensor([[p.temperature] for p in params])
    return keep(logits, params).double().softmax(-1).numpy()  # type: ignore[no-any-return]


# Few values, so that there are ties; and what has been ruled out.
LOGIT = st.one_of(st.integers(-3, 3).map(float), st.floats(-8, 8, width=32), st.just(-math.inf))
FILTERS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.25, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 100]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.72, 0.97]),
    min_p=st.sampled_from([0.0, 0.0, 1e-300, 0.011, 0.3, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 1e-9, 0.2, 0.63, 0.96]),
    seed=st.just(1),
)


@st.composite
def filtered_rows(draw: st.DrawFn) -> tuple[list[list[float]], list[SamplingParams]]:
    size = draw(st.integers(1, 12))
    row = st.lists(LOGIT, min_size=size, max_size=size).filter(lambda x: max(x) > -math.inf)
    rows = draw(st.lists(row, min_size=1, max_size=4))
    return rows, draw(st.lists(FILTERS, min_size=len(rows), max_size=len(rows)))


@pytest.mark.parametrize("prefix", [1, 3, 1024])
def test_filters_keep_what_the_definitions_keep(
    prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All filters, alone and together, in mixed batches; however much is looked at first."""
    monkeypatch.setattr(filters, "PREFIX", prefix)

    @settings(deadline=None, max_examples=60)
    @given(filtered_rows())
    def check(batch: tuple[list[list[float]], list[SamplingParams]]) -> None:
        rows, params = batch
        wanted = [settled(row, p) for row, p in zip(rows, params, strict=True)]
        np.testing.assert_allclose(kept(rows, params), wanted, atol=1e-5)

    check()


@settings(deadline=None, max_examples=60)
@given(filtered_rows())
def test_draws_are_the_inverse_of_the_kept_distribution(
    batch: tuple[list[list[float]], list[SamplingParams]],
) -> None:
    """Token i is drawn where the running sum, in vocabulary order, passes the uniform number."""
    rows, params = batch
    draws = [Draw(p, 0, index) for index, p in enumerate(params)]
    for token, row, p, index in zip(sample(torch.tensor(rows), draws), rows, params, range(9)):  # noqa: B905
        running = np.cumsum(settled(row, p))
        u = uniform([p.seed], [0], [index])[0] * running[-1]
        assume(np.all(np.abs(running - u) > CLOSE))
        assert token == int(np.argmax(running > u))


def texts(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, size - 1), max_size=10)


PENALTIES = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 40.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.3]),
    seed=st.just(1),
)


@st.composite
def penalised_rows(
    draw: st.DrawFn,
) -> list[tuple[list[float], SamplingParams, list[int], list[int]]]:
    size = draw(st.integers(1, 8))
    row = st.lists(LOGIT, min_size=size, max_size=size).filter(lambda x: max(x) > -math.inf)
    return draw(
        st.lists(st.tuples(row, PENALTIES, texts(size), texts(size)), min_size=1, max_size=4)
    )


def history(prompt: list[int], text: list[int]) -> History:
    """As a sequence builds it: the prompt, then token after token."""
    found = History(len(prompt))
    for length in range(len(prompt), len(prompt) + len(text) + 1):
        found.update([*prompt, *text][:length])
    return found


@settings(deadline=None, max_examples=60)
@given(penalised_rows())
def test_penalties_are_as_defined_and_touch_nobody_else(
    batch: list[tuple[list[float], SamplingParams, list[int], list[int]]],
) -> None:
    logits = torch.tensor([row for row, *_ in batch])
    before = logits.clone()
    draws = [Draw(p, 0, len(text), history(prompt, text)) for _, p, prompt, text in batch]
    found = penalise(logits, draws)
    assert torch.equal(logits, before)  # log-probabilities are of these
    wanted = [reference_penalties(*row) for row in batch]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-5)
    if not any(p.penalised for _, p, _, _ in batch):
        assert found is logits
    for token, row, draw in zip(sample(logits, draws), wanted, draws, strict=True):
        if draw.params.greedy:  # has penalties too
            assert row[token] == pytest.approx(max(row), abs=1e-4)


def test_penalties_come_before_temperature_and_filters() -> None:
    """A token that is penalised is not among the top 1 any more."""
    params = SamplingParams(top_k=1, presence_penalty=2.0, temperature=0.5, seed=3)
    assert sample(torch.tensor([[0.0, 1.0, -1.0]]), [Draw(params, 0, 1, history([1], [1]))]) == [0]
    assert sample(torch.tensor([[0.0, 1.0, -1.0]]), [Draw(params, 0, 0, history([1], []))]) == [1]


@pytest.mark.parametrize("penalty", [5e-324, 1e-38, 1e38, 1.7e308])
@pytest.mark.parametrize("logit", [0.0, 3e38, -3e38, 1.0, -1.0])
def test_no_penalty_makes_a_row_improper(penalty: float, logit: float) -> None:
    params = SamplingParams(repetition_penalty=penalty, seed=1)
    for row in ([logit], [logit, -math.inf]):
        for greedy in (params, replace(params, temperature=0.0)):
            draw = Draw(greedy, 0, 1, history([0, len(row) - 1], [0]))
            assert sample(torch.tensor([row]), [draw]) == [0]


def test_what_is_impossible_stays_so_under_encouraging_penalties() -> None:
    params = SamplingParams(
        repetition_penalty=1e-9, frequency_penalty=-2, presence_penalty=-2, seed=1
    )
    row = torch.tensor([[0.0, -math.inf]]).expand(200, 2)
    draws = [Draw(params, 0, index, history([1], [1, 1])) for index in range(200)]
    assert set(sample(row, draws)) == {0}


def test_penalties_without_a_history_are_a_fault_of_the_caller() -> None:
    with pytest.raises(ValueError, match="need the tokens"):
        penalise(torch.zeros(1, 3), [Draw(SamplingParams(presence_penalty=1), 0, 0)])


def test_min_p_of_one_keeps_the_most_likely_and_its_equals() -> None:
    (found,) = kept([[1.0, 3.0, 3.0, -1.0]], [SamplingParams(min_p=1)])
    np.testing.assert_allclose(found, [0, 0.5, 0.5, 0])


def test_typical_can_leave_out_the_most_likely_token() -> None:
    """That is its point: one likely token and many rare ones, whose surprisal is nearer to the
    entropy (Meister et al., section 4)."""
    row = [math.log(0.3), *[math.log(0.7 / 70)] * 70]
    (found,) = kept([row], [SamplingParams(typical_p=0.5)])
    assert found[0] == 0
    assert (found > 0).sum() == 50


def test_of_equals_the_lowest_ids_stay() -> None:
    for params in (
        SamplingParams(top_k=3), SamplingParams(top_p=0.55), SamplingParams(typical_p=0.55),
    ):  # fmt: skip
        (found,) = kept([[0.0] * 5], [params])
        np.testing.assert_allclose(found, [1 / 3] * 3 + [0, 0], rtol=1e-6)


def test_more_equals_than_are_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "PREFIX", 2)
    for params in (SamplingParams(top_p=0.55), SamplingParams(typical_p=0.55)):
        (found,) = kept([[0.0] * 9], [params])
        np.testing.assert_allclose(found, [1 / 5] * 5 + [0] * 4, rtol=1e-6)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(min_p=1), SamplingParams(typical_p=1e-9), SamplingParams(top_p=1e-9)],
)
def test_a_vocabulary_of_one_token_is_that_token(params: SamplingParams) -> None:
    assert sample(torch.tensor([[-5.0]]), [Draw(params, 0, 0)]) == [0]


def test_a_row_without_a_distribution_disturbs_no_filter_of_its_mates() -> None:
    params = SamplingParams(
        seed=1, top_k=3, top_p=0.9, min_p=0.1, typical_p=0.8, repetition_penalty=1.2
    )
    good = [0.3, 2.0, -1.0, 1.5]
    alone = sample(torch.tensor([good]), [Draw(params, 0, 0, history([0], []))])
    rows = torch.tensor([[math.nan] * 4, good, [math.inf, 0, 0, 0], [-math.inf] * 4])
    draws = [Draw(params, 0, 0, history([0], [])) for _ in rows]
    assert sample(rows, draws) == [-1, *alone, -1, -1]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_rows_that_are_masked_together_are_masked_as_each_alone(data: st.DataObject) -> None:
    V = data.draw(st.sampled_from([1, 31, 33, 70]))
    tokens = st.integers(0, V - 1)
    rows = []
    for _ in range(data.draw(st.integers(1, 5))):
        allowed = data.draw(st.none() | st.sets(tokens, min_size=1, max_size=min(4, V)))
        bits = data.draw(st.none() | st.lists(st.booleans(), min_size=V, max_size=V))
        packed = None
        if bits is not None:
            padded = np.zeros(-(-V // 32) * 32, dtype=bool)
            padded[:V] = bits
            packed = np.packbits(padded, bitorder="little").view(np.int32)
        params = SamplingParams(allowed_tokens=None if allowed is None else tuple(allowed))
        banned = data.draw(st.sets(tokens, max_size=min(4, V)))
        rows.append((Draw(params, 0, 0, banned=banned, bitmask=packed), bits))
    # As the step hands them over: some columns of a wider product.
    logits = torch.arange(float(len(rows) * (V + 3))).view(len(rows), -1)[:, :V]
    found = filters.mask(logits, [draw for draw, _ in rows]).tolist()
    for i, (draw, bits) in enumerate(rows):
        allowed = draw.params.allowed_tokens
        for token in range(V):
            stays = (
                (allowed is None or token in allowed)
                and (bits is None or bits[token])
                and token not in draw.banned
            )
            assert found[i][token] == (logits[i, token] if stays else -math.inf)
