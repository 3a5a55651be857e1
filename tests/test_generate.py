"""step() and the loop around it, on a real model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpt.cache import PAGE_SIZE, KVCache
from gpt.cachespec import CacheSpec
from gpt.config import GPTConfig, Position
from gpt.errors import CheckpointError, InexpressibleTextError, PromptError
from gpt.generate import NOT_FINITE, Texts, generate, step
from gpt.model import GPT
from gpt.pages import most_pages
from gpt.params import Made, SamplingParams
from gpt.plan import AttentionPlan, Group, LayerPlan
from gpt.score import score
from gpt.sequence import Sequence
from gpt.stream import FinishReason
from gpt.tokenizer import Tokenizer
from tests.strategies import build, poison

TOKENIZER = Tokenizer.bytes()
CONFIG = GPTConfig(
    vocab_size=TOKENIZER.n_vocab + 7,  # padded, as fast kernels like it
    block_size=32,
    n_layer=2,
    n_head=2,
    d_model=16,
    init_std=0.3,
)
GREEDY = SamplingParams(temperature=0, seed=0)


@pytest.fixture(scope="module")
def model() -> GPT:
    return build(CONFIG, 3)


def tokens(model: GPT, prompt: str | list[int], params: SamplingParams, **kwargs: int) -> list[int]:
    return [
        piece.token
        for piece in generate(model, TOKENIZER, prompt, params, dtype=torch.float64, **kwargs)
    ]


def recompute_greedily(model: GPT, ids: list[int], count: int) -> list[int]:
    """Generation without a cache: the whole text again for every token."""
    ids = list(ids)
    for _ in range(count):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids]))[0, -1, : TOKENIZER.n_vocab].argmax()))
    return ids[-count:]


@pytest.mark.parametrize("length", [1, 5, 32])
def test_cached_generation_equals_recomputing_everything(model: GPT, length: int) -> None:
    """T5, T8: from one token, from some, and from a full context, which has room for one more."""
    prompt = list(range(40, 40 + length))
    found = tokens(model, prompt, GREEDY)
    assert len(found) == 33 - length or found[-1] == TOKENIZER.eot
    assert found == recompute_greedily(model, prompt, len(found))


def test_an_empty_prompt_starts_from_end_of_text(model: GPT) -> None:
    """T8, S11."""
    assert tokens(model, "", GREEDY) == tokens(model, [TOKENIZER.eot], GREEDY) != []


def test_prompts_of_different_length_do_not_disturb_each_other(model: GPT) -> None:
    """T7: lengths 3 and 7 in one batch equal each alone."""
    prompts = [[65, 66, 67], [70, 71, 72, 73, 74, 75, 76]]
    cache = KVCache(CONFIG, 8, dtype=torch.float64)
    sequences = []
    for i, prompt in enumerate(prompts):
        sequence = Sequence.start(prompt, GREEDY, block_size=32, n_vocab=257, eot=256)
        sequence.tables = [[2 * i + 1, 2 * i + 2]]
        sequences.append(sequence)
    step(model, cache, [(s, s.pending) for s in sequences], n_vocab=257)
    for _ in range(9):
        step(model, cache, [(s, 1) for s in sequences], n_vocab=257)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.ids[len(prompt) :] == recompute_greedily(model, prompt, 10)


def test_a_prompt_run_in_chunks_gives_the_same_text(model: GPT) -> None:
    prompt = list(range(50, 70))
    whole = tokens(model, prompt, GREEDY)
    assert whole == tokens(model, prompt, GREEDY, prefill_chunk=7)
    assert whole == tokens(model, prompt, GREEDY, prefill_chunk=1)


def test_samples_differ_from_each_other_and_not_from_run_to_run(model: GPT) -> None:
    params = SamplingParams(seed=5, max_tokens=12)

    def samples(count: int) -> dict[int, list[int]]:
        made: dict[int, list[int]] = {}
        for piece in generate(model, TOKENIZER, "ab", params, num_samples=count):
            made.setdefault(piece.choice, []).append(piece.token)
        return made

    model32 = model.float()
    try:
        many = samples(35)  # more than run side by side
        assert many == samples(35)
        assert len({tuple(ids) for ids in many.values()}) > 30
        assert samples(1)[0] == many[0]
    finally:
        model32.double()


def test_padding_of_the_vocabulary_is_never_chosen(model: GPT) -> None:
    padded = build(CONFIG, 3)
    with torch.no_grad():
        padded.embed.weight[TOKENIZER.n_vocab :] *= 100
    params = SamplingParams(seed=1, temperature=5.0)
    found = [t for i in range(5) for t in tokens(padded, [i], params)]
    assert max(found) < TOKENIZER.n_vocab


def test_max_tokens_and_the_context_end_a_text_with_length(model: GPT) -> None:
    pieces = list(generate(model, TOKENIZER, "abc", SamplingParams(seed=1, max_tokens=4)))
    assert [p.finish_reason for p in pieces] == [None, None, None, FinishReason.LENGTH]
    pieces = list(generate(model, TOKENIZER, "abc", SamplingParams(seed=1, max_tokens=1000)))
    assert len(pieces) <= 30
    assert pieces[-1].finish_reason is not None


def test_a_stop_string_ends_the_text() -> None:
    class Alphabet:
        """Makes `abcdef…` whatever comes: the model's own interface in ten lines."""

        config = CONFIG

        def __call__(self, ids: torch.Tensor, plan: object, cache: object) -> torch.Tensor:
            rows = plan.logit_rows  # type: ignore[attr-defined]
            logits = torch.zeros(len(rows), CONFIG.vocab_size)
            logits[torch.arange(len(rows)), ids[rows] + 1] = 9
            return logits

    params = SamplingParams(temperature=0, seed=0, stop=("efg",))
    pieces = list(generate(Alphabet(), TOKENIZER, "a", params))
    assert "".join(p.text for p in pieces) == "bcd"
    assert pieces[-1].finish_reason is FinishReason.STOP
    assert pieces[-1].matched_stop == "efg"


