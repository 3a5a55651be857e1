"""Clients that try again, and when they must not; who they say they are; the one for asyncio."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from gpt.errors import ServerError
from gpt.tokenizer import Tokenizer
from serve.async_client import AsyncClient
from serve.client import Client, Completion, RequestError, Retry, Tls
from serve.v1 import generation_pb2 as pb
from serve.v1 import generation_pb2_grpc
from tests.documented import blocks
from tests.serve.scripted import ScriptedModel
from tests.serve.served import Served

ROOT = Path(__file__).resolve().parents[2]
BYTES = Tokenizer.bytes()
QUICK = Retry(attempts=3, first_seconds=0.001, longest_seconds=0.001)


@given(
    failures=st.integers(1, 5000),
    asked=st.none() | st.floats(0, 100),
    left=st.none() | st.floats(0, 200),
    draw=st.floats(0, 1),
    code=st.sampled_from(["UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL", "CANCELLED"]),
)
def test_a_wait_is_what_the_server_asks_and_a_share_of_the_backoff(
    failures: int, asked: float | None, left: float | None, draw: float, code: str
) -> None:
    retry = Retry(attempts=4000, first_seconds=0.5, longest_seconds=8, draw=lambda: draw)
    found = retry.wait(RequestError("", code=code, retry_after=asked), failures, left)
    least, most = asked or 0.0, (asked or 0.0) + min(8.0, 0.5 * 2.0 ** min(failures - 1, 10))
    again = code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED") and failures < 4000
    if not again or (left is not None and least >= left):
        assert found is None
    elif found is not None:
        assert least <= found <= most
        assert found == pytest.approx(least + draw * (most - least))
        assert left is None or found < left
    else:
        assert left is not None
        assert least + draw * (most - least) >= left


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"attempts": 0}, {"first_seconds": -1}, {"longest_seconds": 0.1}):
        with pytest.raises(ValueError, match="need attempts >= 1"):
            Retry(**wrong)  # type: ignore[arg-type]


class Flaky(generation_pb2_grpc.GenerationServiceServicer):
    """A service that refuses the first calls.

    Attributes:
        refusals: how many calls are still to be refused.
        code: with which status.
        after: deltas that a stream sends before it is refused.
        metadata: what came with each call.
    """

    def __init__(self) -> None:
        self.refusals, self.after = 0, 0
        self.code = grpc.StatusCode.UNAVAILABLE
        self.metadata: list[dict[str, Any]] = []
        self.left: list[float] = []
        self.delay = 20  # milliseconds that it asks to be left alone for

    def _called(self, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        self.left.append(context.time_remaining())

    def _refuse(self, context: Any) -> None:
        if self.refusals:
            self.refusals -= 1
            info = error_details_pb2.RetryInfo()
            info.retry_delay.FromMilliseconds(self.delay)
            detail = AnyMessage()
            detail.Pack(info)
            status = status_pb2.Status(code=self.code.value[0], message="no", details=[detail])
            context.abort_with_status(rpc_status.to_status(status))

    def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._called(context)
        self._refuse(context)
        return pb.GenerateResponse(choices=[pb.Choice(text="done", finish=pb.Finish(reason=1))])

    def GenerateStream(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self._called(context)
        yield pb.GenerateStreamResponse(prompt=pb.PromptInfo(request_id="1"))
        for _ in range(self.after):
            yield pb.GenerateStreamResponse(delta=pb.Delta(text="do"))
        self._refuse(context)
        yield pb.GenerateStreamResponse(delta=pb.Delta(text="ne"))
        yield pb.GenerateStreamResponse(finish=pb.Finish(reason=1))

    def BatchGenerate(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        self._called(context)
        for index in range(self.after):
            yield pb.BatchGenerateResponse(index=index, completion=pb.GenerateResponse())
        self._refuse(context)
        yield pb.BatchGenerateResponse(index=9, completion=pb.GenerateResponse())


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Flaky, str]]:
    flaky = Flaky()
    server = grpc.server(ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(flaky, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield flaky, f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def flaky(server: tuple[Flaky, str]) -> Flaky:
    service = server[0]
    service.refusals, service.after, service.code = 0, 0, grpc.StatusCode.UNAVAILABLE
    service.delay = 20
    service.metadata.clear()
    service.left.clear()
    return service


Ask = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, server: tuple[Flaky, str]) -> Ask:
    """Asks by either client: a method's name, the client's settings, the method's own."""

    def sync(method: str, settings: dict[str, Any], *args: Any, **more: Any) -> Any:
        with Client(server[1], **settings) as client:
            found = getattr(client, method)(*args, **more)
            return list(found) if method in ("stream", "batch") else found

    async def gather(method: str, settings: dict[str, Any], *args: Any, **more: Any) -> Any:
        async with AsyncClient(server[1], **settings) as client:
            found = getattr(client, method)(*args, **more)
            if method in ("stream", "batch"):
                return [each async for each in found]
            return await found

    if request.param == "sync":
        return sync
    return lambda *args, **more: asyncio.run(gather(*args, **more))


