"""The wire carries what the plain data holds: each field of it, so that a later one is not lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

from gpt.generate import generate
from gpt.params import SamplingParams
from gpt.tokenizer import Tokenizer
from serve import wire
from serve.client import RequestError
from serve.requests import SequenceReader
from serve.results import Delta, Finish, ModelInfo, TokenScore
from serve.v1 import generation_pb2 as pb
from tests.serve.scripted import ANY, ScriptedModel
from tests.serve.served import Served

BYTES = Tokenizer.bytes()

OTHER: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 3,
    "top_p": 0.01,
    "max_tokens": 2,
    "stop": ("\0",),
    "seed": 0,
    "min_p": 1.0,
    "typical_p": 0.01,
    "repetition_penalty": 0.5,
    "frequency_penalty": -2.0,
    "presence_penalty": 1.5,
    "logprobs": 0,
    "logit_bias": ((3, -1.5), (7, 2.0)),
    "allowed_tokens": (3, 9),
    "min_tokens": 1,
    "stop_tokens": (5,),
    "ignore_end_of_text": True,
    "prompt_logprobs": 0,
    "json_schema": "{}",
    "regex": "a+",
    "grammar": 'start: "a"',
}
"""For each setting a value that is allowed and not the default."""

BAD: dict[str, Any] = {
    "temperature": float("nan"),
    "top_k": -1,
    "top_p": 0.0,
    "max_tokens": 0,
    "stop": ("",),
    "seed": 2**63,
    "min_p": 1.5,
    "typical_p": 0.0,
    "repetition_penalty": 0.0,
    "frequency_penalty": float("inf"),
    "presence_penalty": 2.5,
    "logprobs": 21,
    "logit_bias": ((3, 101.0),),
    "allowed_tokens": (),
    "min_tokens": -1,
    "stop_tokens": tuple(range(65)),
    "prompt_logprobs": 21,
    "json_schema": "",
    "regex": "",
    "grammar": "",
}

ONE_CONSTRAINT = {name: OTHER[name] for name in OTHER if name not in ("json_schema", "regex")}
DEFAULTS = {name: () if name in ("stop", "stop_tokens", "logit_bias") else None for name in OTHER}
"""What is given where nothing is."""

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(ScriptedModel(BYTES.n_vocab, lambda *_: ANY)) as served:
        yield served


def read(spec: pb.GenerationSpec) -> SamplingParams:
    config = ScriptedModel(BYTES.n_vocab, lambda *_: ANY).config
    [sequence] = SequenceReader(BYTES, config).to_generate(spec).sequences
    return sequence.params


def test_the_tables_and_the_client_know_every_setting() -> None:
    assert set(FIELDS) == set(OTHER) == set(get_type_hints(wire.SamplingSettings))
    assert set(FIELDS) == {*BAD, "ignore_end_of_text"}  # of a bool no value is bad


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_reaches_the_sampler_as_it_was_given(name: str) -> None:
    spec = wire.spec_message("x", {name: OTHER[name]}, "")  # type: ignore[misc]
    assert wire.settings_of(pb.GenerationSpec.FromString(spec.SerializeToString())) == {
        name: OTHER[name]
    }
    assert getattr(read(spec), name) == OTHER[name]
    others = {**dataclasses.asdict(read(spec)), name: None, "seed": None}
    defaults = {**dataclasses.asdict(SamplingParams()), name: None, "seed": None}
    assert others == defaults, "and the others keep their defaults"


def test_a_zero_is_told_apart_from_nothing() -> None:  # S14
    names = [name for name in FIELDS if type(OTHER[name]) in (int, float)]
    zeros = wire.spec_message("x", dict.fromkeys(names, 0), "")  # type: ignore[arg-type]
    assert wire.settings_of(zeros) == dict.fromkeys(names, 0)


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_that_is_not_given_has_the_sampler_s_default(name: str) -> None:
    for spec in (
        wire.spec_message("x", {}, ""),
        wire.spec_message("x", {name: DEFAULTS[name]}, ""),  # type: ignore[misc]
    ):
        assert wire.settings_of(spec) == {}
        if name != "seed":
            assert getattr(read(spec), name) == getattr(SamplingParams(), name)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_setting_is_refused_by_name(served: Served, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        served.client.generate("x", **{name: BAD[name]})
    assert caught.value.code == "INVALID_ARGUMENT"
    assert [field.partition("[")[0] for field, _ in caught.value.violations] == [f"spec.{name}"]


@pytest.mark.parametrize("name", FIELDS)
def test_the_served_text_under_a_setting_is_the_sampled_text(served: Served, name: str) -> None:
    settings = {"max_tokens": 20, "seed": 3, name: OTHER[name]}
    if name == "grammar":  # something to choose from
        settings[name] = "start: /[ab]{8}/"
    local = list(generate(served.model, BYTES, "abc", SamplingParams(**settings)))
    answer = served.client.generate("abc", **settings)
    assert answer.token_ids == [piece.token for piece in local]
    assert bool(answer.scores) == (name == "logprobs")


def test_an_unknown_setting_is_a_mistake_in_the_program(served: Served) -> None:
    with pytest.raises(TypeError, match="no such setting: temprature"):
        served.client.generate("x", temprature=1)


def test_all_settings_of_the_command_line_are_sent() -> None:
    params = SamplingParams(**ONE_CONSTRAINT)
    assert read(wire.spec_message("x", wire.settings_of_params(params), "")) == params


SCORE = TokenScore(7, b"\xc3", -1.5, (TokenScore(8, b"", -0.25), TokenScore(7, b"\xc3", -1.5)))


def test_what_comes_back_is_what_was_sent() -> None:
    delta = Delta("é", [7, 8], [SCORE, SCORE], [b"\xc3", b"\xa9"], 3)
    assert wire.delta_of(wire.delta_message(delta)) == delta
    for finish in (
        Finish("stop", "x", 1, 2, 2**63 - 1, 0.5, 1.5, 2.5),
        Finish("end_of_text", None, 1, 2, 0, 0.5, 1.5, 2.5),
        Finish("length", None, 3, 4, 5, 0.5, 1.5, 2.5),
        Finish("stop", None, 3, 4, 5, 0.5, 1.5, 2.5, 2, 7, 1),
        Finish("time_limit", None, 3, 0, 5, 0.5, 0.0, 0.0),
        Finish("complete", None, 3, 4, 5, 0.5, 1.5, 2.5),
    ):
        assert wire.finish_of(wire.finish_message(finish)) == finish
    architecture = {
        "n_layer": 1, "n_head": 2, "n_kv_head": 3, "d_model": 4, "head_dim": 5, "d_ff": 6,
        "position": "p", "pattern": "q", "norm": "n", "mlp": "m",
    }  # fmt: skip
    info = ModelInfo("n", 1, 2, 3, "d", architecture, "k", "f", {"<|x|>": 4, "<|y|>": 5}, 5)
    for message in (pb.Model, pb.GetModelResponse):
        assert wire.model_of(message(**wire.model_fields(info))) == info


def test_a_listed_model_has_all_that_is_told_of_one() -> None:
    def fields(message: Any) -> list[tuple[str, int, int]]:
        return [(f.name, f.number, f.type) for f in message.DESCRIPTOR.fields]

    assert fields(pb.Model) == fields(pb.GetModelResponse)


def test_the_models_are_listed(served: Served) -> None:
    [listed] = served.client.list_models()
    assert listed == served.client.model() == served.client.model("scripted")
    assert listed == served.engine.info
    assert listed.name == "scripted"
    assert (listed.special_tokens, listed.end_of_text_id) == ({"<|endoftext|>": 256}, 256)
