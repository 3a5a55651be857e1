"""Nonsense from outside: it is refused with a status, and whoever comes next is served.

Longer: `FUZZ_ROUNDS=5000 pytest tests/serve/test_fuzz.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
from collections.abc import Callable

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from gpt.tokenizer import Tokenizer
from serve.client import Client
from serve.v1 import generation_pb2 as pb
from tests.serve.nonsense import (
    HEADERS,
    PREFACE,
    SETTINGS,
    connections,
    fill,
    frame,
    headers,
    mutate,
)
from tests.serve.scripted import ANY, ScriptedModel
from tests.serve.served import Served, eventually

Serve = Callable[..., Served]
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "40"))
SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
GENERATION = {
    f"/serve.v1.GenerationService/{method.name}": getattr(pb, method.input_type.name)
    for method in SERVICE.methods
}
OTHERS = {
    "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest,
    "/grpc.health.v1.Health/Watch": health_pb2.HealthCheckRequest,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": (
        reflection_pb2.ServerReflectionRequest
    ),
}
PATHS = {**GENERATION, **OTHERS}
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # a watch of health does not end by itself
}


NO_UTF8 = "codec can't decode"
"""What gRPC logs of a call whose path is not UTF-8."""


def start(serve: Serve) -> Served:
    model = ScriptedModel(Tokenizer.bytes().n_vocab, lambda position, _: ANY, block_size=32)
    return serve(model, n_pages=200)


def send(served: Served, path: str, data: bytes) -> grpc.StatusCode:
    """The status that the bytes get."""
    watching = path.endswith("Watch")
    call = served.channel.stream_stream(path)(iter([data]), timeout=0.05 if watching else 30)
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass  # it is the status that counts
    code: grpc.StatusCode = call.code()
    assert watching or code != grpc.StatusCode.DEADLINE_EXCEEDED, data
    return code


def await_port(served: Served) -> None:
    """Wait until it answers, which after a fall of gRPC's it does not at once."""

    def answers() -> bool:
        with grpc.insecure_channel(served.server.target) as channel:
            try:
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            except grpc.RpcError:
                return False
            # It may have answered just before it fell.
            return bool(served.server.listener.listening)

    eventually(answers, 30)


def connect_and_send(served: Served, sent: bytes) -> None:
    """As a client of its own, until the server hangs up."""
    await_port(served)
    host, _, port = served.server.target.rpartition(":")
    with (
        contextlib.suppress(ConnectionError),  # it may hang up at any time
        socket.create_connection((host, int(port)), timeout=30) as connection,
    ):
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass


def still_right(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """The server answers, and its log knows of no fault of its own."""
    await_port(served)
    with Client(served.server.target) as client:
        assert client.generate("a", max_tokens=3, temperature=0).token_ids == [0, 0, 0]
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [text for text in errors if NO_UTF8 not in text] == []
    assert not any(record.exc_info and record.exc_info[0] for record in caplog.records)


@pytest.mark.parametrize("path", PATHS)
def test_any_message_gets_a_status(
    serve: Serve, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    served = start(serve)
    codes = set()
    for seed in range(ROUNDS):
        rng = random.Random(f"{path} {seed}")
        message: Message = PATHS[path]()
        fill(message, rng)
        data = message.SerializeToString()
        if rng.random() < 0.4:
            data = mutate(data, rng)
        elif rng.random() < 0.1:
            data = rng.randbytes(rng.randint(0, 100))
        code = send(served, path, data)
        assert code in ALLOWED, f"{code} for {path} with {data!r}"
        codes.add(code)
    assert len(codes) > 1 or not PATHS[path].DESCRIPTOR.fields
    still_right(served, caplog)


def test_bytes_on_the_port_that_are_no_http2_harm_nobody(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = start(serve)
    for i, path in enumerate([*GENERATION][:2] + [*OTHERS][2:]):
        for sent in connections(random.Random(i), path):
            connect_and_send(served, sent)
    still_right(served, caplog)


def test_the_port_is_taken_again_after_a_path_that_takes_grpc_down(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = start(serve)
    for _ in range(3):
        block = headers(b"/serve.v1.GenerationService/\xff")
        sent = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, 5, 1, block)
        connect_and_send(served, sent)
        still_right(served, caplog)
    assert "listening anew" in caplog.text


def test_an_rpc_that_there_is_not_is_unimplemented(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = start(serve)
    for path in ("/serve.v1.GenerationService/Nothing", "/x.Y/Z", "/"):
        assert send(served, path, b"") == grpc.StatusCode.UNIMPLEMENTED
    still_right(served, caplog)
