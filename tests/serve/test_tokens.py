"""Tokenize and Detokenize over a real port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.tokenizer import END_OF_TEXT, Tokenizer
from serve.client import RequestError
from serve.service import MAX_TOKENIZING
from serve.tokens import MAX_IDS, MAX_TEXT_BYTES
from serve.v1 import generation_pb2 as pb
from tests.serve.scripted import ScriptedModel
from tests.serve.served import Served, eventually

BYTES = Tokenizer.bytes()
BPE = Tokenizer.bpe(
    ["to be, or not to be: that is the question\n" * 20], 300, special_tokens=["<|user|>"]
)
GAPS = Tokenizer("test", r"(?s:.)", [b"a", b"b"], special={END_OF_TEXT: 5, "<|x|>": 3})
Serve = Callable[..., Served]


def model_for(tokenizer: Tokenizer) -> ScriptedModel:
    return ScriptedModel(tokenizer.n_vocab, lambda *_: 0, block_size=8)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(model_for(BPE), BPE) as served:
        yield served


def refusal(call: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("to be"), max_size=60)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_pieces_lie_side_by_side_in_the_text_and_lead_back_to_it(served: Served, text: str) -> None:
    found = served.client.tokenize(text)
    assert found.ids == BPE.encode(text)
    assert b"".join(found.pieces) == text.encode()
    assert found.pieces == [BPE.token_bytes(token) for token in found.ids]
    ends = [*found.starts, len(text.encode())][1:]
    assert [text.encode()[a:b] for a, b in zip(found.starts, ends, strict=True)] == found.pieces
    back = served.client.detokenize(found.ids)
    assert (back.text, back.data) == (text, text.encode())


def test_the_answer_names_its_model_and_counts(served: Served) -> None:
    answer = served.stub.Tokenize(pb.TokenizeRequest(text="to be, or not"))
    assert answer.model == "scripted"
    assert answer.count == len(answer.ids) == len(answer.pieces) == len(answer.starts) > 0
    assert served.client.tokenize("to be", model="scripted").model == "scripted"
    assert served.client.detokenize([1], model="scripted").model == "scripted"


def test_only_ids_if_that_is_all_that_is_wanted(served: Served) -> None:
    text = "that is the question"
    short = served.client.tokenize(text, ids_only=True)
    assert short.ids == served.client.tokenize(text).ids
    assert (short.pieces, short.starts) == ([], [])


def test_nothing_has_no_tokens_and_no_text(served: Served) -> None:
    empty = served.client.tokenize("")
    assert (empty.ids, empty.pieces, empty.starts) == ([], [], [])
    assert served.client.detokenize([]).text == ""


def test_a_text_may_be_longer_than_the_context(served: Served) -> None:
    assert len(served.client.tokenize("the question " * 100).ids) > 100


def test_special_tokens_are_ordinary_text_unless_asked_for(served: Served) -> None:  # S19
    text = "a<|user|>é<|endoftext|>b"
    plain = served.client.tokenize(text)
    assert not set(plain.ids) & set(BPE.special.values())
    assert served.client.detokenize(plain.ids).text == text
    special = served.client.tokenize(text, special=True)
    assert special.ids == [
        *BPE.encode("a"), BPE.special["<|user|>"], *BPE.encode("é"), BPE.eot, *BPE.encode("b")
    ]  # fmt: skip
    assert b"".join(special.pieces) == text.encode()
    at = special.ids.index(BPE.eot)
    assert special.starts[at] == text.encode().index(END_OF_TEXT.encode())
    assert special.starts[at + 1] - special.starts[at] == len(END_OF_TEXT)
    # As in texts that are made, end-of-text adds nothing.
    assert served.client.detokenize(special.ids).text == "a<|user|>éb"


def test_part_of_a_character_keeps_its_bytes(serve: Serve) -> None:
    served = serve(model_for(BYTES))
    found = served.client.tokenize("é")
    assert found.pieces == [b"\xc3", b"\xa9"]
    half = served.client.detokenize(found.ids[:1])
    assert (half.text, half.data) == ("\N{REPLACEMENT CHARACTER}", b"\xc3")


def test_what_the_vocabulary_cannot_express_is_refused_with_its_place(serve: Serve) -> None:  # S27
    chars = Tokenizer.chars("abc")
    served = serve(model_for(chars), chars)
    error = refusal(lambda: served.client.tokenize("ab文"))
    assert error.code == "INVALID_ARGUMENT"
    [(field, description)] = error.violations
    assert field == "text"
    assert "'文' (U+6587) at offset 2" in description
    assert served.client.tokenize("abc").ids == [0, 1, 2]


def test_ids_that_are_no_tokens_are_listed(serve: Serve) -> None:
    served = serve(model_for(GAPS), GAPS)
    error = refusal(lambda: served.client.detokenize([0, 6, 2, 2**32 - 1, 5, 4]))
    assert error.code == "INVALID_ARGUMENT"
    assert error.violations == [
        ("ids[1]", "token id 6 is outside the vocabulary (0 to 5)"),
        ("ids[2]", "token id 2 is no token of the vocabulary (0 to 5)"),
        ("ids[3]", "token id 4294967295 is outside the vocabulary (0 to 5)"),
        ("ids[5]", "token id 4 is no token of the vocabulary (0 to 5)"),
    ]
    assert served.client.detokenize([0, 3, 1, 5]).text == "a<|x|>b"


def test_a_million_bad_ids_still_fit_into_a_status(served: Served) -> None:
    error = refusal(lambda: served.client.detokenize([5000] * 500_000))
    assert error.code == "INVALID_ARGUMENT"
    assert len(error.violations) == 10
    assert error.violations[-1] == ("ids", "and 499991 more")


def test_more_than_the_limits_is_refused_with_the_numbers(served: Served, serve: Serve) -> None:
    error = refusal(lambda: served.client.tokenize("é" * (MAX_TEXT_BYTES // 2 + 1)))
    assert (error.code, error.violations[0][0]) == ("INVALID_ARGUMENT", "text")
    assert f"{MAX_TEXT_BYTES + 2} bytes long, {MAX_TEXT_BYTES} allowed" in str(error)
    error = refusal(lambda: served.client.detokenize([1] * (MAX_IDS + 1)))
    assert f"{MAX_IDS + 1} ids given, {MAX_IDS} allowed" in str(error)
    wide = Tokenizer("test", r"(?s:.+)", [b"x", b"x" * 1000])
    short = serve(model_for(wide), wide).client
    assert len(short.detokenize([1] * (MAX_TEXT_BYTES // 1000)).data) == 1_048_000
    error = refusal(lambda: short.detokenize([1] * (MAX_TEXT_BYTES // 1000 + 1)))
    assert "their text has 1049000 bytes" in str(error)


def test_as_much_as_the_limits_allow_is_answered(served: Served) -> None:
    found = served.client.tokenize("\x00" * MAX_TEXT_BYTES, ids_only=True)
    assert len(found.ids) == MAX_TEXT_BYTES
    assert served.client.detokenize(found.ids).data == bytes(MAX_TEXT_BYTES)


def test_they_are_answered_while_the_engine_is_busy(serve: Serve) -> None:
    model = model_for(BYTES)
    model.hold()
    served = serve(model, max_running=1, max_waiting=0)
    busy = served.stub.Generate.future(
        pb.GenerateRequest(spec=pb.GenerationSpec(text="x", max_tokens=1))
    )
    eventually(lambda: model.entered == 1)
    assert served.client.tokenize("ab").ids == [97, 98]
    assert served.client.detokenize([97]).text == "a"
    model.release()
    busy.result()


class Gate:
    """Holds up the tokenizing of texts that say `huge`, as a huge text would for a while."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = 0
        self.seen: list[str] = []
        self._open = threading.Event()
        encode = served.engine.tokenizer.encode

        def gated(text: str, **options: object) -> list[int]:
            self.seen.append(text)
            if text == "huge":
                self.entered += 1
                assert self._open.wait(20)
            return encode(text, **options)

        monkeypatch.setattr(served.engine.tokenizer, "encode", gated)

    def open(self) -> None:
        self._open.set()


