"""Several models behind one port, and one that takes another's place while texts are made."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from gpt.tokenizer import Tokenizer
from serve.background import BackgroundServer
from serve.client import Client, RequestError
from serve.engine import Engine
from serve.models import Served
from tests.serve.scripted import ScriptedModel
from tests.serve.served import eventually

BYTES = Tokenizer.bytes()


def engine_of(name: str, letter: str, **options: int) -> Engine:
    """Says one letter for ever."""
    model = ScriptedModel(BYTES.n_vocab, lambda *_: ord(letter))
    engine = Engine(model, BYTES, name=name, check_every_step=True, **options)
    engine.version = f"version {letter}"
    return engine


@pytest.fixture
def engines() -> list[Engine]:
    return [engine_of("zebra", "z"), engine_of("ant", "a")]


@pytest.fixture
def server(engines: list[Engine]) -> Iterator[BackgroundServer]:
    with BackgroundServer(engines) as server:
        yield server


@pytest.fixture
def client(server: BackgroundServer) -> Iterator[Client]:
    with Client(server.target, timeout=30) as client:
        yield client


def put(server: BackgroundServer, engine: Engine) -> Served:
    """Serve this in the place of another; returns that."""
    engine.start()

    async def do() -> Served | None:
        return server.listener.put(Served(engine))

    old = asyncio.run_coroutine_threadsafe(do(), server.loop).result(20)
    assert old is not None
    return old


def test_each_request_is_answered_by_the_model_that_it_names_or_the_first(client: Client) -> None:
    assert client.generate("x", max_tokens=2).text == "zz"
    for name, text in [("zebra", "zz"), ("ant", "aa")]:
        made = client.generate("x", max_tokens=2, model=name)
        assert (made.text, made.model) == (text, name)
        assert client.tokenize("x", model=name).model == name
        assert client.score("x", model=name).model == name
        assert client.model(name).version == f"version {text[0]}"
    assert [model.name for model in client.list_models()] == ["ant", "zebra"]
    with pytest.raises(RequestError, match="'ant', 'zebra' are served here, not 'ape'") as error:
        client.generate("x", model="ape")
    assert error.value.code == "NOT_FOUND"


def test_a_batch_may_be_for_several_models(server: BackgroundServer) -> None:
    with Client(server.target, timeout=30) as client:
        prompts = [{"prompt": "x", "max_tokens": 2}]
        assert [result.text for _, result in client.batch(prompts * 2, model="ant")] == ["aa"] * 2
        [(_, failure)] = client.batch(prompts, model="ape")
    assert isinstance(failure, RequestError)
    assert failure.code == "NOT_FOUND"


def test_the_queue_of_one_model_is_not_anothers() -> None:
    full = engine_of("full", "f", max_running=1, max_waiting=0)
    assert isinstance(full.model, ScriptedModel)
    with (
        BackgroundServer([full, engine_of("free", "e")]) as server,
        Client(server.target, timeout=30) as client,
    ):
        full.model.hold()
        with client.stream("x", max_tokens=1):
            eventually(lambda: full.held == 1)
            with pytest.raises(RequestError) as error:
                client.generate("x", max_tokens=1)
            assert error.value.code == "RESOURCE_EXHAUSTED"
            assert client.generate("x", max_tokens=2, model="free").text == "ee"
            full.model.release()


def test_a_text_ends_with_the_version_that_it_began_with(
    server: BackgroundServer, client: Client, engines: list[Engine]
) -> None:
    zebra, model = engines[0], engines[0].model
    assert isinstance(model, ScriptedModel)
    model.hold()
    stream = client.stream("x", max_tokens=3)
    model.allow()
    text = next(stream).text
    new = engine_of("zebra", "Z")
    old = put(server, new)
    try:
        assert old.engine is zebra
        assert old.users == 1
        assert client.generate("x", max_tokens=2).text == "ZZ"
        assert client.model().version == "version Z"
        assert stream.finish is None
        model.release()
        assert text + "".join(delta.text for delta in stream) == "zzz"
        unused = asyncio.run_coroutine_threadsafe(old.unused(), server.loop)
        unused.result(20)
        assert zebra.pages_used == 0
    finally:
        new.stop()


def test_a_request_that_is_still_being_read_keeps_its_model(
    server: BackgroundServer, client: Client, engines: list[Engine]
) -> None:
    async def begin() -> bool:
        served = server.listener.models.find("ant")
        with served.used():
            waiting = asyncio.ensure_future(served.unused())
            await asyncio.sleep(0)
            kept = not waiting.done()
        await asyncio.wait_for(waiting, 20)
        return kept

    assert asyncio.run_coroutine_threadsafe(begin(), server.loop).result(30)