ASKED = {
    "generate": ("x",),
    "stream": ("x",),
    "batch": ([{"prompt": "x"}],),
}


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_all_attempts_share_one_time_limit(flaky: Flaky, ask: Ask, method: str) -> None:
    flaky.refusals, flaky.delay = 2, 250
    ask(method, {"retry": QUICK, "timeout": 9}, *ASKED[method])
    # gRPC sends the last time limit again where the next is hardly shorter, by 3 % in all.
    assert flaky.left[2] <= 1.03 * (9 - 2 * 0.25)


@pytest.mark.parametrize("method", ASKED)
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_what_was_refused_is_asked_again(
    flaky: Flaky, ask: Ask, method: str, code: grpc.StatusCode
) -> None:
    flaky.refusals, flaky.code = 2, code
    found = ask(method, {"retry": QUICK, "timeout": 9}, *ASKED[method], request_id="r")
    assert len(flaky.metadata) == 3
    assert {each["x-request-id"] for each in flaky.metadata} == {"r"}
    if method == "stream":
        assert [delta.text for delta in found] == ["ne"]


@pytest.mark.parametrize("method", ASKED)
def test_it_is_given_up_after_so_many_attempts(flaky: Flaky, ask: Ask, method: str) -> None:
    flaky.refusals = 9
    with pytest.raises(RequestError) as failed:
        ask(method, {"retry": QUICK}, *ASKED[method])
    assert failed.value.code == "UNAVAILABLE"
    assert failed.value.retry_after == 0.02
    assert len(flaky.metadata) == 3


@pytest.mark.parametrize("method", ASKED)
def test_nothing_is_asked_again_unless_wanted_or_if_it_is_no_use(
    flaky: Flaky, ask: Ask, method: str
) -> None:
    flaky.refusals = 9
    with pytest.raises(RequestError):
        ask(method, {}, *ASKED[method])
    assert len(flaky.metadata) == 1
    flaky.code = grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(RequestError):
        ask(method, {"retry": QUICK}, *ASKED[method])
    assert len(flaky.metadata) == 2


@pytest.mark.parametrize("method", ["stream", "batch"])
def test_what_has_begun_to_come_is_never_asked_for_again(
    flaky: Flaky, ask: Ask, method: str
) -> None:
    flaky.refusals, flaky.after = 1, 1
    with pytest.raises(RequestError) as failed:
        ask(method, {"retry": QUICK}, *ASKED[method])
    assert failed.value.code == "UNAVAILABLE"
    assert len(flaky.metadata) == 1


@pytest.mark.parametrize("method", ASKED)
def test_no_wait_goes_past_the_time_limit(flaky: Flaky, ask: Ask, method: str) -> None:
    flaky.refusals = 1
    slow = Retry(first_seconds=1000, longest_seconds=1000, draw=lambda: 1.0)
    with pytest.raises(RequestError) as failed:
        ask(method, {"retry": slow, "timeout": 20}, *ASKED[method])
    assert failed.value.code == "UNAVAILABLE", "what it was, at once"
    assert len(flaky.metadata) == 1


def test_a_key_goes_with_each_request(flaky: Flaky, ask: Ask) -> None:
    ask("generate", {"api_key": "k1"}, "x")
    assert flaky.metadata[0]["authorization"] == "Bearer k1"
    with pytest.raises(ServerError, match="no header can carry"):
        ask("generate", {"api_key": "kä\n"}, "x")
    with pytest.raises(ServerError, match="1 to 128 printable"):
        ask("generate", {}, "x", request_id="a\nb")


