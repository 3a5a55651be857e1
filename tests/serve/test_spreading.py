"""Clients that are given several addresses use all of them, and none that is draining."""

from __future__ import annotations

import json
from collections.abc import Callable

from gpt.tokenizer import Tokenizer
from serve.client import Client
from serve.connection import SPREAD
from serve.service import NAME
from tests.serve.scripted import ScriptedModel
from tests.serve.served import Served, eventually

TOKENIZER = Tokenizer.bytes()


def test_calls_go_to_every_address_and_to_none_that_drains(serve: Callable[..., Served]) -> None:
    both = [serve(ScriptedModel.of(TOKENIZER, [97, 98])) for _ in range(2)]
    addresses = ",".join(served.server.target for served in both)
    with Client(f"ipv4:{addresses}", timeout=30) as client:

        def reached() -> list[bool]:
            before = [served.model.entered for served in both]
            for _ in range(4):
                client.generate("x", max_tokens=2, temperature=0)
            return [served.model.entered > n for served, n in zip(both, before, strict=True)]

        eventually(lambda: all(reached()))
        first = both[0].server
        # What a drain begins with: clients that watch have left before the service refuses.
        first.loop.call_soon_threadsafe(first.listener.health.set_serving, False)
        eventually(lambda: reached() == [False, True])
        first.loop.call_soon_threadsafe(first.listener.service.close, "draining")
        assert reached() == [False, True]
        assert reached() == [False, True]


def test_what_is_watched_is_the_service() -> None:
    assert json.loads(SPREAD)["healthCheckConfig"] == {"serviceName": NAME}