def test_log_probabilities_of_a_text_are_those_that_scoring_gives_it(model: GPT) -> None:
    """Whatever the temperature, filters and penalties that it was drawn with."""
    params = SamplingParams(
        seed=3, max_tokens=20, temperature=1.7, top_k=90, frequency_penalty=1.0, logprobs=2
    )
    pieces = list(generate(model, TOKENIZER, "", params, dtype=torch.float64))
    scores = score(model, TOKENIZER, [p.token for p in pieces], top=2, dtype=torch.float64)
    for piece, wanted in zip(pieces, scores, strict=True):
        assert piece.logprob == pytest.approx(wanted.logprob, abs=1e-5)
        assert [t.token for t in piece.top] == [t.token for t in wanted.top]


def test_asking_for_log_probabilities_changes_no_text(model: GPT) -> None:
    params = SamplingParams(seed=3, max_tokens=10)
    plain = list(generate(model, TOKENIZER, "ab", params, dtype=torch.float64))
    asked = replace(params, logprobs=0)
    assert [
        (p.token, p.text) for p in generate(model, TOKENIZER, "ab", asked, dtype=torch.float64)
    ] == [(p.token, p.text) for p in plain]
    assert all(p.logprob is None and p.top == () for p in plain)


def test_penalties_count_the_prompt_only_where_they_should(model: GPT) -> None:
    """Greedy text under penalties equals a loop without a cache that applies them by definition."""
    params = SamplingParams(
        temperature=0, seed=0, max_tokens=15, repetition_penalty=1.5,
        frequency_penalty=0.4, presence_penalty=0.3,
    )  # fmt: skip
    longest = 0
    for first in range(60, 70):
        prompt = [first, 66, first, 70]
        ids = list(prompt)
        while len(ids) < 19 and TOKENIZER.eot not in ids:
            with torch.no_grad():
                logits = model(torch.tensor([ids]))[0, -1, : TOKENIZER.n_vocab]
            for token in set(ids):
                count = ids[len(prompt) :].count(token)
                logits[token] *= 1 / 1.5 if logits[token] > 0 else 1.5
                logits[token] -= 0.4 * count + 0.3 * (count > 0)
            ids.append(int(logits.argmax()))
        found = tokens(model, prompt, params)
        assert found == ids[len(prompt) :]
        longest = max(longest, len(found))
    assert longest > 8


