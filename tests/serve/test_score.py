"""Score, and log-probabilities beside a text that is made, over a real port."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.generate import generate
from gpt.model import GPT
from gpt.params import LOGPROB_FLOOR, SamplingParams
from gpt.plan import AttentionPlan
from gpt.score import score
from gpt.tokenizer import Tokenizer
from serve.client import RequestError, Scores
from serve.v1 import generation_pb2 as pb
from tests.serve.scripted import ANY, NAN, ScriptedModel
from tests.serve.served import Served, eventually

BYTES = Tokenizer.bytes()
Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def model() -> GPT:
    """A small model with random weights that are large enough to have opinions."""
    torch.manual_seed(0)
    return GPT(
        GPTConfig.preset("nano", vocab_size=BYTES.n_vocab, block_size=96, init_std=0.3)
    ).eval()


@pytest.fixture(scope="module")
def served(model: GPT) -> Iterator[Served]:
    with Served(model, prefill_chunk=16) as served:  # type: ignore[arg-type]  # any model will do
        served.engine.version = "609bc27092b10189"
        yield served
        served.check_for_leaks()


class Gated:
    """A model whose first forward waits until it is let go."""

    def __init__(self, model: GPT) -> None:
        self.model, self.config = model, model.config
        self.num_params = model.num_params
        self.open = threading.Event()

    def __call__(self, ids: Tensor, plan: AttentionPlan, cache: KVCache) -> Tensor:
        assert self.open.wait(20)
        return self.model.forward(ids, plan, cache)


def refusal(call: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


def request(text: bytes, **fields: int) -> pb.ScoreRequest:
    return pb.ScoreRequest(token_ids=pb.TokenIds(ids=text), **fields)


def logprobs_of(scores: Scores) -> list[float]:
    return [each.logprob for each in scores.scores]


TEXT = "ROMEO: what light, ďЖ한"


def test_it_is_what_the_local_scorer_says(served: Served, model: GPT) -> None:
    ours, local = served.client.score(TEXT, top=3), score(model, BYTES, TEXT, top=3)
    assert [each.token for each in ours.scores] == list(TEXT.encode())
    assert b"".join(each.piece for each in ours.scores) == TEXT.encode()
    assert logprobs_of(ours) == pytest.approx([made.logprob for made in local], rel=1e-5)
    for mine, theirs in zip(ours.scores, local, strict=True):
        assert [each.token for each in mine.top] == [each.token for each in theirs.top]
        assert [each.piece for each in mine.top] == [bytes([each.token]) for each in theirs.top]
        assert [each.logprob for each in mine.top] == pytest.approx(
            [each.logprob for each in theirs.top], rel=1e-5
        )
    assert served.client.score(list(TEXT.encode()), top=3).scores == ours.scores


def test_it_adds_up_to_the_loss_of_the_whole_text(served: Served, model: GPT) -> None:
    ids = list(TEXT.encode())
    with torch.inference_mode():
        logits = model(torch.tensor([[BYTES.eot, *ids[:-1]]]))[0]
    nats = float(F.cross_entropy(logits, torch.tensor(ids), reduction="sum"))
    found = served.client.score(TEXT)
    assert found.total_nats == pytest.approx(nats, rel=1e-5)
    assert found.total_nats == pytest.approx(-math.fsum(logprobs_of(found)), rel=1e-12)
    assert found.byte_count == len(ids)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / len(ids), rel=1e-5)
    assert all(each.top == () for each in found.scores)


def test_it_names_model_and_request_and_times(served: Served) -> None:
    first, second = served.client.score("a", model="scripted"), served.client.score("a")
    assert (first.model, first.model_version) == ("scripted", "609bc27092b10189")
    assert first.request_id
    assert first.request_id != second.request_id
    assert min(first.queue_seconds, first.prefill_seconds) >= 0


def test_a_text_may_fill_the_context_and_no_more(served: Served) -> None:  # S12
    assert len(served.client.score("x" * 96).scores) == 96
    for content, field in (("x" * 97, "text"), ([1] * 97, "token_ids"), ("x" * 10**6, "text")):
        error = refusal(lambda content=content: served.client.score(content))
        assert error.code == "INVALID_ARGUMENT"
        [(name, description)] = error.violations
        assert name == field
        assert str(len(content)) in description
        assert "96" in description


@pytest.mark.parametrize("content", ["", []])
def test_nothing_to_score_is_refused_and_the_next_is_answered(
    served: Served, content: str | list[int]
) -> None:  # S11
    error = refusal(lambda: served.client.score(content))
    assert error.code == "INVALID_ARGUMENT"
    assert [field for field, _ in error.violations] == ["text" if content == "" else "token_ids"]
    assert "empty" in str(error)
    assert len(served.client.score("x").scores) == 1


def test_all_that_is_wrong_comes_at_once(served: Served) -> None:
    error = refusal(lambda: served.client.score([1, 2**32 - 1], top=21))
    assert error.violations[0] == ("top", "21 is not in 0 to 20")
    assert error.violations[1][0] == "token_ids"
    assert "4294967295 at place 1" in error.violations[1][1]
    with pytest.raises(grpc.RpcError) as caught:
        served.stub.Score(pb.ScoreRequest())
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "content" in caught.value.details()
    assert refusal(lambda: served.client.score("x", top=-1)).violations[0][0] == "top"


def test_text_that_the_vocabulary_cannot_express_is_refused(serve: Serve) -> None:  # S27
    chars = Tokenizer.chars("abc")
    error = refusal(lambda: serve(ScriptedModel.of(chars, []), chars).client.score("ab文"))
    assert (error.code, error.violations[0][0]) == ("INVALID_ARGUMENT", "text")
    assert "'文' (U+6587) at offset 2" in str(error)


def test_end_of_text_alone_has_no_bytes_to_count_by(serve: Serve) -> None:
    served = serve(ScriptedModel(BYTES.n_vocab, lambda *_: ANY))
    found = served.client.score([BYTES.eot, ord("a")])
    assert found.byte_count == 1
    assert found.bits_per_byte == pytest.approx(found.total_nats / math.log(2))
    found = served.client.score([BYTES.eot])
    assert (found.byte_count, found.bits_per_byte) == (0, None)
    assert found.scores[0].piece == b""
    typed = served.client.score("<|endoftext|>")  # S19
    assert typed.byte_count == len(typed.scores) == 13


def test_what_is_ruled_out_is_told_as_the_floor_and_is_no_alternative(serve: Serve) -> None:  # S15
    class Sure(ScriptedModel):
        def __call__(self, *arguments: object) -> torch.Tensor:
            logits = super().__call__(*arguments)  # type: ignore[arg-type]
            return logits.masked_fill(logits < 0, -math.inf)

    served = serve(Sure(BYTES.n_vocab, lambda *_: ord("a")))
    found = served.client.score("ab", top=5)
    assert logprobs_of(found) == [0, LOGPROB_FLOOR]
    assert [[each.piece for each in score.top] for score in found.scores] == [[b"a"], [b"a"]]
    assert found.total_nats == -LOGPROB_FLOOR
    made = served.client.generate("x", top_k=1, logprobs=5, max_tokens=1)
    assert [(each.piece, each.logprob) for each in made.scores[0].top] == [(b"a", 0)]


def test_not_a_number_fails_only_the_text_that_met_it(serve: Serve) -> None:  # S16
    model = ScriptedModel(BYTES.n_vocab, lambda _, token: NAN if token == ord("P") else ANY)
    model.hold()
    served = serve(model)
    first = served.stub.Generate.future(
        pb.GenerateRequest(spec=pb.GenerationSpec(text="a", max_tokens=3, temperature=0))
    )
    eventually(lambda: model.entered == 1)
    bad, good = (served.stub.Score.future(request(text)) for text in (b"OPQ", b"RSP"))
    eventually(lambda: served.engine.held == 3)
    model.release()
    assert list(first.result().choices[0].token_ids) == [0, 0, 0]
    assert len(good.result().scores) == 3, "what would follow its last token is not asked"
    with pytest.raises(grpc.RpcError) as caught:
        bad.result()
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "not finite" in caught.value.details()
    assert any(tokens == 7 for tokens, _ in model.steps), "they were one batch"


def test_cancelling_in_mid_prefill_stops_within_a_chunk(serve: Serve) -> None:  # S10
    model = ScriptedModel(BYTES.n_vocab, lambda *_: ANY)
    model.hold()
    served = serve(model, prefill_chunk=4)
    call = served.stub.Score.future(request(bytes(40)))
    model.allow()
    eventually(lambda: model.entered == 2)
    assert served.engine.pages_used > 0
    call.cancel()
    served.await_no_rpc()
    model.release()
    served.check_for_leaks()
    assert model.steps == [(4, 4), (4, 4)]


def test_a_deadline_frees_everything(serve: Serve) -> None:
    model = ScriptedModel(BYTES.n_vocab, lambda *_: ANY)
    model.hold()
    served = serve(model)
    assert refusal(lambda: served.client.score("a", timeout=0.2)).code == "DEADLINE_EXCEEDED"
    served.await_no_rpc()
    model.release()
    served.check_for_leaks()


def test_it_waits_in_the_same_queue_as_texts(serve: Serve) -> None:  # S20
    model = ScriptedModel(BYTES.n_vocab, lambda *_: ANY)
    model.hold()
    served = serve(model, max_running=1, max_waiting=1)
    calls = [served.stub.Score.future(request(b"ab")) for _ in range(2)]
    eventually(lambda: served.engine.held == 2)
    error = refusal(lambda: served.client.score("x"))
    assert (error.code, error.retry_after) == ("RESOURCE_EXHAUSTED", 1)
    assert refusal(lambda: served.client.generate("x")).code == "RESOURCE_EXHAUSTED"
    model.release()
    assert [len(call.result().scores) for call in calls] == [2, 2]
    assert model.steps == [(2, 2), (2, 2)], "one after the other"


def test_a_text_larger_than_the_cache_is_refused(serve: Serve) -> None:
    served = serve(ScriptedModel(BYTES.n_vocab, lambda *_: ANY), n_pages=3, page_size=4)
    error = refusal(lambda: served.client.score("x" * 9))
    assert error.code == "INVALID_ARGUMENT"
    assert error.violations[0][0] == "text"
    assert "9 tokens of cache, but the server's holds 8" in str(error)
    assert len(served.client.score("x" * 8).scores) == 8


def test_preempted_in_company_it_says_the_same(served: Served, model: GPT, serve: Serve) -> None:
    texts = [(f"{i}: " + TEXT * 3)[:40] for i in range(6)]
    alone = [logprobs_of(served.client.score(text)) for text in texts]
    gated = Gated(model)
    small = serve(gated, n_pages=12, page_size=8, prefill_chunk=8, max_running=9)
    makers = [
        small.stub.Generate.future(
            pb.GenerateRequest(spec=pb.GenerationSpec(text="x", max_tokens=40, seed=i))
        )
        for i in range(3)
    ]
    calls = [small.stub.Score.future(request(text.encode())) for text in texts]
    # Together they need far more than the pool has, in whatever order they came.
    eventually(lambda: small.engine.held == 9)
    gated.open.set()
    for call, expected in zip(calls, alone, strict=True):
        found = [each.chosen.logprob for each in call.result().scores]
        assert found == pytest.approx(expected, rel=1e-4)
    for maker in makers:
        maker.result()
    assert small.engine.preemptions > 0


SETTINGS = {"seed": 5, "max_tokens": 12, "logprobs": 2, "temperature": 0.7, "top_k": 9}


def test_a_text_comes_with_the_sampler_s_log_probabilities(served: Served, model: GPT) -> None:
    local = list(generate(model, BYTES, "JULIET:", SamplingParams(**SETTINGS)))
    whole = served.client.generate("JULIET:", **SETTINGS)
    assert [score.token for score in whole.scores] == whole.token_ids
    assert whole.token_ids == [piece.token for piece in local]
    assert [score.logprob for score in whole.scores] == pytest.approx(
        [piece.logprob for piece in local], rel=1e-5
    )
    for mine, theirs in zip(whole.scores, local, strict=True):
        assert [each.token for each in mine.top] == [each.token for each in theirs.top]
    deltas = list(served.client.stream("JULIET:", **SETTINGS))
    assert [score for delta in deltas for score in delta.scores] == whole.scores
    assert all(len(delta.scores) == len(delta.token_ids) for delta in deltas)


def test_a_made_text_scores_what_it_was_made_with(served: Served) -> None:
    """The same numbers, whether a token was drawn or given."""
    made = served.client.generate([BYTES.eot, ord("J")], **SETTINGS)
    given = served.client.score([ord("J"), *made.token_ids], top=2)
    assert logprobs_of(given)[1:] == pytest.approx([s.logprob for s in made.scores], rel=1e-4)
    assert [[each.token for each in score.top] for score in given.scores[1:]] == [
        [each.token for each in score.top] for score in made.scores
    ]


def test_log_probabilities_are_told_only_if_asked_for(served: Served) -> None:
    quiet = {**SETTINGS, "logprobs": None}
    whole = served.client.generate("J", **quiet)
    assert whole.scores == []
    assert [delta.scores for delta in served.client.stream("J", **quiet) if delta.scores] == []
    zero = served.client.generate("J", **{**SETTINGS, "logprobs": 0})  # S14
    assert len(zero.scores) == len(zero.token_ids)
    assert all(score.top == () for score in zero.scores)
    assert zero.token_ids == whole.token_ids
