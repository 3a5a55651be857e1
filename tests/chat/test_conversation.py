"""A conversation forgets its oldest turns when the context is full."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt.chat.conversation import Conversation
from gpt.chat.turns import ASSISTANT, SYSTEM, USER, Turn
from gpt.errors import PromptError


def ids_of(turns: Sequence[Turn]) -> list[int]:
    return [0 for turn in turns for _ in turn.content]


def talk(system: str | None, *said: str) -> Conversation:
    turns = [Turn((USER, ASSISTANT)[i % 2], text) for i, text in enumerate(said)]
    return Conversation(system, turns)


def test_whole_exchanges_go_and_the_system_message_stays() -> None:
    conversation = talk("ssss", "uuuuuu", "aaaaaa", "uu", "aa", "u")
    ids, forgotten = conversation.prompt(ids_of, block_size=16, max_tokens=4)
    assert (len(ids), forgotten) == (9, 2)
    assert [turn.content for turn in conversation.messages()] == ["ssss", "uu", "aa", "u"]


@given(
    st.lists(st.text("x", min_size=1, max_size=9), min_size=1, max_size=9).filter(
        lambda said: len(said) % 2 == 1
    ),
    st.integers(4, 40),
    st.none() | st.integers(1, 50),
)
def test_there_is_room_for_an_answer(said: list[str], block_size: int, most: int | None) -> None:
    conversation = talk("s", *said)
    try:
        ids, forgotten = conversation.prompt(ids_of, block_size, most)
    except PromptError:
        assert len(said[-1]) + 1 + min(block_size // 4, most or block_size) > block_size
        assert len(conversation.turns) == len(said)
        return
    assert len(ids) + min(block_size // 4, most or block_size) <= block_size + 1
    assert [turn.content for turn in conversation.turns] == said[forgotten:]
    assert conversation.turns[0].role == USER
    assert conversation.messages()[0].role == SYSTEM


def test_a_message_that_is_too_long_alone_is_refused() -> None:
    with pytest.raises(PromptError, match=r"takes 21 tokens .* context of 16 leaves 13 beside"):
        talk("s", "u" * 20).prompt(ids_of, block_size=16, max_tokens=None)


def test_the_last_answer_can_be_taken_back() -> None:
    conversation = talk(None, "q", "a")
    for _ in range(2):
        assert conversation.unanswered() == Turn(USER, "q")
    assert Conversation().unanswered() is None
