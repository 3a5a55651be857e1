"""Letting in and keeping out, with real processes: TLS, keys, limits, bad company."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serve.client import Client
from serve.v1 import generation_pb2 as pb
from serve.v1 import generation_pb2_grpc
from tests.integration.http2 import Connection
from tests.integration.idle_connections import hold, resident
from tests.integration.serving import PATIENCE, REAL, SCRIPTED, ServerProcess

pytestmark = pytest.mark.integration

KEY, OTHER_KEY = "the-secret-of-the-website", "the-secret-of-somebody-else"
PROMPT = "a prompt that the log must not hold"
IDLE = 300
SERVING, NOT_SERVING = 1, 2


def identity(folder: Path, authority: trustme.CA, **dates: Any) -> None:
    """Put certificate and key of a server there, as a tool that renews them does."""
    made = authority.issue_cert("127.0.0.1", **dates)
    for name, data in [
        ("key.pem", made.private_key_pem.bytes()),
        ("cert.pem", b"".join(pem.bytes() for pem in made.cert_chain_pems)),
    ]:
        (folder / "part").write_bytes(data)
        os.replace(folder / "part", folder / name)


class Caller:
    """Who trusts one authority and may have a certificate and a key, on a connection of its own."""

    def __init__(
        self, target: str, authority: trustme.CA, cert: trustme.LeafCert | None, key: str = KEY
    ) -> None:
        credentials = grpc.ssl_channel_credentials(
            authority.cert_pem.bytes(),
            cert and cert.private_key_pem.bytes(),
            cert and b"".join(pem.bytes() for pem in cert.cert_chain_pems),
        )
        # Else a channel takes over the connection of another to the same place.
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.secure_channel(target, credentials, options)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self._metadata = [("authorization", f"Bearer {key}")]

    def stream(self, text: str = PROMPT, tokens: int = 10) -> Any:
        spec = pb.GenerationSpec(text=text, max_tokens=tokens)
        request = pb.GenerateStreamRequest(spec=spec)
        return self.stub.GenerateStream(request, metadata=self._metadata, timeout=PATIENCE)

    def generate(self, text: str = PROMPT, tokens: int = 2) -> str:
        spec = pb.GenerationSpec(text=text, max_tokens=tokens)
        answer = self.stub.Generate(
            pb.GenerateRequest(spec=spec), metadata=self._metadata, timeout=PATIENCE
        )
        return str(answer.choices[0].text)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *error: object) -> None:
        self.channel.close()


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def text_of(events: Any) -> str:
    return "".join(event.delta.text for event in events)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripted")
    (path / "loaded").touch()
    return path


def test_mutual_tls_and_keys_from_the_start_over_a_swap_to_the_end(
    tmp_path: Path, model: Path
) -> None:
    old, new = trustme.CA(), trustme.CA()
    identity(tmp_path, old)
    (tmp_path / "ca.pem").write_bytes(old.cert_pem.bytes())
    (tmp_path / "keys").write_text(f"website {KEY}\n")
    flags = [f"--tls-cert={tmp_path / 'cert.pem'}", f"--tls-key={tmp_path / 'key.pem'}"]
    flags += [f"--tls-client-ca={tmp_path / 'ca.pem'}", f"--api-keys-file={tmp_path / 'keys'}"]
    environment = {
        "ANTIPHON_SERVE_API_KEYS": f"other {OTHER_KEY} per-minute=1",
        "ANTIPHON_SERVE_REFLECTION": "false",
    }
    mine = old.issue_cert("me@example.org")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            ServerProcess(SCRIPTED, model, *flags, environment=environment)
        )
        server.await_ready()
        target = server.target
        caller = stack.enter_context(Caller(target, old, mine))
        assert caller.generate() == "aa"

        # Wrong keys, no certificate, a stranger's, no TLS at all, one request too many.
        wrong = stack.enter_context(Caller(target, old, mine, "the-secret-of-nobody"))
        assert refused(wrong.generate)[0] == grpc.StatusCode.UNAUTHENTICATED
        assert wrong.health.Check(health_pb2.HealthCheckRequest()).status == SERVING
        for cert in (None, new.issue_cert("me@example.org")):
            stranger = stack.enter_context(Caller(target, old, cert))
            assert refused(stranger.generate)[0] == grpc.StatusCode.UNAVAILABLE
        with grpc.insecure_channel(target) as plain:
            stub = health_pb2_grpc.HealthStub(plain)
            check = health_pb2.HealthCheckRequest()
            code, _ = refused(lambda: stub.Check(check, timeout=PATIENCE))
            assert code == grpc.StatusCode.UNAVAILABLE
        other = stack.enter_context(Caller(target, old, mine, OTHER_KEY))
        assert other.generate() == "aa"
        assert refused(other.generate)[0] == grpc.StatusCode.RESOURCE_EXHAUSTED

        # Another certificate, from another authority, while streams run.
        streams = [caller.stream(tokens=200) for _ in range(2)]
        started = [next(stream).prompt.prompt_tokens for stream in streams]
        assert started == [len(PROMPT)] * 2
        (tmp_path / "ca.pem").write_bytes(old.cert_pem.bytes() + new.cert_pem.bytes())
        identity(tmp_path, new)
        server.await_log("took over what is new in")
        late = stack.enter_context(Caller(target, new, new.issue_cert("me@example.org")))
        end = time.monotonic() + PATIENCE
        while True:  # if the first look fell between the files, a second one follows
            with contextlib.suppress(grpc.RpcError):
                assert late.generate() == "aa"
                break
            assert time.monotonic() < end
        distrusting = stack.enter_context(Caller(target, old, mine))
        assert refused(distrusting.generate)[0] == grpc.StatusCode.UNAVAILABLE
        assert [text_of(stream) for stream in streams] == ["a" * 200] * 2
        assert caller.generate() == "aa", "on the connection that it has"

        # The end, in mid-stream.
        watch = late.health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert next(watch).status == SERVING
        stream = late.stream(tokens=300)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        code, said = refused(caller.generate)
        assert (code, said) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        assert text_of(stream) == "a" * 300
        assert server.wait() == 0
    log = "\n".join(server.log + server.out)
    assert "website: /serve.v1.GenerationService/Generate" in log
    assert "Traceback" not in log
    for secret in (KEY, OTHER_KEY, "the-secret-of-nobody", PROMPT, "PRIVATE KEY"):
        assert secret not in log


@pytest.mark.parametrize("case", ["expired", "mismatch", "keys"])
def test_what_cannot_be_used_is_one_line_before_the_port_is_opened(
    tmp_path: Path, model: Path, case: str
) -> None:
    now = datetime.datetime.now(datetime.timezone.utc)
    day = datetime.timedelta(days=1)
    dates = {"not_before": now - 2 * day, "not_after": now - day} if case == "expired" else {}
    identity(tmp_path, trustme.CA(), **dates)
    flags = ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]
    said = "has expired on"
    if case == "mismatch":
        cert = (tmp_path / "cert.pem").read_bytes()
        identity(tmp_path, trustme.CA())
        (tmp_path / "cert.pem").write_bytes(cert)
        said = "does not belong to the certificate"
    elif case == "keys":
        (tmp_path / "keys").write_text(f"website {KEY} concurrent=many\n")
        flags += ["--api-keys-file", str(tmp_path / "keys")]
        said = "after the key there may be concurrent=N and per-minute=N"
    with ServerProcess(REAL, model, *flags) as server:
        assert server.wait() == 1
    assert said in server.log[-1]
    assert server.log[-1].startswith("antiphon serve: error: ")
    assert any("settings: " in line and "tls_cert" in line for line in server.log)
    assert not any("listening" in line or KEY in line for line in server.log)


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fast")
    (path / "loaded").touch()
    (path / "fast").touch()
    return path


@pytest.fixture(scope="module")
def server(fast: Path) -> Iterator[ServerProcess]:
    flags = ["--max-receive-bytes", "20000", "--max-send-bytes", "2000", "--min-ping-seconds", "1"]
    flags += ["--max-prompt-bytes", "5000", "--no-reflection"]
    # Its memory is looked at.
    with ServerProcess(SCRIPTED, fast, *flags, start=subprocess.Popen) as process:
        process.await_ready()
        yield process


def test_sizes_beyond_the_limits_are_statuses(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        def generate(text: str, tokens: int = 1) -> str:
            spec = pb.GenerationSpec(text=text, max_tokens=tokens)
            answer = stub.Generate(pb.GenerateRequest(spec=spec), timeout=PATIENCE)
            return str(answer.choices[0].text)

        code, said = refused(lambda: generate("x" * 20_000))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in said
        code, said = refused(lambda: generate("x" * 5001))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "the text has 5001 bytes, 5000 are allowed here" in said
        tokenize = pb.TokenizeRequest(text="x" * 5001)
        assert refused(lambda: stub.Tokenize(tokenize))[0] == grpc.StatusCode.INVALID_ARGUMENT
        score = pb.ScoreRequest(text="x" * 5001)
        assert refused(lambda: stub.Score(score))[0] == grpc.StatusCode.INVALID_ARGUMENT
        code, said = refused(lambda: stub.Tokenize(pb.TokenizeRequest(text="x" * 2500)))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED, said
        assert generate("x" * 5000) == "a", "the largest that is allowed"


def test_pings_are_answered_unless_they_come_too_often(server: ServerProcess) -> None:
    with Connection(server.target) as hasty:
        hasty.await_settings()
        assert not all(hasty.ping() for _ in range(10))


def test_a_connection_of_age_is_replaced_and_its_stream_goes_on(model: Path) -> None:
    idle = grpc.ChannelConnectivity.IDLE
    seen: list[grpc.ChannelConnectivity] = []
    with ServerProcess(SCRIPTED, model, "--max-connection-age", "0.5") as server:
        server.await_ready()
        with grpc.insecure_channel(server.target) as channel:
            channel.subscribe(seen.append)
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            spec = pb.GenerationSpec(text="x", max_tokens=5000)
            stream = stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), timeout=PATIENCE)
            for event in stream:
                assert not event.HasField("finish"), "the connection was never told to go"
                if idle in seen[1:]:  # it was connected, and new calls need another connection
                    break
            after = "".join(event.delta.text for event, _ in zip(stream, range(30), strict=False))
            assert after == "a" * len(after) != ""
            spec.max_tokens = 2
            answer = stub.Generate(pb.GenerateRequest(spec=spec), timeout=PATIENCE)
            assert answer.choices[0].text == "aa"
            assert next(stream).delta.text.strip("a") == "", "beside the new connection"
            stream.cancel()
        assert not any("Traceback" in line for line in server.log)


def test_many_idle_connections_are_kept_and_disturb_nobody(server: ServerProcess) -> None:
    with contextlib.ExitStack() as held, Client(server.target, timeout=PATIENCE) as client:
        connections = hold(server.target, IDLE, held)
        assert client.generate("x", max_tokens=5).text == "a" * 5
        assert all(connection.ping() for connection in connections)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells memory by /proc")
def test_clients_that_never_read_take_no_memory_and_hold_up_nobody(server: ServerProcess) -> None:
    tokens, readers = 400, 8
    with contextlib.ExitStack() as held, Client(server.target, timeout=PATIENCE) as client:
        client.generate("x", max_tokens=tokens)
        before = resident(server.process.pid)
        spec = pb.GenerationSpec(text="x", max_tokens=tokens)
        request = pb.GenerateStreamRequest(spec=spec).SerializeToString()
        for _ in range(readers):
            deaf = held.enter_context(Connection(server.target, window=0))
            deaf.await_settings()
            deaf.call("/serve.v1.GenerationService/GenerateStream", request)
        assert client.generate("x", max_tokens=tokens).text == "a" * tokens
        assert resident(server.process.pid) - before < 2**24
    with Client(server.target, timeout=PATIENCE) as client:
        assert client.generate("x", max_tokens=2).text == "aa"
    assert server.process.poll() is None


def test_a_server_on_a_socket_leaves_no_file(tmp_path: Path, fast: Path) -> None:
    path = tmp_path / "s"
    with ServerProcess(SCRIPTED, fast, "--host", f"unix:{path}", "--warmup") as server:
        assert server.await_ready() == f"serving scripted on unix:{path}"
        with Client(server.target, timeout=PATIENCE) as client:
            assert client.generate("x", max_tokens=2).text == "aa"
        server.await_log("warmed up in")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not path.exists()
