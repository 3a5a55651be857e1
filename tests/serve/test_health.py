"""grpc.health.v1 and reflection, as probes and tools see them."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gpt.tokenizer import Tokenizer
from serve.background import BackgroundServer
from serve.service import NAME
from tests.serve.scripted import ScriptedModel
from tests.serve.served import Served

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
BYTES = Tokenizer.bytes()


def ask(service: str = "") -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


def test_health_of_the_server_and_of_the_service(serve: Callable[..., Served]) -> None:
    served = serve(ScriptedModel.of(BYTES, []))
    health = health_pb2_grpc.HealthStub(served.channel)
    assert health.Check(ask()).status == SERVING
    assert health.Check(ask(NAME)).status == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(ask("other"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert NAME in caught.value.details()


def test_watchers_see_each_flip_and_disturb_nobody() -> None:  # S24
    with BackgroundServer(None) as server, grpc.insecure_channel(server.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(ask(NAME)) for _ in range(50)]
        unknown = health.Watch(ask("other"))
        assert {next(watch).status for watch in watches} == {NOT_SERVING}
        assert next(unknown).status == SERVICE_UNKNOWN
        watches.pop().cancel()  # one that leaves takes nothing with it
        unread = health.Watch(ask())  # nor does one that never reads
        for serving, expected in ((True, SERVING), (False, NOT_SERVING)):
            server.loop.call_soon_threadsafe(server.listener.health.set_serving, serving)
            assert {next(watch).status for watch in watches} == {expected}
            assert health.Check(ask()).status == expected
        unread.cancel()


def test_watchers_are_let_go_when_the_server_ends(caplog: pytest.LogCaptureFixture) -> None:
    with BackgroundServer(None) as server:
        channel = grpc.insecure_channel(server.target)
        watch = health_pb2_grpc.HealthStub(channel).Watch(ask(NAME))
        assert next(watch).status == NOT_SERVING
    with channel, pytest.raises(grpc.RpcError) as caught:
        next(watch)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "the server has ended"
    assert caplog.messages == []


def test_health_and_texts_are_served_beside_many_open_watches(
    serve: Callable[..., Served],
) -> None:  # S24
    served = serve(ScriptedModel.of(BYTES, list(b"heard")))
    health = health_pb2_grpc.HealthStub(served.channel)
    watches = [health.Watch(ask()) for _ in range(50)]
    assert {next(watch).status for watch in watches} == {SERVING}
    assert served.client.generate("x").text == "heard"
    for watch in watches:
        watch.cancel()


def test_reflection_lists_the_services(serve: Callable[..., Served]) -> None:
    served = serve(ScriptedModel.of(BYTES, []))
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    [answer] = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    names = {service.name for service in answer.list_services_response.service}
    assert names == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    [answer] = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=NAME)])
    )
    [found] = answer.file_descriptor_response.file_descriptor_proto
    [service] = descriptor_pb2.FileDescriptorProto.FromString(found).service
    assert {method.name for method in service.method} == {
        "Generate", "GenerateStream", "BatchGenerate", "Score", "Tokenize", "Detokenize",
        "ListModels", "GetModel",
    }  # fmt: skip
