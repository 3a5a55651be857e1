"""A scripted model behind a real port, and waiting for what other threads do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc

from gpt.tokenizer import Tokenizer
from serve.background import BackgroundServer
from serve.client import Client
from serve.engine import Engine
from serve.v1 import generation_pb2_grpc
from serve.watching import Watching
from tests.serve.scripted import ScriptedModel


class Served:
    """An engine, its server and a client, in one context."""

    def __init__(
        self,
        model: ScriptedModel,
        tokenizer: Tokenizer | None = None,
        watching: Watching | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.engine = Engine(
            model, tokenizer or Tokenizer.bytes(), name="scripted", check_every_step=True, **options
        )
        self.server = BackgroundServer(self.engine, watching=watching)

    def __enter__(self) -> Served:
        self.server.__enter__()
        self.client = Client(self.server.target, timeout=30)
        self.channel = grpc.insecure_channel(self.server.target)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        return self

    def __exit__(self, *error: Any) -> None:
        self.client.close()
        self.channel.close()
        self.server.__exit__(*error)

    def await_no_rpc(self) -> None:
        """Wait until the service holds no generation: what was cancelled has reached the engine."""
        idle = self.server.listener.service.idle()
        asyncio.run_coroutine_threadsafe(idle, self.server.loop).result(20)

    def check_for_leaks(self) -> None:
        """Wait until no request is held; then no page may be."""
        eventually(lambda: self.engine.held == 0)
        assert self.engine.pages_used == 0, "pages leaked"


def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something that another thread is about to do; fails if it never comes."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)
