"""Many requests at once: batching, cancelling, failing, waiting; each request on its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from gpt.tokenizer import Tokenizer
from serve.client import Completion, RequestError
from serve.v1 import generation_pb2 as pb
from tests.serve.scripted import NAN, ScriptedModel
from tests.serve.served import Served, eventually

BYTES = Tokenizer.bytes()
Serve = Callable[..., Served]


def successor(position: int, token: int) -> int:
    """Each token is followed by the next byte: a mixed-up request would show at once."""
    return (token + 1) % 256


def counting(block_size: int = 64, pattern: str = "causal") -> ScriptedModel:
    return ScriptedModel(BYTES.n_vocab, successor, block_size=block_size, pattern=pattern)


def request(prompt: bytes, **settings: object) -> pb.GenerateRequest:
    ids = pb.TokenIds(ids=prompt)
    return pb.GenerateRequest(spec=pb.GenerationSpec(token_ids=ids, **settings))


def ids_of(response: pb.GenerateResponse) -> list[int]:
    return list(response.choices[0].token_ids)


def test_requests_join_and_leave_a_running_batch(serve: Serve) -> None:
    model = counting()
    model.hold()
    served = serve(model)
    first = served.stub.Generate.future(request(b"a", max_tokens=4))
    eventually(lambda: model.entered == 1)
    second = served.stub.Generate.future(request(b"xyz", max_tokens=2))
    eventually(lambda: served.engine.held == 2)
    model.release()
    assert bytes(ids_of(first.result())) == b"bcde"
    assert bytes(ids_of(second.result())) == b"{|"
    # (tokens run, sequences that got one): alone, with b's prompt, both, alone again.
    assert model.steps == [(1, 1), (4, 2), (2, 2), (1, 1)]


def test_a_long_prompt_does_not_hold_up_a_stream(serve: Serve) -> None:  # S21
    model = counting()
    model.hold()
    served = serve(model, prefill_chunk=8, max_running=4)
    stream = served.stub.Generate.future(request(b"a", max_tokens=8))
    eventually(lambda: model.entered == 1)
    long = served.stub.Generate.future(request(bytes(40), max_tokens=1))
    eventually(lambda: served.engine.held == 2)
    model.release()
    assert ids_of(long.result()) == [1]
    assert bytes(ids_of(stream.result())) == b"bcdefghi"
    assert model.steps == [(1, 1), (9, 1), (9, 1), (9, 1), (9, 1), (9, 2), (1, 1), (1, 1)]


def test_forty_requests_get_each_its_own_text(serve: Serve) -> None:
    served = serve(counting(), max_running=8)
    calls = {i: served.stub.Generate.future(request(bytes([i]), max_tokens=20)) for i in range(40)}
    for i, call in calls.items():
        assert ids_of(call.result()) == [i + k for k in range(1, 21)]
    assert max(got for _, got in served.model.steps) <= 8


def test_out_of_pages_requests_wait_their_turn_and_all_finish(serve: Serve) -> None:  # S8
    served = serve(counting(), n_pages=8, page_size=4, max_running=8, prefill_chunk=8)
    calls = {i: served.stub.Generate.future(request(bytes([i]), max_tokens=20)) for i in range(12)}
    for i, call in calls.items():
        assert ids_of(call.result()) == [i + k for k in range(1, 21)]
    assert served.engine.preemptions > 0


def test_a_request_larger_than_the_cache_is_refused(serve: Serve) -> None:
    served = serve(counting(), n_pages=3, page_size=4)
    with pytest.raises(RequestError, match=r"holds 8; ask for fewer tokens") as caught:
        served.client.generate("x", max_tokens=9)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert len(served.client.generate("x", max_tokens=8).token_ids) == 8


def test_beyond_the_queue_requests_are_told_when_to_come_again(serve: Serve) -> None:  # S20
    model = counting()
    model.hold()
    served = serve(model, max_running=1, max_waiting=2)
    with ThreadPoolExecutor(3) as pool:
        held = [pool.submit(served.client.generate, "a", max_tokens=2) for _ in range(3)]
        eventually(lambda: served.engine.held == 3)
        with pytest.raises(RequestError) as caught:
            served.client.generate("a")
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        assert caught.value.retryable
        assert caught.value.retry_after == 1
        model.release()
        assert [call.result().text for call in held] == ["bc"] * 3
    assert served.client.generate("a", max_tokens=1).text == "b"


def test_cancelling_in_mid_prefill_stops_within_a_chunk(serve: Serve) -> None:  # S10
    model = counting()
    model.hold()
    served = serve(model, prefill_chunk=4)
    call = served.stub.Generate.future(request(bytes(40), max_tokens=20))
    model.allow()
    eventually(lambda: model.entered == 2)
    assert served.engine.pages_used > 0
    call.cancel()
    served.await_no_rpc()
    model.release()
    served.check_for_leaks()
    assert model.steps == [(4, 0), (4, 0)]


def test_cancelling_in_mid_stream_stops_within_a_step(serve: Serve) -> None:  # S10
    model = counting()
    model.hold()
    served = serve(model)
    with served.client.stream("a", max_tokens=50) as stream:
        model.allow(3)
        assert next(stream).text.startswith("b")
        eventually(lambda: model.entered == 4)
        stream.cancel()
        served.await_no_rpc()
    model.release()
    served.check_for_leaks()
    assert len(model.steps) == 4


def test_cancelling_a_waiting_request_removes_it(serve: Serve) -> None:
    model = counting(block_size=5000)
    model.hold()
    served = serve(model, max_running=1)
    running = served.stub.Generate.future(request(b"a", max_tokens=4900))
    eventually(lambda: model.entered == 1)
    waiting = served.stub.Generate.future(request(b"vwxyz", max_tokens=2))
    eventually(lambda: served.engine.held == 2)
    waiting.cancel()

    def gone_after_a_step() -> bool:
        model.allow()
        return served.engine.held == 1

    eventually(gone_after_a_step)
    assert not running.done()
    running.cancel()
    served.await_no_rpc()
    model.release()
    served.check_for_leaks()
    assert set(model.steps) == {(1, 1)}, "its prompt was never run"


def test_three_hundred_calls_cancelled_at_any_time_leave_nothing(serve: Serve) -> None:  # S9
    served = serve(counting(), max_running=4, max_waiting=400, n_pages=20, page_size=4)
    calls = []
    for i in range(300):
        call = served.stub.Generate.future(request(bytes([i % 100]), max_tokens=1 + i % 30))
        calls.append(call)
        if i % 3:
            calls[i // 2].cancel()
    for i, call in enumerate(calls):
        if not call.cancelled():
            assert ids_of(call.result()) == [i % 100 + k for k in range(1, 2 + i % 30)]
    served.await_no_rpc()
    served.check_for_leaks()


def test_a_deadline_frees_everything(serve: Serve) -> None:
    model = counting()
    model.hold()
    served = serve(model)
    with pytest.raises(RequestError, match="time limit") as caught:
        served.client.generate("a", timeout=0.2)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    served.await_no_rpc()
    model.release()
    served.check_for_leaks()


def test_not_a_number_fails_only_the_request_that_met_it(serve: Serve) -> None:  # S16
    def following(position: int, token: int) -> int:
        return NAN if token == ord("P") else successor(position, token)

    model = ScriptedModel(BYTES.n_vocab, following)
    model.hold()
    served = serve(model)
    first = served.stub.Generate.future(request(b"a", max_tokens=6))
    eventually(lambda: model.entered == 1)
    others = [
        served.stub.Generate.future(request(prompt, max_tokens=6)) for prompt in (b"0", b"M", b"A")
    ]
    eventually(lambda: served.engine.held == 4)
    model.release()
    assert bytes(ids_of(first.result())) == b"bcdefg"
    assert bytes(ids_of(others[0].result())) == b"123456"
    assert bytes(ids_of(others[2].result())) == b"BCDEFG"
    with pytest.raises(grpc.RpcError) as caught:  # M N O P and then
        others[1].result()
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "not finite" in caught.value.details()
    assert (4, 4) in model.steps, "they were one batch"


def test_a_step_that_raises_fails_those_in_it_and_the_engine_goes_on(serve: Serve) -> None:
    model = counting()
    model.hold()
    served = serve(model, max_running=1)
    touched = served.stub.Generate.future(request(b"a", max_tokens=2))
    eventually(lambda: model.entered == 1)
    waiting = served.stub.Generate.future(request(b"x", max_tokens=2))
    eventually(lambda: served.engine.held == 2)
    model.fail_next = RuntimeError("not for the caller's eyes")
    model.release()
    with pytest.raises(grpc.RpcError) as caught:
        touched.result()
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "eyes" not in caught.value.details(), "details of ours are for the log"
    assert bytes(ids_of(waiting.result())) == b"yz"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
    ids=["python", "cpu", "gpu"],
)
def test_a_step_that_finds_no_memory_is_told_apart(serve: Serve, error: Exception) -> None:
    model = counting()
    served = serve(model)
    model.fail_next = error
    with pytest.raises(RequestError, match="no memory left") as caught:
        served.client.generate([1], max_tokens=2)
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert served.client.generate([1], max_tokens=2).token_ids == [2, 3]


def test_a_model_that_fails_on_everything_ends_the_engine(serve: Serve) -> None:
    """One that a request has brought down goes on; this one would fail for ever."""
    model = counting()
    served = serve(model)
    model.fail_always = MemoryError("no more")
    with pytest.raises(RequestError) as caught:
        served.client.generate([1], max_tokens=2)
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert isinstance(served.engine.ended.exception(10), MemoryError)
    assert served.engine.pages_used == 0


def test_an_engine_that_fails_as_a_whole_says_so_and_hangs_nobody(serve: Serve) -> None:
    model = counting()
    model.hold()
    served = serve(model)
    call = served.stub.Generate.future(request(b"a", max_tokens=9))
    eventually(lambda: model.entered == 1)
    served.engine._scheduler.check_integrity = lambda: 1 / 0  # type: ignore[method-assign]
    model.release()
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert isinstance(served.engine.ended.exception(10), ZeroDivisionError)
    with pytest.raises(RequestError) as refused:
        served.client.generate("a")
    assert refused.value.code == "UNAVAILABLE"


def test_the_server_mints_its_own_request_ids(serve: Serve) -> None:  # S18
    served = serve(counting())
    same = [("x-request-id", "mine")]
    calls = [
        served.stub.Generate.future(request(b"a", max_tokens=5), metadata=same) for _ in range(2)
    ]
    answers = [call.result() for call in calls]
    assert [bytes(ids_of(answer)) for answer in answers] == [b"bcdef"] * 2
    assert len({answer.prompt.request_id for answer in answers}) == 2


def test_a_reader_that_stops_reading_holds_up_nobody_and_gets_its_text_later(serve: Serve) -> None:
    page = "so long a token that the connection's window soon is full " * 100
    tokenizer = Tokenizer("test", r"(?s:.+)", [b"a", page.encode()])
    served = serve(ScriptedModel(tokenizer.n_vocab, lambda *_: 1, block_size=500), tokenizer)
    slow = served.client.stream("a", max_tokens=400)
    deltas = [next(slow)]
    eventually(lambda: served.engine.held == 0)
    assert served.client.generate("a", max_tokens=3).text == page * 3
    deltas += list(slow)
    assert "".join(delta.text for delta in deltas) == page * 400
    assert slow.finish is not None
    assert slow.finish.completion_tokens == 400
    assert len(deltas) < 400, "what had piled up came in one piece"


def test_one_client_serves_many_threads(serve: Serve) -> None:
    served = serve(counting())
    found: dict[int, Completion] = {}

    def ask(i: int) -> None:
        found[i] = served.client.generate([i], max_tokens=10)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {i: c.token_ids for i, c in found.items()} == {
        i: [i + k for k in range(1, 11)] for i in range(8)
    }


def test_a_text_goes_past_the_context_if_every_layer_forgets(serve: Serve) -> None:
    """In a cache of five pages of four; what is not told to go on ends with the context."""
    served = serve(counting(8, "window:6"), n_pages=6, page_size=4, prefill_chunk=8)
    made = ids_of(served.stub.Generate(request(b"A", max_tokens=100)))
    assert made == list(range(66, 166))
    long = bytes(range(65, 95))
    assert ids_of(served.stub.Generate(request(long, max_tokens=2))) == [95, 96]
    assert len(ids_of(served.stub.Generate(request(b"A")))) == 8
    with pytest.raises(RequestError, match="context holds 8; shorten it, or set max_tokens"):
        served.client.generate("123456789")
    served.check_for_leaks()


def test_a_text_ends_with_the_context_if_a_layer_remembers_everything(serve: Serve) -> None:
    served = serve(counting(8))
    assert len(ids_of(served.stub.Generate(request(b"A", max_tokens=100)))) == 8
    with pytest.raises(RequestError, match=r"context holds 8; shorten it$"):
        served.client.generate("123456789", max_tokens=2)
