"""What a request can ask for besides how to sample, over a real port with a scripted model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import pytest
import torch

from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.score import score
from gpt.tokenizer import Tokenizer
from serve.client import Completion, RequestError
from tests.serve.scripted import ANY, NAN, ScriptedModel
from tests.serve.served import Served, eventually

BYTES = Tokenizer.bytes()
Serve = Callable[..., Served]


def saying(text: str, **options: int) -> ScriptedModel:
    """Says this after a prompt of one token, then end-of-text."""
    return ScriptedModel.of(BYTES, list(text.encode()), **options)


def anything(**options: int) -> ScriptedModel:
    return ScriptedModel(BYTES.n_vocab, lambda *_: ANY, **options)


def refused(call: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.code == "INVALID_ARGUMENT"
    return caught.value


def test_several_texts_of_a_prompt_differ_and_can_be_had_again(serve: Serve) -> None:
    served = serve(anything(), max_running=3)
    found = served.client.generate("x", n=5, seed=7, max_tokens=12)
    texts = [choice.token_ids for choice in found.choices]
    assert len({tuple(ids) for ids in texts}) == 5
    assert [choice.finish.choice for choice in found.choices] == [0, 1, 2, 3, 4]
    assert served.client.generate("x", seed=7, max_tokens=12).token_ids == texts[0]
    again = served.client.generate("x", n=3, seed=7, max_tokens=12)
    assert [choice.token_ids for choice in again.choices] == texts[:3]


def test_a_stream_of_several_texts_says_whose_each_piece_is(serve: Serve) -> None:
    served = serve(anything())
    whole = served.client.generate("x", n=4, seed=3, max_tokens=9)
    stream = served.client.stream("x", n=4, seed=3, max_tokens=9)
    ids: dict[int, list[int]] = {}
    pieces: dict[int, bytes] = {}
    for delta in stream:
        ids.setdefault(delta.choice, []).extend(delta.token_ids)
        pieces[delta.choice] = pieces.get(delta.choice, b"") + b"".join(delta.pieces)
    assert ids == {i: choice.token_ids for i, choice in enumerate(whole.choices)}
    assert pieces == {i: bytes(tokens) for i, tokens in ids.items()}
    assert set(stream.finishes) == {0, 1, 2, 3}
    assert {finish.reason for finish in stream.finishes.values()} == {"length"}


def test_too_many_texts_or_the_same_text_again_are_refused(serve: Serve) -> None:
    served = serve(anything())
    for n in (0, 17, 2**32 - 1):
        assert refused(lambda n=n: served.client.generate("x", n=n)).violations[0][0] == "spec.n"
    same = refused(lambda: served.client.generate("x", n=2, temperature=0))
    assert "would be the same" in str(same)


def test_one_text_that_fails_ends_the_request_and_leaves_nothing(serve: Serve) -> None:
    tokens = iter([ANY] * 3 + [NAN])
    served = serve(ScriptedModel(BYTES.n_vocab, lambda *_: next(tokens, ANY)))
    with pytest.raises(RequestError) as caught:
        served.client.generate("x", n=3, max_tokens=20)
    assert caught.value.code == "INTERNAL"
    served.check_for_leaks()


def test_echo_begins_the_text_with_the_prompt(serve: Serve) -> None:
    served = serve(saying("bc"))
    assert served.client.generate("a", echo=True).text == "abc"
    assert served.client.generate("a", echo=True, stop=["ab"]).text == "abc", "not in the prompt"
    deltas = list(served.client.stream("a", echo=True))
    assert "".join(delta.text for delta in deltas) == "abc"
    assert served.client.generate(list("🌶".encode())[:1], echo=True, max_tokens=1).text == "\ufffdb"


def test_a_prompt_s_tokens_are_scored_before_the_text(serve: Serve) -> None:
    torch.manual_seed(0)
    config = GPTConfig.preset("nano", vocab_size=BYTES.n_vocab, block_size=96, init_std=0.3)
    model = GPT(config).eval()
    served = serve(model, prefill_chunk=8)
    prompt = "what light through yonder window"
    wanted = score(model, BYTES, [*prompt.encode()], top=2)[1:]
    got = [
        served.client.generate(prompt, prompt_logprobs=2, max_tokens=3, seed=1).prompt_scores,
        served.client.generate(prompt, prompt_logprobs=2, max_tokens=3, seed=1, n=2).prompt_scores,
    ]
    stream = served.client.stream(prompt, prompt_logprobs=2, max_tokens=3, seed=1)
    list(stream)
    for scores in (*got, stream.prompt_scores):
        assert [each.token for each in scores] == [*prompt.encode()][1:]
        # Not from end-of-text, so the first few differ from a document's.
        assert len(scores) == len(wanted)
        assert all(len(each.top) == 2 for each in scores)
    assert got[0] == stream.prompt_scores
    plain = served.client.generate(prompt, max_tokens=3, seed=1)
    assert plain.prompt_scores == []
    assert (
        plain.token_ids
        == served.client.generate(prompt, max_tokens=3, seed=1, prompt_logprobs=0).token_ids
    )


def test_a_stop_token_ends_the_text_and_is_named(serve: Serve) -> None:
    served = serve(saying("abc"))
    found = served.client.generate("x", stop_tokens=[ord("c"), ord("z")])
    assert (found.text, found.finish.reason) == ("ab", "stop")
    assert (found.finish.matched_stop, found.finish.matched_stop_token) == (None, ord("c"))
    assert found.finish.completion_tokens == 3


def test_ends_do_not_come_before_the_minimum(serve: Serve) -> None:  # S17
    served = serve(saying("a"))
    found = served.client.generate("x", min_tokens=4, max_tokens=9, stop_tokens=[0], seed=0)
    assert len(found.token_ids) >= 4
    assert BYTES.eot not in found.token_ids[:4]
    assert 0 not in found.token_ids[:4]
    served = serve(saying("abababc"))
    assert served.client.generate("x", stop=["ab"], min_tokens=3).text == "ab"
    assert served.client.generate("x", stop=["ab"], min_tokens=4, temperature=0).text == "ab"
    assert served.client.generate("x", stop=["ab"], min_tokens=5, temperature=0).text == "abab"


@pytest.mark.parametrize("name", ["stop_tokens", "allowed_tokens"])
def test_tokens_beyond_the_vocabulary_are_refused(serve: Serve, name: str) -> None:  # S17
    served = serve(anything())
    for token in (BYTES.n_vocab, 2**32 - 1):
        error = refused(
            lambda token=token: served.client.generate("x", min_tokens=1, **{name: [token]})
        )
        assert error.violations[0][0] == f"spec.{name}"
    error = refused(lambda: served.client.generate("x", logit_bias={BYTES.n_vocab: 1.0}))
    assert error.violations[0][0] == "spec.logit_bias"


def test_end_of_text_can_be_passed_over(serve: Serve) -> None:
    served = serve(ScriptedModel(BYTES.n_vocab, lambda *_: BYTES.eot))
    found = served.client.generate("x", ignore_end_of_text=True, max_tokens=5)
    assert found.token_ids == [BYTES.eot] * 5
    assert (found.text, found.finish.reason) == ("", "length")


def test_bias_and_allowed_tokens_choose_the_text(serve: Serve) -> None:
    served = serve(anything())
    found = served.client.generate("x", allowed_tokens=[97, 98], max_tokens=20, seed=1)
    assert set(found.token_ids) == {97, 98}
    found = served.client.generate("x", logit_bias={99: 100.0}, max_tokens=8, seed=1)
    assert found.token_ids == [99] * 8


def test_a_text_under_a_schema_is_json(serve: Serve) -> None:
    served = serve(anything(block_size=400))
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 3}, "on": {"type": "boolean"}},
        "required": ["name", "on"],
        "additionalProperties": False,
    }
    # Every byte is as likely, and of most texts too many would be spaces.
    found = served.client.generate(
        "x",
        json_schema=json.dumps(schema),
        n=3,
        seed=4,
        logit_bias=dict.fromkeys([9, 10, 13, 32], -50.0),
    )
    for choice in found.choices:
        assert choice.finish.reason in ("complete", "end_of_text")
        value = json.loads(choice.text)
        assert set(value) == {"name", "on"}


def test_a_text_ends_where_its_constraint_is_complete(serve: Serve) -> None:
    served = serve(saying("yes, and more"))
    found = served.client.generate("x", regex="(yes|no)", temperature=0)
    assert (found.text, found.finish.reason) == ("yes", "complete")
    found = served.client.generate(
        "x", grammar='start: "y" "e" /[st]+/', temperature=0, max_tokens=4
    )
    assert found.text.startswith("yes")


def test_constraints_that_cannot_be_met_or_read_are_refused(serve: Serve) -> None:  # S28
    chars = Tokenizer.chars("abc")
    served = serve(ScriptedModel.of(chars, []), chars)
    error = refused(lambda: served.client.generate("a", regex="文+"))
    assert error.violations == [
        ("spec.regex", "no text of this model's vocabulary can meet it; allow others")
    ]
    error = refused(lambda: served.client.generate("a", regex="(", json_schema="{}"))
    assert "a text has one constraint" in str(error)
    assert refused(lambda: served.client.generate("a", regex="(")).violations[0][0] == "spec.regex"


def test_a_dead_end_fails_its_request_alone(serve: Serve) -> None:
    """A search for one text that fits can only try so many."""
    chars = Tokenizer.chars("abcdefghij")
    served = serve(ScriptedModel(chars.n_vocab, lambda *_: chars.encode("a")[0]), chars)
    mate = served.client.stream("a", max_tokens=40)
    text = next(mate).text
    grammar = 'start: "a" "b" | "a" "文"'
    found = served.client.generate("a", grammar=grammar)  # the model says a, then must say b
    assert found.text == "ab"
    assert text + "".join(delta.text for delta in mate) == "a" * 40


def test_a_time_limit_returns_what_there_is(serve: Serve) -> None:
    served = serve(anything())
    served.model.hold()
    found: list[Completion] = []
    thread = threading.Thread(
        target=lambda: found.append(served.client.generate("x", time_limit_seconds=1.0, seed=1))
    )
    thread.start()
    eventually(lambda: served.model.entered == 1)
    served.model.allow(2)
    time.sleep(1.1)  # the limit passes while a step runs
    served.model.release()
    thread.join()
    assert found[0].finish.reason == "time_limit"
    assert 1 <= len(found[0].token_ids) <= 4
    served.check_for_leaks()


def test_a_time_limit_counts_while_a_request_waits(serve: Serve) -> None:
    served = serve(anything(), max_running=1)
    served.model.hold()
    first = served.client.stream("x", max_tokens=3)
    eventually(lambda: served.model.entered == 1)
    second = served.client.stream("x", time_limit_seconds=0.05)
    eventually(lambda: served.engine.held == 2)
    time.sleep(0.1)
    served.model.release()
    assert list(second) == []
    assert second.finish is not None
    assert (second.finish.reason, second.finish.completion_tokens) == ("time_limit", 0)
    assert len([id for delta in first for id in delta.token_ids]) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("time_limit_seconds", 0.0), ("time_limit_seconds", float("nan")), ("priority", 101),
     ("time_limit_seconds", float("inf")), ("time_limit_seconds", -1.0), ("priority", -101)],
)  # fmt: skip
def test_bad_limits_and_priorities_are_refused(serve: Serve, name: str, value: float) -> None:
    served = serve(anything())
    error = refused(lambda: served.client.generate("x", **{name: value}))
    assert error.violations[0][0] == f"spec.{name}"


def test_the_higher_priority_is_served_first(serve: Serve) -> None:
    began: list[int] = []

    def following(position: int, token: int) -> int:
        if position == 0:
            began.append(token)
        return ANY

    served = serve(ScriptedModel(BYTES.n_vocab, following), max_running=1)
    served.model.hold()
    threads = []
    for held, (prompt, priority) in enumerate([("a", 0), ("b", -5), ("c", 5)], start=1):
        settings = {"max_tokens": 2, "priority": priority}
        thread = threading.Thread(target=served.client.generate, args=(prompt,), kwargs=settings)
        thread.start()
        threads.append(thread)
        eventually(lambda held=held: served.engine.held == held)
        if held == 1:
            eventually(lambda: served.model.entered == 1)
    served.model.release()
    for thread in threads:
        thread.join()
    assert bytes(began) == b"acb"


def test_a_batch_hands_out_each_result_as_it_is_done(serve: Serve) -> None:
    served = serve(anything(), max_running=2, max_waiting=1)
    asked = [{"prompt": "x", "seed": i, "max_tokens": 3 + i} for i in range(12)]
    asked[5] = {"prompt": "x", "top_p": 0.0}
    asked[7] = {"prompt": "y" * 100}
    found = dict(served.client.batch(asked))
    assert set(found) == set(range(12))
    for i, settings in enumerate(asked):
        result = found[i]
        if i in (5, 7):
            assert isinstance(result, RequestError)
            assert result.code == "INVALID_ARGUMENT"
            assert result.violations[0][0] == ("spec.top_p" if i == 5 else "spec.text")
        else:
            assert isinstance(result, Completion)
            assert result.token_ids == served.client.generate(**settings).token_ids  # type: ignore[arg-type]


def test_a_batch_waits_for_places_that_others_have(serve: Serve) -> None:
    served = serve(anything(), max_running=1, max_waiting=0)
    served.model.hold()
    first = threading.Thread(target=lambda: served.client.generate("x", max_tokens=2))
    first.start()
    eventually(lambda: served.engine.held == 1)
    found: list[object] = []
    asked = [{"prompt": "x", "max_tokens": 3, "seed": i} for i in range(3)]
    batch = threading.Thread(target=lambda: found.extend(served.client.batch(asked)))
    batch.start()
    eventually(lambda: bool(served.engine._awaiting))
    served.model.release()
    first.join()
    batch.join()
    assert [type(result) for _, result in found] == [Completion] * 3  # type: ignore[misc, has-type]


def test_a_batch_does_not_wait_for_places_that_there_will_never_be(serve: Serve) -> None:
    served = serve(anything(), max_running=1, max_waiting=0)
    asked = [{"prompt": "x", "n": 2, "max_tokens": 2}, {"prompt": "x", "max_tokens": 2}]
    found = dict(served.client.batch(asked, timeout=20))
    assert isinstance(found[0], RequestError)
    assert found[0].code == "RESOURCE_EXHAUSTED"
    assert isinstance(found[1], Completion)


def test_a_batch_that_is_left_leaves_nothing(serve: Serve) -> None:
    served = serve(anything())
    served.model.hold()
    batch = served.client.batch([{"prompt": "x", "max_tokens": n} for n in range(1, 40)])
    thread = threading.Thread(target=lambda: next(batch))
    thread.start()
    eventually(lambda: served.model.entered >= 1)
    served.model.release()
    thread.join()
    batch.close()
    served.await_no_rpc()
    served.check_for_leaks()


def test_a_batch_of_none_or_too_many_is_refused(serve: Serve) -> None:
    served = serve(anything())
    for asked in ([], [{"prompt": "x"}] * 1025):
        error = refused(lambda asked=asked: list(served.client.batch(asked)))
        assert "1 to 1024 allowed" in str(error)
