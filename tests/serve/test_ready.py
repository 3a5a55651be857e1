"""What is found out before a server says that it is ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpt.errors import ServerError
from gpt.tokenizer import Tokenizer
from serve.engine import Engine
from serve.ready import check_round_trip, self_check, warm_up
from tests.serve.scripted import NAN, ScriptedModel

BYTES = Tokenizer.bytes()


@contextmanager
def engine(model: ScriptedModel, **options: int) -> Iterator[Engine]:
    made = Engine(model, BYTES, name="scripted", check_every_step=True, **options)
    made.start()
    yield made
    made.stop()


def always(token: int, **options: int) -> ScriptedModel:
    return ScriptedModel(BYTES.n_vocab, lambda position, newest: token, **options)


def test_a_model_whose_numbers_are_not_finite_serves_nobody() -> None:
    with (
        engine(always(NAN)) as bad,
        pytest.raises(ServerError, match=r"not finite numbers.*is the checkpoint damaged"),
    ):
        asyncio.run(self_check(bad))
    with engine(always(65)) as good:
        asyncio.run(self_check(good))


class Forgetful:
    """A tokenizer that loses the first token of a text."""

    plain_tokens = BYTES.plain_tokens

    def encode(self, text: str) -> list[int]:
        return BYTES.encode(text)[1:]

    decode = BYTES.decode


def test_a_tokenizer_that_loses_text_serves_nobody() -> None:
    with pytest.raises(ServerError, match="the model folder is damaged"):
        check_round_trip(Forgetful())


@pytest.mark.parametrize(
    "make", [Tokenizer.bytes, lambda: Tokenizer.chars("éß本" * 3), lambda: Tokenizer.chars("\n ")]
)
def test_whatever_a_vocabulary_holds_it_is_tried(make: Callable[[], Tokenizer]) -> None:
    check_round_trip(make())


def test_a_tokenizer_of_another_model_serves_nobody() -> None:
    model = ScriptedModel(BYTES.n_vocab - 1, lambda position, newest: 65)
    with engine(model) as bad, pytest.raises(ServerError, match="do not belong together"):
        asyncio.run(self_check(bad))


def test_warming_up_runs_steps_as_large_as_they_come() -> None:
    def slowly(position: int, newest: int) -> int:
        time.sleep(0.002)  # so that none has ended before the last has come
        return 65

    model = ScriptedModel(BYTES.n_vocab, slowly, block_size=64)
    with engine(model, max_running=4) as warm:
        asyncio.run(warm_up(warm, 4))
    assert max(tokens for tokens, _ in model.steps) >= 60, "the longest prompt"
    assert (4, 4) in model.steps, "all texts at once, a token each"
    assert warm.pages_used == 0


def test_warming_up_keeps_to_what_may_wait() -> None:
    with engine(always(65), max_running=8, max_waiting=0, max_waiting_tokens=70) as warm:
        asyncio.run(warm_up(warm, 8))
