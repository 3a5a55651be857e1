"""Scoring: the log-probabilities that one full forward gives, however the text is run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.errors import CheckpointError, InexpressibleTextError, PromptError, SamplingError
from gpt.generate import step
from gpt.logprobs import ROWS, logprobs
from gpt.model import GPT
from gpt.params import LOGPROB_FLOOR, NOT_FINITE, SCORED, Made, SamplingParams
from gpt.score import score
from gpt.sequence import Sequence
from gpt.tokenizer import Tokenizer
from tests.strategies import build

TOKENIZER = Tokenizer.bytes()
CONFIG = GPTConfig(
    vocab_size=TOKENIZER.n_vocab + 7, block_size=48, n_layer=2, n_head=2, d_model=16, init_std=0.3
)
TEXT = "Scored are all of these letters, and no other."


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CONFIG, 3)


def reference(model: GPT, ids: list[int]) -> np.ndarray:
    """(T, V) log-probabilities in float64, from one forward without a cache."""
    with torch.inference_mode():
        logits = model(torch.tensor([[TOKENIZER.eot, *ids[:-1]]]))[0, :, : TOKENIZER.n_vocab]
    found = logits.double().numpy()
    shifted = found - found.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))  # type: ignore[no-any-return]


def scoring(ids: list[int], top: int = 0) -> Sequence:
    params = SamplingParams(logprobs=top, seed=0)
    return Sequence.score(ids, params, block_size=48, n_vocab=257, eot=256)


@pytest.mark.parametrize("prefill_chunk", [1, 7, 512])
@pytest.mark.parametrize("text", ["a", TEXT, TEXT + "ab"])
def test_scores_are_those_of_a_full_forward(model: GPT, text: str, prefill_chunk: int) -> None:
    ids = TOKENIZER.encode(text)
    made = score(model, TOKENIZER, text, top=3, dtype=torch.float64, prefill_chunk=prefill_chunk)
    wanted = reference(model, ids)
    assert [m.token for m in made] == ids
    np.testing.assert_allclose(
        [m.logprob for m in made], wanted[np.arange(len(ids)), ids], rtol=1e-5, atol=1e-5
    )
    for m, row in zip(made, wanted, strict=True):
        best = np.argsort(-row)[:3]
        assert [t.token for t in m.top] == best.tolist()
        np.testing.assert_allclose([t.logprob for t in m.top], row[best], rtol=1e-5, atol=1e-5)


def test_scores_do_not_depend_on_company_and_disturb_nobody(model: GPT) -> None:
    """Scored, prompted and drawn in one step: each as if alone."""
    cache = KVCache(CONFIG, 8, dtype=torch.float64)
    greedy = SamplingParams(temperature=0, seed=0, logprobs=1)
    ids = TOKENIZER.encode(TEXT[:20])
    scored, mate = scoring(ids, 1), Sequence.start(
        [70, 71], greedy, block_size=48, n_vocab=257, eot=256
    )  # fmt: skip
    scored.tables, mate.tables = [[1, 2]], [[3, 4]]
    alone = Sequence.start([70, 71], greedy, block_size=48, n_vocab=257, eot=256)
    alone.tables = [[5, 6]]
    together = step(model, cache, [(scored, 13), (mate, 2)], n_vocab=257)
    assert together[0] is None
    assert len(scored.scores) == 13
    together += step(model, cache, [(mate, 1), (scored, 7)], n_vocab=257)
    assert together[3] == Made(SCORED)
    assert scored.ids == [256, *ids[:-1]]
    expected = [step(model, cache, [(alone, alone.pending)], n_vocab=257)[0] for _ in range(2)]
    for found, wanted in zip([together[1], together[2]], expected, strict=True):
        assert found is not None
        assert wanted is not None
        assert found.token == wanted.token == wanted.top[0].token
        assert found.logprob == pytest.approx(wanted.logprob)
        assert wanted.logprob == wanted.top[0].logprob
    lone = score(model, TOKENIZER, ids, top=1, dtype=torch.float64)
    np.testing.assert_allclose(
        [m.logprob for m in scored.scores], [m.logprob for m in lone], rtol=1e-6
    )


@pytest.mark.parametrize(("before", "again"), [(10, 10), (10, 4), (4, 10), (10, 19)])
def test_a_preempted_text_is_not_scored_twice(model: GPT, before: int, again: int) -> None:
    cache = KVCache(CONFIG, 3, dtype=torch.float64)
    ids = TOKENIZER.encode(TEXT[:20])
    sequence = scoring(ids)
    sequence.tables = [[1, 2]]
    step(model, cache, [(sequence, before)], n_vocab=257)
    first = list(sequence.scores)
    sequence.computed = 0  # what a preemption does, its pages apart
    step(model, cache, [(sequence, again)], n_vocab=257)
    assert sequence.scores[:before] == first
    assert len(sequence.scores) == max(before, again)
    assert step(model, cache, [(sequence, sequence.pending)], n_vocab=257) == [Made(SCORED)]
    lone = score(model, TOKENIZER, ids, dtype=torch.float64)
    np.testing.assert_allclose([m.logprob for m in sequence.scores], [m.logprob for m in lone])


def test_what_cannot_be_scored_is_refused_with_the_numbers(model: GPT) -> None:
    with pytest.raises(PromptError, match=r"text to score has 49 tokens .* holds 48; .* least 1"):
        score(model, TOKENIZER, "x" * 49)
    with pytest.raises(PromptError, match="text to score is empty"):
        score(model, TOKENIZER, "")
    with pytest.raises(PromptError, match=r"id 257 at place 1 of the text to score .*0 to 256"):
        score(model, TOKENIZER, [1, 257])
    with pytest.raises(PromptError, match="no end-of-text"):
        Sequence.score([1], SamplingParams(), block_size=8, n_vocab=9, eot=None)
    with pytest.raises(InexpressibleTextError, match="'文'"):
        score(model, Tokenizer.chars("abc"), "文")
    with pytest.raises(SamplingError, match="logprobs: 21"):
        score(model, TOKENIZER, "a", top=21)


def test_a_damaged_model_is_named_and_gives_no_scores() -> None:
    broken = build(CONFIG, 3)
    with torch.no_grad():
        broken.blocks[0].mlp.down.weight.fill_(float("nan"))  # type: ignore[union-attr,operator]
    with pytest.raises(CheckpointError, match="not finite"):
        score(broken, TOKENIZER, "abc", dtype=torch.float64)


def test_what_is_impossible_leaves_as_the_floor_or_not_at_all() -> None:
    """S15: no -inf leaves, neither as the token's own nor among the alternatives."""
    logits = torch.tensor([[0.0, -math.inf, -1e9, 0.0]])
    (made,) = logprobs(logits, [1], [4])
    assert made.logprob == LOGPROB_FLOOR
    assert sorted(t.token for t in made.top) == [0, 3]
    assert all(t.logprob == pytest.approx(math.log(0.5)) for t in made.top)
    assert logprobs(logits, [2], [0]) == [Made(2, LOGPROB_FLOOR)]


def test_more_alternatives_than_the_vocabulary_are_all_of_it() -> None:
    (made,) = logprobs(torch.zeros(1, 3), [0], [20])
    assert sorted(t.token for t in made.top) == [0, 1, 2]
    assert logprobs(torch.zeros(1, 1), [0], [5])[0].logprob == 0


def test_each_row_gets_its_own_number_of_alternatives_and_its_own_faults() -> None:
    rows = 2 * ROWS + 3  # more than one piece
    logits = torch.randn(rows, 11, generator=torch.Generator().manual_seed(1))
    logits[5] = math.nan
    logits[6, 2] = math.inf
    logits[7] = -math.inf
    made = logprobs(logits, [i % 11 for i in range(rows)], [i % 4 for i in range(rows)])
    assert [i for i, m in enumerate(made) if m.token == NOT_FINITE] == [5, 6, 7]
    good = [i for i in range(rows) if i not in (5, 6, 7)]
    assert [len(made[i].top) for i in good] == [i % 4 for i in good]
    wanted = logits.double().log_softmax(-1)
    for i in good:
        assert made[i].logprob == pytest.approx(float(wanted[i, i % 11]), abs=1e-5)
