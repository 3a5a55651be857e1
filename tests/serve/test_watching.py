"""Request ids, the log, and traces: what is told of a call, to whom, and what never is."""

from __future__ import annotations

import gzip
import io
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gpt.errors import ServerError
from gpt.tokenizer import Tokenizer
from serve.client import RequestError
from serve.logs import Log
from serve.tracing import MISSING, Tracing, tracing_of
from serve.v1 import generation_pb2 as pb
from serve.watchflags import WatchSettings
from serve.watching import Watching
from tests.serve.scripted import NAN, ScriptedModel
from tests.serve.served import Served, eventually

BYTES = Tokenizer.bytes()
SECRET = "the password is xyzzy"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def following(position: int, token: int) -> int:
    return NAN if token == ord("N") else ord("a")


class Logged:
    """A JSON log that is kept in memory."""

    def __init__(self, level: str = "info") -> None:
        self._stream = io.StringIO()
        self.log = Log("json", level, self._stream)

    @property
    def text(self) -> str:
        self.log.flush()
        return self._stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    def of(self, request_id: str) -> list[dict[str, Any]]:
        """A call's lines; the last comes when its status has been sent, so it is waited for."""
        eventually(lambda: any(line.get("request_id") == request_id for line in self.lines))
        return [line for line in self.lines if line.get("request_id") == request_id]


@pytest.fixture
def logged() -> Iterator[Logged]:
    logged = Logged()
    yield logged
    logged.log.close()


@pytest.fixture(scope="module")
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def served(spans: InMemorySpanExporter) -> Iterator[Served]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    watching = Watching(WatchSettings(slow_request=0.5), tracing=Tracing(provider))
    model = ScriptedModel(BYTES.n_vocab, following)
    with Served(model, watching=watching) as served:
        yield served


def trailers(call: Any) -> dict[str, Any]:
    return dict(call.trailing_metadata() or ())


def test_a_call_is_told_its_id_whether_it_succeeds_or_not(served: Served) -> None:
    stub, given = served.stub, (("x-request-id", "mine-1"),)
    spec = pb.GenerationSpec(text="ab", max_tokens=2)
    _, call = stub.Generate.with_call(pb.GenerateRequest(spec=spec), metadata=given)
    assert trailers(call)["x-request-id"] == "mine-1"
    assert not call.initial_metadata(), "what comes before a status keeps gRPC from retrying"
    _, call = stub.Generate.with_call(pb.GenerateRequest(spec=spec))
    assert len(trailers(call)["x-request-id"]) == 16
    stream = stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), metadata=given)
    list(stream)
    assert trailers(stream)["x-request-id"] == "mine-1"
    spec.temperature = -1
    with pytest.raises(grpc.RpcError) as refused:
        stub.Generate(pb.GenerateRequest(spec=spec), metadata=given)
    found = trailers(refused.value)
    assert found["x-request-id"] == "mine-1"
    assert "grpc-status-details-bin" in found
    bare = served.channel.unary_unary("/serve.v1.GenerationService/Generate")
    with pytest.raises(grpc.RpcError) as refused:  # these bytes are no message
        bare(b"\n\x02\xff\xfe", metadata=given)
    assert trailers(refused.value)["x-request-id"] == "mine-1"
    with pytest.raises(RequestError) as failed:
        served.client.generate("a", top_p=2, request_id="mine-2")
    assert failed.value.request_id == "mine-2"


def test_an_id_that_is_too_long_is_not_taken(served: Served) -> None:
    spec = pb.GenerationSpec(text="ab", max_tokens=2)
    long = (("x-request-id", "m" * 129),)
    _, call = served.stub.Generate.with_call(pb.GenerateRequest(spec=spec), metadata=long)
    assert len(trailers(call)["x-request-id"]) == 16


def test_a_call_has_one_line_with_what_came_of_it(served: Served, logged: Logged) -> None:
    done = served.client.generate("ab", max_tokens=3, n=2, request_id="r-1")
    [line] = logged.of("r-1")
    times = {name: line.pop(name) for name in list(line) if name.endswith("seconds")}
    assert line.pop("time").endswith("Z")
    assert line.pop("peer").startswith("ipv4:127.0.0.1:")
    assert line == {
        "level": "info", "logger": "serve.calls", "message": "answered", "request_id": "r-1",
        "method": "Generate", "code": "OK", "model": "scripted", "id": done.request_id, "texts": 2,
        "finish": "length:2", "prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 6,
    }  # fmt: skip
    assert set(times) == {"seconds", "queue_seconds", "prefill_seconds", "decode_seconds"}
    served.client.tokenize("ab", request_id="r-2")
    [line] = logged.of("r-2")
    assert (line["method"], line["code"]) == ("Tokenize", "OK")