def test_texts_join_as_others_are_over_and_get_their_pages(model: GPT) -> None:
    texts = Texts(model, TOKENIZER, 4, dtype=torch.float64)  # three pages of 16

    def sequence(length: int, max_tokens: int) -> Sequence:
        params = SamplingParams(temperature=0, seed=0, max_tokens=max_tokens)
        return Sequence.start([65] * length, params, block_size=32, n_vocab=257, eot=256)

    long, short, late = sequence(14, 9), sequence(5, 2), sequence(5, 4)
    assert [texts.add(s) for s in (long, short, late)] == [True, True, False]
    over: list[Sequence] = []
    while len(texts):
        over += [s for s, piece in texts.step() if piece is not None and piece.finish_reason]
        if short in over and late not in over and not late.tables:
            assert texts.add(late)
    assert set(over) == {long, short, late}
    for s in over:
        assert s.ids[s.prompt_len :] == recompute_greedily(
            model, s.ids[: s.prompt_len], s.output_len
        )


@pytest.mark.parametrize("position", ["none", "sinusoidal", "relative", "rotary", "alibi"])
@pytest.mark.parametrize(
    "pattern", [["window:24+sinks:3", "window:20"], ["dilated:7:3", "window:19"]]
)
def test_generation_goes_past_the_context_in_constant_memory(
    position: Position, pattern: list[str]
) -> None:
    """Its tokens are those of a full forward over the whole text, masked by the predicate alone."""
    config = CONFIG.replace(position=position, pattern=pattern)
    model = build(config, 3)
    params = SamplingParams(
        temperature=0, seed=0, max_tokens=90, logprobs=0, ignore_end_of_text=True
    )
    sequence = Sequence.start(
        list(range(40, 90)), params, block_size=32, n_vocab=257, eot=256, endless=True
    )
    spec = CacheSpec.of(config)
    n_pages = [1 + most_pages(memory, None, 16, PAGE_SIZE) for memory in spec.memories]
    texts = Texts(model, TOKENIZER, n_pages, dtype=torch.float64, prefill_chunk=16)
    assert texts.add(sequence)
    used, scores = set(), []
    while len(texts):
        scores += [piece.logprob for _, piece in texts.step() if piece is not None]
        poison(texts._cache, texts._pages)
        if sequence.computed > 60 and len(texts):
            used.add(texts.pages_used)
    assert max(used) - min(used) <= len(spec.groups), "but for how windows lie on pages"
    ids = sequence.ids
    assert len(ids) == 140
    at = torch.arange(len(ids))
    mask = [model.pattern.of_layer(i).allowed(at[:, None], at) for i in range(2)]
    plan = AttentionPlan(
        at,
        tuple(
            LayerPlan((Group(1, len(ids), len(ids), at[None], at[None], mask=m[None, None]),))
            for m in mask
        ),
        (0, 1),
    )
    with torch.inference_mode():
        wanted = model(torch.tensor([ids]), plan)[0, 49:-1, :257].log_softmax(-1)
    assert ids[50:] == wanted.argmax(-1).tolist()
    np.testing.assert_allclose(scores, wanted.amax(-1), rtol=1e-5)


def test_a_model_with_a_full_layer_or_learned_positions_ends_with_its_context() -> None:
    params = SamplingParams(seed=1, max_tokens=100)
    for changes in ({"pattern": ["window:8", "causal"]}, {"position": "learned"}):
        found = tokens(build(CONFIG.replace(**changes), 3), [65] * 20, params)
        assert len(found) <= 13


def test_nothing_that_a_page_held_before_reaches_another_text(model: GPT) -> None:
    """A pool full of NaN gives the text of a clean one: no page is read that its text has not
    written or zeroed."""
    config = CONFIG.replace(pattern=["window:9+sinks:2", "causal"])
    mixed = build(config, 3)
    params = SamplingParams(temperature=0, seed=0, max_tokens=12)
    found: list[list[int]] = []
    for spoilt in (False, True):
        texts = Texts(mixed, TOKENIZER, 8, dtype=torch.float64, prefill_chunk=7)
        if spoilt:
            poison(texts._cache, texts._pages)
        sequences = [
            Sequence.start(list(range(40, 40 + n)), params, block_size=32, n_vocab=257, eot=256)
            for n in (3, 11, 18)
        ]
        assert all(texts.add(sequence) for sequence in sequences)
        while len(texts):
            texts.step()
        found.append([token for sequence in sequences for token in sequence.ids])
    assert found[0] == found[1]