def test_the_client_for_asyncio_asks_all_that_the_other_asks() -> None:
    async def everything(target: str) -> None:
        async with AsyncClient(target, timeout=30) as client:
            await client.await_ready(20)
            done = await client.generate("ab", max_tokens=3)
            assert (done.text, done.finish.reason) == ("aaa", "length")
            async with client.stream("ab", max_tokens=3, seed=5) as stream:
                text = "".join([delta.text async for delta in stream])
            assert (text, stream.seed, stream.prompt_tokens, stream.model) == (
                "aaa", 5, 2, "scripted",
            )  # fmt: skip
            assert stream.finish is not None
            assert stream.request_id
            prompts = [{"prompt": "ab", "max_tokens": n} for n in (1, 2)]
            results = {i: each async for i, each in client.batch(prompts)}
            assert [getattr(results[i], "text", None) for i in (0, 1)] == ["a", "aa"]
            assert len((await client.score("abc")).scores) == 3
            cut = await client.tokenize("ab")
            assert (await client.detokenize(cut.ids)).text == "ab"
            assert (await client.model()).name == "scripted"
            assert [model.name for model in await client.list_models()] == ["scripted"]
            with pytest.raises(RequestError) as wrong:
                await client.generate("ab", top_p=2)
            assert wrong.value.violations[0][0] == "spec.top_p"
            served.model.hold()
            endless = client.stream("ab")
            reading = asyncio.ensure_future(anext_of(endless))
            while not served.engine.held:
                await asyncio.sleep(0.002)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            served.model.release()
            stopped = client.stream("ab")
            await anext_of(stopped)
            stopped.cancel()
            with pytest.raises(RequestError) as cancelled:
                async for _ in stopped:
                    pass
            assert cancelled.value.code == "CANCELLED"

    model = ScriptedModel(BYTES.n_vocab, lambda *_: ord("a"), block_size=4096)
    with Served(model) as served:
        asyncio.run(everything(served.server.target))
        served.await_no_rpc()
        served.check_for_leaks()


async def anext_of(stream: AsyncIterator[Any]) -> Any:
    return await stream.__anext__()


def test_a_connection_by_tls_in_which_both_sides_are_known(tmp_path: Path) -> None:
    trustme = pytest.importorskip("trustme", reason="it makes the certificates")
    authority = trustme.CA()
    ca, chain, key = tmp_path / "ca.pem", tmp_path / "client.pem", tmp_path / "client.key"
    authority.cert_pem.write_to_path(ca)
    mine, theirs = authority.issue_cert("me@localhost"), authority.issue_cert("models.internal")
    mine.cert_chain_pems[0].write_to_path(chain)
    mine.private_key_pem.write_to_path(key)
    credentials = grpc.ssl_server_credentials(
        [(theirs.private_key_pem.bytes(), theirs.cert_chain_pems[0].bytes())],
        root_certificates=ca.read_bytes(),
        require_client_auth=True,
    )
    server = grpc.server(ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Flaky(), server)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    tls = Tls(ca=ca, certificate=chain, key=key, server_name="models.internal")
    try:
        with Client(f"127.0.0.1:{port}", tls=tls) as client:
            assert client.generate("x").text == "done"

        async def again() -> Completion:
            async with AsyncClient(f"127.0.0.1:{port}", tls=tls) as client:
                return await client.generate("x")

        assert asyncio.run(again()).text == "done"
        for less in (Tls(ca=ca, server_name="models.internal"), True):
            with Client(f"127.0.0.1:{port}", tls=less) as client, pytest.raises(RequestError):
                client.generate("x", timeout=10)
    finally:
        server.stop(None)


def test_tls_files_that_are_wrong_are_told(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"cannot read the TLS CA .*none\.pem: No such file"):
        Client("localhost:1", tls=Tls(ca=tmp_path / "none.pem"))
    with pytest.raises(ServerError, match="key is given without its certificate"):
        Client("localhost:1", tls=Tls(key="k.pem"))


def test_the_programs_on_the_page_about_clients_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    programs = [
        b for b in blocks(ROOT / "docs" / "clients.md") if b.kind == "python" and not b.title
    ]
    assert len(programs) >= 3
    model = ScriptedModel(BYTES.n_vocab, lambda *_: ord("a"), block_size=256)
    with Served(model) as served:
        for program in programs:
            text = re.sub(r"localhost:50051", served.server.target, program.text)
            exec(compile(text, program.where, "exec"), {"__name__": "__main__"})
            assert capsys.readouterr().out.strip(), program.where