def test_no_line_has_prompt_or_text_and_each_of_a_call_has_its_id(
    served: Served, logged: Logged
) -> None:
    client = served.client
    client.generate(SECRET, max_tokens=2, request_id="s-1")
    list(client.stream(SECRET, max_tokens=2, stop=["xyzzy"], request_id="s-2"))
    client.score(SECRET, request_id="s-3")
    client.tokenize(SECRET, request_id="s-4")
    list(client.batch([{"prompt": SECRET, "max_tokens": 1}], request_id="s-5"))
    for i, refused in enumerate([
        lambda: client.generate(SECRET, top_k=0, regex="(", request_id="s-6"),
        lambda: client.generate(SECRET * 9, request_id="s-7"),
        lambda: client.generate(SECRET, model="xyzzy", request_id="s-8"),
        lambda: client.generate(SECRET + "N", request_id="s-9"),
    ]):  # fmt: skip
        with pytest.raises(RequestError):
            refused()
        assert logged.of(f"s-{i + 6}")
    served.model.fail_next = RuntimeError("the model broke")
    with pytest.raises(RequestError):
        client.generate(SECRET, request_id="s-10")
    logged.of("s-10")
    assert "xyzzy" not in logged.text
    # What the engine's thread says of a request has its id as well.
    assert [line["logger"] for line in logged.of("s-9")] == ["serve.held", "serve.calls"]
    assert all(line.get("request_id") or line.get("ids") for line in logged.lines)


def test_prompts_are_logged_if_that_is_asked(logged: Logged) -> None:
    model = ScriptedModel(BYTES.n_vocab, following)
    with Served(model, watching=Watching(WatchSettings(log_prompts=True))) as served:
        served.client.generate(SECRET, max_tokens=1, request_id="p-1")
        served.client.generate([97, 98], max_tokens=1, request_id="p-2")
        list(served.client.batch([{"prompt": "x", "max_tokens": 1}], request_id="p-3"))
        found = [logged.of(f"p-{i}")[-1]["prompt"] for i in (1, 2, 3)]
    assert found == [SECRET, [97, 98], ["x"]]


def test_a_slow_call_is_a_warning_with_where_its_time_went(served: Served, logged: Logged) -> None:
    before = served.model.entered
    served.model.hold()
    with served.client.stream("ab", max_tokens=2, request_id="slow-1") as stream:
        eventually(lambda: served.model.entered > before)
        time.sleep(0.6)
        served.model.release()
        list(stream)
    [line] = logged.of("slow-1")
    assert (line["level"], line["message"]) == ("warning", "slow: over 0.5 s")
    assert line["prefill_seconds"] > 0.5
    assert line["prefill_seconds"] > line["decode_seconds"]


