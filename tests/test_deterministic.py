"""Logits that depend on nothing but the tokens before them, bit by bit, and texts with them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from gpt.config import GPTConfig
from gpt.deterministic import make_deterministic, prove
from gpt.errors import ServerError
from gpt.model import GPT
from gpt.params import SamplingParams
from gpt.starter import Starter
from gpt.tokenizer import Tokenizer
from serve.asked import Asked
from serve.engine import Engine
from serve.results import Delta

TOKENIZER = Tokenizer.bytes()


def tiny(**options: Any) -> GPT:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "block_size": 600,
        "n_layer": 2,
        "n_head": 4,
        "d_model": 32,
        "init_std": 0.2,
    }
    config = GPTConfig(vocab_size=TOKENIZER.n_vocab, **{**settings, **options})
    model = GPT(config)
    for name, parameter in model.named_parameters():
        if "conv" in name or name.endswith("scale"):  # they begin as if they were not there
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize(
    "options",
    [
        {"n_kv_head": 2},
        {"pattern": "window:50"},
        {"pattern": "window:40+sinks:4", "position": "rotary", "mlp": "swiglu"},
        {"position": "alibi", "block_size": 300},
        {"attn_softcap": 3.0, "conv_width": 4, "value_embeddings": True, "x0_scalars": True},
    ],
    ids=str,
)
def test_logits_do_not_depend_on_cuts_and_company(options: dict[str, object]) -> None:
    make_deterministic(tiny(**options))


def test_it_is_found_out_at_the_start_where_it_does_not_hold() -> None:
    """Here because the products are left as they are."""
    with pytest.raises(ServerError, match="does not hold for this model on this machine"):
        prove(tiny())


def test_it_leaves_the_weights_and_their_names_alone() -> None:
    model = tiny(block_size=64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    make_deterministic(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(isinstance(m, nn.Linear) for m in (model.head, model.blocks[0].attn.qkv))


@dataclass
class Served:
    """What the jobs gave: tokens and their log-probabilities; and how it came about."""

    texts: list[list[tuple[int, float]]]
    cached: int
    preemptions: int


def serve(model: GPT, jobs: list[tuple[list[int], SamplingParams]], **options: Any) -> Served:
    """Ask an engine for all jobs at once."""
    engine = Engine(
        model, TOKENIZER, name="t", page_size=4, fixed=True, check_every_step=True, **options
    )
    starter = Starter(model.config, TOKENIZER)
    cached = []

    async def one(prompt: list[int], params: SamplingParams) -> list[tuple[int, float]]:
        text: list[tuple[int, float]] = []
        async for event in engine.submit(Asked([starter.start(prompt, params)])):
            if isinstance(event, Delta):
                scores = [score.logprob for score in event.scores]
                text += zip(event.token_ids, scores, strict=True)
            else:
                cached.append(event.cached_tokens)
        return text

    async def run() -> list[list[tuple[int, float]]]:
        return await asyncio.gather(*[one(*job) for job in jobs])

    engine.start()
    texts = asyncio.run(run())
    engine.stop()
    return Served(texts, sum(cached), engine.preemptions)


@pytest.mark.parametrize("pattern", ["causal", "window:20"])
def test_texts_and_their_scores_are_those_that_each_gets_alone(pattern: str) -> None:  # S5 to S8
    model = tiny(block_size=128, pattern=pattern)
    make_deterministic(model)
    rng = random.Random(0)
    shared = rng.choices(range(256), k=31)
    jobs = []
    for i in range(10):
        prompt = shared * (i % 2) + rng.choices(range(256), k=rng.randint(1, 50))
        params = SamplingParams(
            max_tokens=rng.randint(2, 40), temperature=rng.choice([0.0, 1.0]), seed=i, logprobs=0
        )
        jobs.append((prompt, params))
    alone = [serve(model, [job], n_pages=200).texts[0] for job in jobs]
    assert len({str(text) for text in alone}) == len(jobs)
    cached = preemptions = 0
    for size, n_pages in ((2, 60), (8, 50)):
        order = rng.sample(range(10), 10)
        crowd = [jobs[i] for i in order]
        found = serve(model, crowd, max_running=size, n_pages=n_pages, prefill_chunk=7 * size)
        assert found.texts == [alone[i] for i in order]
        cached, preemptions = cached + found.cached, preemptions + found.preemptions
    assert cached > 0
    assert preemptions > 0 or pattern != "causal"
