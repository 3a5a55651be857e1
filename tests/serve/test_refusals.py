"""What the service refuses: with the right status, all reasons at once, and at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import pytest

from gpt.tokenizer import Tokenizer
from serve.background import BackgroundServer
from serve.client import Client, RequestError
from serve.status import MAX_VIOLATIONS
from serve.v1 import generation_pb2 as pb
from tests.serve.scripted import ScriptedModel
from tests.serve.served import Served

BYTES = Tokenizer.bytes()
NAN, INF = float("nan"), float("inf")
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    model = ScriptedModel(BYTES.n_vocab, lambda *_: ord("a"), block_size=BLOCK_SIZE)
    with Served(model) as served:
        yield served


@pytest.fixture(autouse=True)
def still_answers(served: Served) -> Iterator[None]:
    """Whatever was refused, the next request is served, and no step was wasted on the refusal."""
    yield
    steps = len(served.model.steps)
    assert served.client.generate("x", max_tokens=1).text == "a"
    assert len(served.model.steps) == steps + 1
    assert served.engine.pages_used == 0


def refusal(call: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", NAN),  # S13
        ("temperature", INF),
        ("temperature", -INF),
        ("temperature", -1.0),
        ("top_p", NAN),
        ("top_p", INF),
        ("top_p", -1.0),
        ("top_p", 1.5),
        ("top_p", 0.0),  # S14: given, so not "unset"
        ("max_tokens", 0),
        ("seed", 2**63),
        ("stop", [""]),
        ("stop", ["x" * 1025]),
        ("stop", ["x"] * 17),
    ],
)
def test_a_setting_out_of_range_is_named(served: Served, field: str, value: object) -> None:
    settings = {field: value}
    for call in (
        lambda: served.client.generate("x", **settings),
        lambda: list(served.client.stream("x", **settings)),
    ):
        error = refusal(call)
        assert error.code == "INVALID_ARGUMENT"
        assert [name.partition("[")[0] for name, _ in error.violations] == [f"spec.{field}"]
        assert not error.retryable


def test_all_violations_come_at_once(served: Served) -> None:
    error = refusal(
        lambda: served.client.generate(
            "x" * (BLOCK_SIZE + 1), temperature=NAN, top_p=0, max_tokens=0, stop=["", "ok"]
        )
    )
    fields = [field for field, _ in error.violations]
    assert fields == [
        "spec.temperature",
        "spec.top_p",
        "spec.max_tokens",
        "spec.stop[0]",
        "spec.text",
    ]


def test_thousands_of_faults_still_fit_into_a_status(served: Served) -> None:
    """Too many stop strings, and the first 17 of them empty: more are not looked at."""
    error = refusal(lambda: served.client.generate("x", stop=[""] * 5000))
    assert error.code == "INVALID_ARGUMENT"
    assert len(error.violations) == MAX_VIOLATIONS + 1
    assert error.violations[-1][1] == f"and {1 + 17 - MAX_VIOLATIONS} more"


@pytest.mark.parametrize(
    "prompt", ["x" * (BLOCK_SIZE + 1), [0] * (BLOCK_SIZE + 1), "x" * 1_000_000]
)
def test_a_too_long_prompt_is_refused_with_the_numbers(
    served: Served, prompt: str | list[int]
) -> None:  # S12
    error = refusal(lambda: served.client.generate(prompt))
    assert error.code == "INVALID_ARGUMENT"
    [(field, description)] = error.violations
    assert field == ("spec.text" if isinstance(prompt, str) else "spec.token_ids")
    assert str(len(prompt)) in description
    assert str(BLOCK_SIZE) in description


def test_a_prompt_that_cannot_fit_is_not_even_tokenized(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(text: str) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(served.engine.tokenizer, "encode", fail)
    error = refusal(lambda: served.client.generate("x" * (BLOCK_SIZE + 1)))
    assert error.code == "INVALID_ARGUMENT"
    monkeypatch.undo()


def test_ids_beyond_the_vocabulary_are_named(served: Served) -> None:
    error = refusal(lambda: served.client.generate([1, BYTES.n_vocab]))
    [(field, description)] = error.violations
    assert field == "spec.token_ids"
    assert f"id {BYTES.n_vocab} at place 1" in description


def test_no_prompt_is_not_an_empty_prompt(served: Served) -> None:
    for request in (pb.GenerateRequest(), pb.GenerateRequest(spec=pb.GenerationSpec(seed=1))):
        with pytest.raises(grpc.RpcError) as caught:
            served.stub.Generate(request)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "spec.prompt" in caught.value.details()


def test_another_model_is_not_found(served: Served) -> None:
    error = refusal(lambda: served.client.generate("x", model="other"))
    assert error.code == "NOT_FOUND"
    assert "'scripted' is served here, not 'other'" in str(error)
    assert served.client.generate("x", model="scripted", max_tokens=1).text == "a"
    with pytest.raises(grpc.RpcError) as caught:
        served.stub.GetModel(pb.GetModelRequest(model="other"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "arguments", [{"top_k": -1}, {"seed": -1}, {"max_tokens": -1}, {"prompt": "\ud800"}]
)
def test_what_cannot_even_be_sent_is_refused_by_the_client(
    served: Served, arguments: dict[str, object]
) -> None:
    error = refusal(lambda: served.client.generate(**{"prompt": "x", **arguments}))
    assert error.code == "INVALID_ARGUMENT"
    assert len(error.violations) == 1


def test_text_that_the_vocabulary_cannot_express_is_refused_with_its_place(
    serve: Callable[..., Served],
) -> None:  # S27
    chars = Tokenizer.chars("abc")
    served = serve(ScriptedModel.of(chars, []), chars)
    error = refusal(lambda: served.client.generate("ab文"))
    [(field, description)] = error.violations
    assert error.code == "INVALID_ARGUMENT"
    assert field == "spec.text"
    assert "'文'" in description
    assert "offset 2" in description
    assert served.client.generate("abc").finish.reason == "end_of_text"


def test_a_vocabulary_that_lacks_a_byte_refuses_text_with_it(
    serve: Callable[..., Served],
) -> None:  # S27
    partial = Tokenizer("test", r"(?s:.+)", [bytes([b]) for b in range(128)])
    served = serve(ScriptedModel.of(partial, []), partial)
    assert refusal(lambda: served.client.generate("aé")).code == "INVALID_ARGUMENT"
    assert served.client.generate("a").finish.reason == "end_of_text"


def test_while_loading_every_call_is_unavailable_with_a_time_to_retry() -> None:
    with BackgroundServer(None) as server, Client(server.target, timeout=10) as client:
        for call in (
            client.model,
            client.list_models,
            lambda: client.generate("x"),
            lambda: list(client.stream("x")),
            lambda: client.score("x"),
            lambda: client.tokenize("x"),
            lambda: client.detokenize([1]),
        ):
            error = refusal(call)
            assert error.code == "UNAVAILABLE"
            assert "loading" in str(error)
            assert error.retryable
            assert error.retry_after == 1
        error = refusal(lambda: client.await_ready(0.2))
        assert "not serving yet" in str(error)


def test_a_flood_of_stop_strings_is_refused_by_its_count(served: Served) -> None:
    """One violation each would make gigabytes of one message."""
    error = refusal(lambda: served.client.generate("x", stop=[""] * 200_000))
    assert error.code == "INVALID_ARGUMENT"
    assert "200000 strings given, 16 allowed" in str(error)
    assert len(str(error)) < 2000


def test_too_many_token_ids_are_refused_with_the_numbers(served: Served) -> None:
    error = refusal(lambda: served.client.generate([1] * 300_000))
    assert error.code == "INVALID_ARGUMENT"
    assert "300000 tokens" in str(error)


METHODS = pb.DESCRIPTOR.services_by_name["GenerationService"].methods
# A request without fields takes them all for later ones.
RPCS = [method.name for method in METHODS if method.input_type.fields]


@pytest.mark.parametrize("rpc", RPCS)
@pytest.mark.parametrize(
    "data",
    [b"\x0a\x04\x0a\x02\xff\xfe", b"\x0a\x02\xff\xfe", b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f"],
)
def test_bytes_that_are_no_message_are_refused_without_a_traceback(
    served: Served, caplog: pytest.LogCaptureFixture, rpc: str, data: bytes
) -> None:
    with grpc.insecure_channel(served.server.target) as channel:
        path = f"/serve.v1.GenerationService/{rpc}"
        call = channel.unary_stream(path)(data)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert not caplog.records