class Stuck(io.StringIO):
    """A stream that nobody reads: it takes nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.free = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.free.wait()
        return super().write(text)


def test_a_log_that_nobody_reads_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.logs.QUEUED_LINES", 5)
    stream = Stuck()
    log = Log("text", "info", stream)
    try:
        logging.getLogger("x").info("line 0")
        assert stream.entered.wait(20)
        for number in range(1, 21):
            logging.getLogger("x").info("line %d", number)
        assert log.dropped == 15
        stream.free.set()
        log.flush()
        logging.getLogger("x").info("the last")
        log.flush()
        assert "15 lines were dropped" in stream.getvalue()
        assert stream.getvalue().splitlines()[-1].endswith("INFO x: the last")
    finally:
        stream.free.set()
        log.close()


def test_a_line_of_text_stays_one_line_and_says_how_it_failed() -> None:
    stream = io.StringIO()
    log = Log("text", "warning", stream)
    logger = logging.getLogger("x")
    try:
        logger.info("not this")
        fields = {"fields": {"a": 'b "c"', "n": 0.123456}, "request_id": "r"}
        logger.warning("two\nlines", extra=fields)
        try:
            raise ValueError("broken")
        except ValueError:
            logger.exception("it failed")
    finally:
        log.close()
    first, second, *rest = stream.getvalue().splitlines()
    assert first.partition("WARNING")[2] == r' x [r]: two lines a="b \"c\"" n=0.1235'
    assert second.endswith("ERROR x: it failed")
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ValueError: broken"


def spans_of(exporter: InMemorySpanExporter, trace: str, count: int) -> dict[str, ReadableSpan]:
    """The spans of a trace by their name, once there are so many."""

    def found() -> list[ReadableSpan]:
        spans = exporter.get_finished_spans()
        return [span for span in spans if f"{span.context.trace_id:032x}" == trace]

    eventually(lambda: len(found()) >= count)
    by_name = {span.name.rpartition("/")[2]: span for span in found()}
    assert len(by_name) == count
    return by_name


def traced(trace: str) -> tuple[tuple[str, str], ...]:
    return (("traceparent", f"00-{trace}-{PARENT}-01"), ("x-request-id", "t-1"))


def test_a_call_has_spans_for_queue_prefill_and_decode(
    served: Served, spans: InMemorySpanExporter
) -> None:
    spec = pb.GenerationSpec(text="abc", max_tokens=4)
    answer = served.stub.Generate(pb.GenerateRequest(spec=spec), metadata=traced(TRACE))
    found = spans_of(spans, TRACE, 4)
    call = found.pop("Generate")
    assert call.name == "serve.v1.GenerationService/Generate"
    assert call.parent is not None
    assert f"{call.parent.span_id:016x}" == PARENT
    assert call.attributes is not None
    assert call.attributes["antiphon.request_id"] == "t-1"
    assert call.attributes["rpc.grpc.status_code"] == 0
    assert set(found) == {"queue", "prefill", "decode"}
    for span in found.values():
        assert span.parent is not None
        assert span.parent.span_id == call.context.span_id
        assert span.attributes is not None
        assert span.attributes["gen_ai.response.id"] == answer.prompt.request_id
    queue, prefill, decode = found["queue"], found["prefill"], found["decode"]
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert call.start_time <= queue.start_time <= queue.end_time <= prefill.end_time
    assert decode.start_time < decode.end_time
    assert prefill.attributes["gen_ai.usage.input_tokens"] == 3
    assert decode.attributes["gen_ai.usage.output_tokens"] == 4
    assert decode.attributes["gen_ai.response.finish_reasons"] == ("length",)


def test_a_call_that_fails_or_is_refused_says_so(
    served: Served, spans: InMemorySpanExporter
) -> None:
    failing, wrong = "1" * 32, "2" * 32
    spec = pb.GenerationSpec(text=f"{SECRET}N")
    with pytest.raises(grpc.RpcError):
        served.stub.Generate(pb.GenerateRequest(spec=spec), metadata=traced(failing))
    found = spans_of(spans, failing, 3)
    assert set(found) == {"Generate", "queue", "prefill"}
    assert not found["Generate"].status.is_ok
    assert not found["prefill"].status.is_ok
    assert "xyzzy" not in "".join(span.to_json() for span in found.values())
    spec = pb.GenerationSpec(text="a", top_p=2)
    with pytest.raises(grpc.RpcError):
        served.stub.Generate(pb.GenerateRequest(spec=spec), metadata=traced(wrong))
    [refused] = spans_of(spans, wrong, 1).values()
    assert refused.status.is_unset, "that was the caller's mistake"
    assert refused.attributes is not None
    assert refused.attributes["rpc.grpc.status_code"] == 3


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    names: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.names.extend(span.name for span in scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_spans_reach_a_collector_before_the_server_ends() -> None:
    names: list[str] = []
    handler = type("Handler", (Collector,), {"names": names})
    with HTTPServer(("127.0.0.1", 0), handler) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        watching = Watching(WatchSettings(otlp_traces_endpoint=url))
        with Served(ScriptedModel(BYTES.n_vocab, following), watching=watching) as served:
            served.client.generate("ab", max_tokens=2)
        collector.shutdown()
    assert sorted(names) == ["decode", "prefill", "queue", "serve.v1.GenerationService/Generate"]


def test_without_the_extra_a_collector_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ServerError) as missing:
        tracing_of("http://localhost:4318/v1/traces")
    assert str(missing.value) == MISSING
    assert "pip install 'antiphon[tracing]'" in MISSING
    assert tracing_of(None) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    assert tracing_of(None) is None, "that was not said to us"


def test_what_is_no_url_is_a_mistake() -> None:
    with pytest.raises(ServerError, match="'localhost:4318', but must be a URL"):
        tracing_of("localhost:4318")
