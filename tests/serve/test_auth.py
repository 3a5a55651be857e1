"""Who is let in, what they may use, and what the log says of them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

import serve.reload
from gpt.errors import ConfigError
from gpt.tokenizer import Tokenizer
from serve.auth import Keys, read_keys
from serve.background import BackgroundServer
from serve.engine import Engine
from serve.limits import Limits
from serve.settings import ListenSettings
from serve.v1 import generation_pb2 as pb
from serve.v1 import generation_pb2_grpc
from tests.serve.scripted import ScriptedModel
from tests.serve.served import eventually

ALICE, BOB = "alices-secret-key-1", "bobs-secret-key-2"
BYTES = Tokenizer.bytes()


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


def generate(stub: Any, key: str | None, **fields: Any) -> pb.GenerateResponse:
    spec = pb.GenerationSpec(text="x", max_tokens=3, **fields)
    return stub.Generate(pb.GenerateRequest(spec=spec), metadata=bearer(key) if key else None)


def refused(code: grpc.StatusCode, call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() == code
    return caught.value


@contextmanager
def guarded(model: ScriptedModel, **options: Any) -> Iterator[grpc.Channel]:
    engine = Engine(model, BYTES, name="scripted")
    with (
        BackgroundServer(engine, ListenSettings(**options)) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        yield channel


def test_lines_hold_label_key_and_limits() -> None:
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    text = f"# who\nalice {ALICE}   # hers\n\nbob@home sha256:{digest} concurrent=2 per-minute=9\n"
    alice, bob = read_keys(text, "keys", Limits(concurrent=5))
    assert (alice.label, alice.limits) == ("alice", Limits(5, None))
    assert (bob.label, bob.limits) == ("bob@home", Limits(2, 9))
    assert ALICE not in repr(alice)
    keys = Keys(None, f"alice {ALICE},bob sha256:{digest}", Limits())
    assert [keys.find(key) for key in (ALICE, BOB)] == keys._keys
    assert [keys.find(key) for key in ("", ALICE + " ", digest, "\udcff")] == [None] * 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ALICE, "line 1: not LABEL KEY"),
        (f"\nlabel/ {ALICE}", "line 2: not LABEL KEY"),
        ("alice short", "at least 16 characters"),
        ("alice sha256:abc", "64 hexadecimal digits"),
        (f"a {ALICE}\na {BOB}", "line 2: the label a is there twice"),
        (f"a {ALICE}\nb {ALICE}", "line 2: the key of b has another label"),
        (f"a {ALICE} rate=3", "concurrent=N and per-minute=N"),
        (f"a {ALICE} concurrent=0", "concurrent must be 1 to 100000"),
        ("# nobody", "there is no API key in"),
    ],
)
def test_what_is_wrong_with_keys_is_told_without_them(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        Keys(file, "", Limits())
    assert not any(secret in str(caught.value) for secret in (ALICE, BOB, "short", "abc"))
    with pytest.raises(ConfigError, match="cannot read the API keys"):
        Keys(tmp_path / "none", "", Limits())


def test_a_label_in_file_and_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"alice {ALICE}")
    with pytest.raises(ConfigError, match="alice is in the file and in the environment"):
        Keys(tmp_path / "keys", f"alice {BOB}", Limits())


def test_only_a_key_opens_the_rpcs_and_probes_need_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    model = ScriptedModel.of(BYTES, list(b"heard"), block_size=64)
    with guarded(model, api_keys=f"alice {ALICE},bob {BOB}") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == 1
        assert next(health.Watch(health_pb2.HealthCheckRequest())).status == 1
        spec = pb.GenerationSpec(text="x")
        for key in (None, "wrong-key-wrong-key", ALICE[:-1], ALICE.upper(), ""):
            refused(grpc.StatusCode.UNAUTHENTICATED, lambda key=key: generate(stub, key))
        for metadata in ([("authorization", ALICE)], [("authorization", f"Basic {ALICE}")]):
            stream = stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), metadata=metadata)
            refused(grpc.StatusCode.UNAUTHENTICATED, lambda stream=stream: list(stream))
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = [reflection_pb2.ServerReflectionRequest(list_services="")]
        answers = reflection.ServerReflectionInfo(iter(ask))
        refused(grpc.StatusCode.UNAUTHENTICATED, lambda: list(answers))
        assert model.steps == []

        assert generate(stub, ALICE).choices[0].text == "hea"
        request = pb.GenerateStreamRequest(spec=spec)
        events = list(stub.GenerateStream(request, metadata=bearer(BOB)))
        assert "".join(event.delta.text for event in events) == "heard"
        assert list(reflection.ServerReflectionInfo(iter(ask), metadata=bearer(BOB)))
    said = "\n".join(caplog.messages)
    assert "alice: /serve.v1.GenerationService/Generate" in said
    assert "bob: /serve.v1.GenerationService/GenerateStream" in said
    assert "1 calls without a valid key refused" in said
    assert said.count("without a valid key") == 1, "anybody could fill the disk"
    assert not any(key in said for key in (ALICE, BOB, "wrong-key"))


def test_one_keys_limits_are_not_anothers() -> None:
    model = ScriptedModel(BYTES.n_vocab, lambda position, token: 97, block_size=64)
    keys = f"alice {ALICE} concurrent=1,bob {BOB} per-minute=2"
    with guarded(model, api_keys=keys) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        model.hold()
        spec = pb.GenerationSpec(text="x", max_tokens=3)
        stream = stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), metadata=bearer(ALICE))
        assert next(stream).prompt.prompt_tokens == 1
        busy = refused(grpc.StatusCode.RESOURCE_EXHAUSTED, lambda: generate(stub, ALICE))
        assert "1 requests of this key are running, 1 may" in busy.details()
        [detail] = rpc_status.from_call(busy).details
        info = error_details_pb2.RetryInfo()
        assert detail.Unpack(info)
        assert info.retry_delay.ToNanoseconds() == 1e9
        model.release()
        assert len(list(stream)) > 1
        assert generate(stub, ALICE).choices[0].text == "aaa"

        generate(stub, BOB)
        generate(stub, BOB)
        over = refused(grpc.StatusCode.RESOURCE_EXHAUSTED, lambda: generate(stub, BOB))
        [detail] = rpc_status.from_call(over).details
        assert detail.Unpack(info)
        assert 0 < info.retry_delay.ToNanoseconds() <= 30e9
        generate(stub, ALICE)


def test_a_batch_runs_no_more_at_once_than_its_key_may() -> None:
    model = ScriptedModel(BYTES.n_vocab, lambda position, token: 97, block_size=64)
    with guarded(model, api_keys=f"alice {ALICE}", key_concurrent=2) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        specs = [pb.GenerationSpec(text="xyz"[i % 3], max_tokens=4) for i in range(12)]
        request = pb.BatchGenerateRequest(specs=specs)
        answers = list(stub.BatchGenerate(request, metadata=bearer(ALICE)))
        assert [len(answer.completion.choices) for answer in answers] == [1] * 12
    assert max(texts for _, texts in model.steps) == 2


def test_keys_are_read_again_when_their_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve.reload, "RELOAD_SECONDS", 0.01)
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys"
    file.write_text(f"alice {ALICE}\n")
    model = ScriptedModel.of(BYTES, list(b"heard"))
    with guarded(model, api_keys_file=file) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        generate(stub, ALICE)
        refused(grpc.StatusCode.UNAUTHENTICATED, lambda: generate(stub, BOB))
        file.write_text("alice\n")  # half done
        eventually(lambda: any("kept what was read before" in m for m in caplog.messages))
        generate(stub, ALICE)
        file.write_text(f"bob {BOB}\n")
        eventually(lambda: any("took over what is new" in m for m in caplog.messages))
        generate(stub, BOB)
        refused(grpc.StatusCode.UNAUTHENTICATED, lambda: generate(stub, ALICE))