def test_a_huge_text_holds_up_neither_health_checks_nor_texts(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:  # S22
    served = serve(model_for(BYTES), Tokenizer.bytes())
    gate = Gate(served, monkeypatch)
    huge = served.stub.Tokenize.future(pb.TokenizeRequest(text="huge"))
    eventually(lambda: gate.entered == 1)
    health = health_pb2_grpc.HealthStub(served.channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=10).status == 1
    assert served.client.generate("x", max_tokens=1).text == "\0"
    assert len(served.client.score("x").scores) == 1
    assert served.client.list_models()[0].name == "scripted"
    assert not huge.done()
    gate.open()
    assert list(huge.result().ids) == list(b"huge")


def test_too_many_at_once_are_told_when_to_come_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:  # S20
    served = serve(model_for(BYTES), Tokenizer.bytes())
    lane = served.server.listener.service._tokenizing
    gate = Gate(served, monkeypatch)
    with ThreadPoolExecutor(MAX_TOKENIZING) as pool:
        held = [pool.submit(served.client.tokenize, "huge")]
        eventually(lambda: gate.entered == 1)
        held += [pool.submit(served.client.tokenize, "short") for _ in range(MAX_TOKENIZING - 1)]
        eventually(lambda: lane.held == MAX_TOKENIZING)
        for call in (lambda: served.client.tokenize("x"), lambda: served.client.detokenize([1])):
            error = refusal(call)
            assert (error.code, error.retry_after) == ("RESOURCE_EXHAUSTED", 1)
            assert error.retryable
        assert served.client.generate("x", max_tokens=1).text == "\0"
        gate.open()
        assert all(call.result().ids for call in held)
    assert served.client.tokenize("x").ids == [ord("x")]


def test_cancelled_calls_leave_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(model_for(BYTES), Tokenizer.bytes())
    lane = served.server.listener.service._tokenizing
    gate = Gate(served, monkeypatch)
    calls = []
    for text in ("huge", "short"):  # in this order
        calls.append(served.stub.Tokenize.future(pb.TokenizeRequest(text=text)))
        eventually(lambda: gate.entered == 1 and lane.held == len(calls))
    for call in calls:
        call.cancel()
    served.await_no_rpc()
    late = refusal(lambda: served.client.tokenize("late", timeout=1))
    assert late.code == "DEADLINE_EXCEEDED"
    served.await_no_rpc()
    gate.open()
    eventually(lambda: lane.held == 0)
    assert gate.seen == ["huge"], "nobody waited for the others any more"


def test_while_draining_new_ones_are_refused_and_the_running_one_is_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(model_for(BYTES), Tokenizer.bytes())
    gate = Gate(served, monkeypatch)
    running = served.stub.Tokenize.future(pb.TokenizeRequest(text="huge"))
    eventually(lambda: gate.entered == 1)
    drained = asyncio.run_coroutine_threadsafe(served.server.listener.drain(20), served.server.loop)
    eventually(lambda: not served.server.listener.service._open)
    client = served.client
    for call in (
        lambda: client.tokenize("x"),
        lambda: client.detokenize([1]),
        lambda: client.score("x"),
        client.list_models,
        client.model,
    ):
        error = refusal(call)
        assert (error.code, error.retry_after) == ("UNAVAILABLE", 1)
        assert "shutting down" in str(error)
    assert not drained.done()
    gate.open()
    assert list(running.result().ids) == list(b"huge")
    assert drained.result(20)


def test_another_model_is_not_found(served: Served) -> None:
    client = served.client
    for call in (
        lambda: client.tokenize("x", model="other"),
        lambda: client.detokenize([1], model="other"),
        lambda: client.score("x", model="other"),
        lambda: client.model("other"),
    ):
        assert refusal(call).code == "NOT_FOUND"


def test_what_cannot_even_be_sent_is_refused_by_the_client(served: Served) -> None:
    for call, field in (
        (lambda: served.client.tokenize("\ud800"), "text"),
        (lambda: served.client.detokenize([-1]), "ids"),
        (lambda: served.client.detokenize([2**32]), "ids"),
        (lambda: served.client.detokenize(b"abc"), "ids"),
    ):
        error = refusal(call)
        assert error.code == "INVALID_ARGUMENT"
        assert [name for name, _ in error.violations] == [field]


def test_half_a_character_on_the_wire_is_refused(served: Served) -> None:
    raw = b"\x12\x02\xff\xfe"  # field 2, two bytes that are not UTF-8
    call = served.channel.unary_unary("/serve.v1.GenerationService/Tokenize")
    with pytest.raises(grpc.RpcError) as caught:
        call(raw)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
