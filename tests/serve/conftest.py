from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpt.tokenizer import Tokenizer
from tests.serve.scripted import ScriptedModel
from tests.serve.served import Served


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """A function that serves a scripted model until the test ends, and then looks for leaks."""
    with contextlib.ExitStack() as stack:

        def start(
            model: ScriptedModel, tokenizer: Tokenizer | None = None, **options: Any
        ) -> Served:
            served = stack.enter_context(Served(model, tokenizer, **options))
            started.append(served)
            return served

        started: list[Served] = []
        yield start
        for served in started:
            if not served.engine.ended.done():
                served.check_for_leaks()
