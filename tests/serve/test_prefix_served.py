"""The prefix cache over a real port: what is reported, and that no text shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.plan import AttentionPlan
from gpt.tokenizer import Tokenizer
from serve.client import Completion, RequestError
from tests.serve.scripted import NAN, ScriptedModel
from tests.serve.served import Served
from tests.strategies import build

BYTES = Tokenizer.bytes()
PROMPT = "The same long beginning of every question, and then: "
Serve = Callable[..., Served]


def real(pattern: list[str], **fields: Any) -> GPT:
    config = GPTConfig(
        vocab_size=BYTES.n_vocab, block_size=128, n_layer=2, n_head=2, d_model=16, pattern=pattern,
        init_std=0.3, **fields,
    )  # fmt: skip
    return build(config)


OPTIONS = {"dtype": torch.float64, "page_size": 4, "prefill_chunk": 16, "n_pages": 200}


@pytest.mark.parametrize("pattern", [["causal"], ["window:9+sinks:2", "causal"], ["window:20"]])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"seed": 3}])
def test_the_text_is_the_same_cold_and_warm(
    serve: Serve, pattern: list[str], settings: dict[str, float]
) -> None:  # S7
    served = serve(real(pattern), **OPTIONS)

    def ask(prompt: str) -> Completion:
        return served.client.generate(prompt, max_tokens=12, **settings)

    cold, warm = ask(PROMPT), ask(PROMPT)
    assert cold.token_ids == warm.token_ids
    assert (cold.finish.cached_tokens, warm.finish.cached_tokens) == (0, 52)
    assert warm.finish.prompt_tokens == 53
    other = ask(PROMPT[:30] + "else")
    assert other.finish.cached_tokens == 28
    without = serve(real(pattern), **OPTIONS, prefix_cache=False)
    answers = [without.client.generate(p, max_tokens=12, **settings) for p in [PROMPT] * 2]
    assert [answer.token_ids for answer in answers] == [cold.token_ids] * 2
    assert [answer.finish.cached_tokens for answer in answers] == [0, 0]


ALL_FIELDS = {
    "attn_softcap": 2.0, "value_embeddings": True, "conv_width": 6, "residual_scalars": True,
    "x0_scalars": True, "logit_softcap": 9.0, "zero_init": True, "tie_embeddings": False,
}  # fmt: skip


def test_a_model_with_every_field_is_served_as_it_is_trained(serve: Serve) -> None:
    """Short of pages, in company, cold and warm: each token is what the full forward of all before
    it likes best. Its own texts of a prompt are those it makes without sharing."""
    from concurrent.futures import ThreadPoolExecutor

    model = real(["window:9+sinks:2", "causal"], **ALL_FIELDS)
    served = serve(model, **(OPTIONS | {"n_pages": 24}))
    prompts = [PROMPT, PROMPT[:41], PROMPT[:30] + "else", "short", PROMPT]
    for _ in range(2):
        with ThreadPoolExecutor(len(prompts)) as pool:
            calls = [
                pool.submit(served.client.generate, p, max_tokens=14, temperature=0.0)
                for p in prompts
            ]
            made = [list(call.result().token_ids) for call in calls]
        for prompt, tokens in zip(prompts, made, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([BYTES.encode(prompt) + tokens]))[0]
            assert len(tokens) == 14
            assert logits.argmax(-1)[-15:-1].tolist() == tokens
    assert served.engine.preemptions > 0
    served.client.generate(PROMPT, max_tokens=1)  # whichever pages the others have taken
    again = served.client.generate(PROMPT, max_tokens=8, seed=3, n=3)
    assert [choice.finish.cached_tokens for choice in again.choices] == [52] * 3
    without = serve(model, **OPTIONS, prefix_cache=False)
    apart = without.client.generate(PROMPT, max_tokens=8, seed=3, n=3)
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in apart.choices]


def test_texts_of_one_prompt_share_it(serve: Serve) -> None:
    served = serve(real(["causal"]), **OPTIONS)
    together = served.client.generate(PROMPT, max_tokens=8, seed=3, n=4)
    assert [choice.finish.cached_tokens for choice in together.choices] == [0, 52, 52, 52]
    without = serve(real(["causal"]), **OPTIONS, prefix_cache=False)
    apart = without.client.generate(PROMPT, max_tokens=8, seed=3, n=4)
    assert [c.token_ids for c in together.choices] == [c.token_ids for c in apart.choices]


def test_scores_of_a_prompt_are_those_without_a_cache(serve: Serve) -> None:
    served = serve(real(["causal"]), **OPTIONS)
    asked = {"max_tokens": 3, "temperature": 0.0, "prompt_logprobs": 1}
    cold, warm = (served.client.generate(PROMPT, **asked) for _ in range(2))
    assert cold.prompt_scores == warm.prompt_scores
    assert len(cold.prompt_scores) == 52
    assert warm.finish.cached_tokens == 0
    first, second = (served.client.score(PROMPT) for _ in range(2))
    assert first.scores == second.scores


def test_preempted_texts_that_start_from_the_cache_are_those_of_a_large_one(
    serve: Serve,
) -> None:  # S8
    from concurrent.futures import ThreadPoolExecutor

    def answers(n_pages: int) -> list[list[int]]:
        served = serve(real(["causal", "window:9"]), **(OPTIONS | {"n_pages": n_pages}))
        with ThreadPoolExecutor(6) as pool:
            calls = [
                pool.submit(served.client.generate, PROMPT[: 20 + i], max_tokens=40, seed=i)
                for i in range(6)
            ]
            found = [call.result().token_ids for call in calls]
        preemptions.append(served.engine.preemptions)
        return found

    preemptions: list[int] = []
    assert answers(20) == answers(200)
    assert preemptions[0] > 0
    assert preemptions[1] == 0


def test_what_a_failed_step_filled_is_found_by_nobody(serve: Serve) -> None:
    model = ScriptedModel(BYTES.n_vocab, lambda position, token: 65)
    served = serve(model, page_size=4)

    def cached() -> int:
        return served.client.generate("twelve bytes", max_tokens=1).finish.cached_tokens

    model.fail_next = RuntimeError("broken")
    with pytest.raises(RequestError):
        cached()
    assert [cached(), cached()] == [0, 8]


def test_what_led_to_no_numbers_is_found_by_nobody(serve: Serve) -> None:
    script = [NAN]
    served = serve(ScriptedModel(BYTES.n_vocab, lambda *_: script[0]), page_size=4)
    with pytest.raises(RequestError, match="not finite"):
        served.client.generate("twelve bytes", max_tokens=1)
    script[0] = 65
    again = [served.client.generate("twelve bytes", max_tokens=1) for _ in range(2)]
    assert [answer.finish.cached_tokens for answer in again] == [0, 8]


class Forgetful(ScriptedModel):
    """Its logits are fine; what it leaves in the cache at position 5 is not, the first time."""

    def __call__(self, ids: Tensor, plan: AttentionPlan, cache: KVCache) -> Tensor:
        logits = super().__call__(ids, plan, cache)
        if self.entered == 1:
            slots = plan.layer(0).slots
            assert slots is not None
            cache.layer(0).values[:, slots[5]] = torch.nan
        else:
            cache.layer(0).values[:] = 0
        return logits


def test_numbers_that_are_not_finite_are_found_by_nobody(serve: Serve) -> None:
    served = serve(Forgetful(BYTES.n_vocab, lambda *_: 65), page_size=4)
    answers = [served.client.generate("sixteen bytes...", max_tokens=1) for _ in range(3)]
    assert [answer.finish.cached_tokens for answer in answers] == [0, 0, 12]