def test_too_long_a_prompt_is_refused_with_the_numbers(model: GPT) -> None:
    """S12."""
    with pytest.raises(PromptError, match=r"33 tokens .* holds 32; .* at least 1"):
        tokens(model, [65] * 33, GREEDY)


@pytest.mark.parametrize("token", [-1, 257, 263, 10**9])
def test_ids_beyond_the_vocabulary_are_refused(model: GPT, token: int) -> None:
    with pytest.raises(PromptError, match=rf"{token} at place 1 .*0 to 256"):
        tokens(model, [65, token], GREEDY)


def test_text_that_the_vocabulary_cannot_express_is_refused(model: GPT) -> None:
    """S27."""
    chars = Tokenizer.chars("abc")
    with pytest.raises(InexpressibleTextError, match=r"'文' .* offset 2"):
        list(generate(model, chars, "ab文", GREEDY))


def test_control_text_typed_by_a_user_is_ordinary_text(model: GPT) -> None:
    """S19."""
    ids = TOKENIZER.encode("a<|endoftext|>b")
    assert TOKENIZER.eot not in ids
    assert tokens(model, "a<|endoftext|>b", GREEDY) == tokens(model, ids, GREEDY)


def test_a_damaged_model_is_named_as_such() -> None:
    broken = build(CONFIG, 3)
    with torch.no_grad():
        broken.blocks[0].mlp.down.weight.fill_(float("nan"))  # type: ignore[union-attr,operator]
    with pytest.raises(CheckpointError, match="not finite"):
        tokens(broken, "a", GREEDY)


def test_a_sequence_that_turns_to_nan_harms_neither_mates_nor_heirs_of_its_pages(
    model: GPT,
) -> None:
    """S16 at the level of a step: its pages are zeroed when another begins them."""
    cache = KVCache(CONFIG, 4, dtype=torch.float64)
    good = Sequence.start([65, 66], GREEDY, block_size=32, n_vocab=257, eot=256)
    bad = Sequence.start([67], GREEDY, block_size=32, n_vocab=257, eot=256)
    good.tables, bad.tables = [[1]], [[2, 3]]

    def poisoned(ids: torch.Tensor, plan: object, kv: KVCache) -> torch.Tensor:
        logits = model(ids, plan, kv)
        logits[-1] = float("nan")
        for layer in range(CONFIG.n_layer):
            kv.layer(layer).values[:, 32:] = float("nan")
        return logits

    poisoned.config = CONFIG  # type: ignore[attr-defined]
    made, failed = step(poisoned, cache, [(good, 2), (bad, 1)], n_vocab=257)  # type: ignore[arg-type]
    assert failed == Made(NOT_FINITE)
    assert bad.ids == [67]
    assert made is not None
    assert [made.token] == recompute_greedily(model, [65, 66], 1)
    heir = Sequence.start([1] * 17, GREEDY, block_size=32, n_vocab=257, eot=256)
    heir.tables = [[2, 3]]
    step(model, cache, [(heir, 17)], n_vocab=257)
    for _ in range(3):
        results = step(model, cache, [(good, 1), (heir, 1)], n_vocab=257)
        assert Made(NOT_FINITE) not in results
    assert heir.ids[17:] == recompute_greedily(model, [1] * 17, 4)


def test_work_without_room_or_tokens_is_refused(model: GPT) -> None:
    sequence = Sequence.start(list(np.arange(20)), GREEDY, block_size=32, n_vocab=257, eot=256)
    cache = KVCache(CONFIG, 3, dtype=torch.float64)
    sequence.tables = [[1]]
    with pytest.raises(ValueError, match="needs 2 pages of 16, has 1"):
        step(model, cache, [(sequence, 20)], n_vocab=257)
    with pytest.raises(ValueError, match="21 of 20"):
        step(model, cache, [(sequence, 21)], n_vocab=257)
