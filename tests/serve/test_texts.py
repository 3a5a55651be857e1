"""What callers get to read, over a real port: every piece valid, all pieces together the text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpt.tokenizer import Tokenizer
from serve.client import Delta
from tests.serve.scripted import ANY, ScriptedModel
from tests.serve.served import Served

BYTES = Tokenizer.bytes()
Serve = Callable[..., Served]


def words(*tokens: str) -> tuple[Tokenizer, list[int]]:
    """A vocabulary with these tokens and all bytes, and their ids."""
    vocabulary = [bytes([b]) for b in range(256)] + [t.encode() for t in tokens if len(t) > 1]
    tokenizer = Tokenizer("test", r"(?s:.+)", vocabulary)
    return tokenizer, [vocabulary.index(t.encode()) for t in tokens]


def test_characters_of_many_bytes_arrive_whole(serve: Serve) -> None:  # S1
    text = "🌶ďЖ한"
    model = ScriptedModel.of(BYTES, list(text.encode()))
    model.hold()
    served = serve(model)
    stream = served.client.stream("x")
    deltas: list[Delta] = []
    for _ in range(len(text.encode()) + 1):  # one at a time, so that nothing is merged
        model.allow()
        deltas.append(next(stream))
    assert list(stream) == []
    assert [delta.text for delta in deltas] == ["", "", "", "🌶", "", "ď", "", "Ж", "", "", "한", ""]
    assert [id for delta in deltas for id in delta.token_ids] == [*text.encode(), BYTES.eot]
    assert stream.finish is not None
    assert stream.finish.reason == "end_of_text"


def test_max_tokens_inside_a_character_flushes_once(serve: Serve) -> None:  # S2
    served = serve(ScriptedModel.of(BYTES, list("🌶".encode())))
    completion = served.client.generate("x", max_tokens=2)
    assert completion.text == "\N{REPLACEMENT CHARACTER}"
    assert completion.finish.reason == "length"
    assert completion.finish.completion_tokens == 2
    stream = served.client.stream("x", max_tokens=2)
    assert "".join(delta.text for delta in stream) == completion.text


def test_no_part_of_a_stop_string_is_shown(serve: Serve) -> None:  # S3
    tokenizer, script = words("ABC", "DEF", "G", "HI", "J")
    served = serve(ScriptedModel.of(tokenizer, script), tokenizer)
    stream = served.client.stream("x", stop=["DEFGHIJ"])
    assert "".join(delta.text for delta in stream) == "ABC"
    assert stream.finish is not None
    assert (stream.finish.reason, stream.finish.matched_stop) == ("stop", "DEFGHIJ")
    assert stream.finish.completion_tokens == 5


def test_what_only_looked_like_a_stop_string_is_shown_after_all(serve: Serve) -> None:  # S3
    tokenizer, script = words("ABC", "DEF", "G", "x")
    served = serve(ScriptedModel.of(tokenizer, script), tokenizer)
    completion = served.client.generate("x", stop=["DEFGHIJ"])
    assert completion.text == "ABCDEFGx"
    assert (completion.finish.reason, completion.finish.matched_stop) == ("end_of_text", None)


def test_a_stop_string_need_not_align_with_tokens(serve: Serve) -> None:  # S4
    tokenizer, script = words(" Paris")
    served = serve(ScriptedModel.of(tokenizer, script), tokenizer)
    completion = served.client.generate("x", stop=["Pari"])
    assert completion.text == " "
    assert completion.finish.matched_stop == "Pari"


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_starts_from_end_of_text(serve: Serve, prompt: str | list[int]) -> None:
    seen = []  # S11

    def following(position: int, token: int) -> int:
        seen.append((position, token))
        return BYTES.eot if position else ord("a")

    served = serve(ScriptedModel(BYTES.n_vocab, following))
    completion = served.client.generate(prompt)
    assert completion.text == "a"
    assert completion.finish.prompt_tokens == 1
    assert seen[0] == (0, BYTES.eot)
    assert served.client.generate("x").text == "a", "the next request works"


def test_end_of_text_typed_by_a_user_is_ordinary_text(serve: Serve) -> None:  # S19
    served = serve(ScriptedModel.of(BYTES, []))
    prompt = "a<|endoftext|>b"
    assert served.client.generate(prompt).finish.prompt_tokens == len(prompt)


def test_a_prompt_may_fill_the_context(serve: Serve) -> None:  # S12
    served = serve(ScriptedModel(BYTES.n_vocab, lambda *_: ord("a"), block_size=8))
    completion = served.client.generate("x" * 8)
    assert (completion.text, completion.finish.reason) == ("a", "length")


def test_temperature_zero_is_greedy_and_seed_zero_is_a_seed(serve: Serve) -> None:  # S14
    served = serve(ScriptedModel(BYTES.n_vocab, lambda *_: ANY))
    ask = served.client.generate
    greedy = ask("x", temperature=0, max_tokens=8)
    assert greedy.token_ids == [0] * 8
    zero = ask("x", seed=0, max_tokens=8)
    assert zero.finish.seed == 0
    assert zero.token_ids == ask("x", seed=0, max_tokens=8).token_ids
    assert zero.token_ids != ask("x", seed=1, max_tokens=8).token_ids
    drawn = ask("x", max_tokens=8)
    assert drawn.token_ids == ask("x", seed=drawn.finish.seed, max_tokens=8).token_ids
    assert ask("x", top_k=1, max_tokens=8).token_ids == greedy.token_ids
    assert ask("x", top_p=1e-9, max_tokens=8).token_ids == greedy.token_ids
    for top_k in (0, 1_000_000):
        assert ask("x", top_k=top_k, seed=0, max_tokens=8).token_ids == zero.token_ids


def test_both_rpcs_tell_the_same(serve: Serve) -> None:
    served = serve(ScriptedModel.of(BYTES, list(b"Hear me speak.")))
    whole = served.client.generate("First", seed=7, stop=["speak"])
    stream = served.client.stream("First", seed=7, stop=["speak"])
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [id for piece in pieces for id in piece.token_ids] == whole.token_ids
    assert stream.finish is not None
    assert (stream.model, stream.seed, stream.prompt_tokens) == ("scripted", 7, 5)
    for name in ("reason", "matched_stop", "prompt_tokens", "completion_tokens", "seed"):
        assert getattr(stream.finish, name) == getattr(whole.finish, name)
    assert min(whole.finish.queue_seconds, whole.finish.prefill_seconds) >= 0
    assert whole.finish.decode_seconds >= 0
