"""One table of settings: as flags, as typed text, as JSON."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt.errors import SamplingError
from gpt.params import SamplingParams
from gpt.settings import (
    SETTINGS,
    add_sampling_arguments,
    from_json,
    from_text,
    nearest,
    sampling_params,
    shown,
)  # fmt: skip


def parsed(*flags: str) -> SamplingParams:
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    return sampling_params(parser.parse_args(flags))


def test_every_flag_reaches_its_field() -> None:
    wanted = {
        "max_tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
        "typical_p": 0.8, "repetition_penalty": 1.2, "frequency_penalty": -0.5,
        "presence_penalty": 0.25, "stop": ("a", "b"), "seed": 9, "logprobs": 0, "min_tokens": 2,
        "stop_tokens": (3, 4), "ignore_end_of_text": True, "logit_bias": ((5, -1.5), (6, 2.0)),
        "allowed_tokens": (5, 6), "json_schema": '{"type": "object"}',
    }  # fmt: skip
    assert set(wanted) == set(SETTINGS) - {"regex", "grammar"}  # a text has one constraint
    flags: list[str] = []
    for name, value in wanted.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
            continue
        for one in value if name == "stop" else [shown(name, value)]:  # type: ignore[attr-defined]
            flags += [flag, one]
    assert parsed(*flags) == SamplingParams(**wanted)  # type: ignore[arg-type]
    assert parsed("--regex", "a+").constraint == ("regex", "a+")
    assert parsed("--grammar", "start: A").constraint == ("grammar", "start: A")
    assert parsed("--seed", "0").seed == 0
    assert parsed("--seed", "1") == SamplingParams(seed=1)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.7", 0.7),
        ("top_k", "5", 5),
        ("max_tokens", "none", None),
        ("logprobs", "0", 0),
        ("stop", "two words", ("two words",)),
        ("stop", r'"\n"', ("\n",)),
        ("stop", '["a", "b"]', ("a", "b")),
        ("stop", "none", ()),
        ("stop_tokens", "3,17", (3, 17)),
        ("allowed_tokens", "none", None),
        ("logit_bias", "3:-1.5,17:2", ((3, -1.5), (17, 2.0))),
        ("ignore_end_of_text", "true", True),
        ("regex", "[a-z]+", "[a-z]+"),
    ],
)
def test_values_can_be_typed_and_are_shown_as_typed(name: str, text: str, value: object) -> None:
    assert from_text(name, text) == value
    assert from_text(name, shown(name, value)) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "hot"), ("temperature", "none"), ("top_k", "1.5"), ("stop", '["a", 1]'),
        ("stop", '"a'), ("seed", ""), ("stop_tokens", "1,,2"), ("logit_bias", "1"),
        ("logit_bias", "1:2:3"), ("ignore_end_of_text", "yes"),
    ],
)  # fmt: skip
def test_what_is_no_value_says_what_is_allowed(name: str, text: str) -> None:
    with pytest.raises(SamplingError, match=f"{name}: .* is not (a|up|true)"):
        from_text(name, text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.7"), ("temperature", True), ("temperature", None), ("temperature", []),
        ("temperature", 10**400), ("top_k", 2.0), ("top_k", False), ("stop", [1]), ("stop", {}),
        ("max_tokens", "5"), ("ignore_end_of_text", 1), ("stop_tokens", [True]), ("stop_tokens", 3),
        ("logit_bias", {"a": 1}), ("logit_bias", [[1]]), ("logit_bias", {"1": "2"}),
        ("regex", 3), ("json_schema", []),
    ],
)  # fmt: skip
def test_json_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(SamplingError, match=name):
        from_json(name, value)


def test_json_of_the_right_type_is_taken() -> None:
    assert from_json("temperature", 1) == 1.0
    assert from_json("max_tokens", None) is None
    assert from_json("seed", 2**62) == 2**62
    assert from_json("stop", "x") == ("x",)
    assert from_json("logit_bias", {"3": -1}) == from_json("logit_bias", [[3, -1]]) == ((3, -1.0),)
    assert from_json("allowed_tokens", [3]) == (3,)
    assert from_json("json_schema", {"type": "null"}) == '{"type": "null"}'
    assert from_json("ignore_end_of_text", False) is False


def test_a_constraint_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "schema").write_text('{"type": "string"}')
    assert parsed("--json-schema", f"@{tmp_path}/schema").json_schema == '{"type": "string"}'
    with pytest.raises(SamplingError, match=r"json_schema: cannot read .*No such file"):
        parsed("--json-schema", f"@{tmp_path}/none")
    (tmp_path / "large").write_text("a" * 20_000)
    with pytest.raises(SamplingError, match=r"regex: 16385 bytes long, 1 to 16384 allowed"):
        parsed("--regex", f"@{tmp_path}/large")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("temprature", "temperature"), ("TopP", "top_p"), ("min-p", "min_p"),
        ("max_new_tokens", "max_tokens"), ("zebra", None),
    ],
)  # fmt: skip
def test_the_nearest_name_is_found(given: str, meant: str | None) -> None:
    assert nearest(given, SETTINGS) == meant


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", math.nan), ("min_p", -0.1), ("min_p", 1.1),
        ("typical_p", math.nan), ("typical_p", 0.0), ("typical_p", 1.1),
        ("repetition_penalty", math.nan), ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf), ("frequency_penalty", math.nan),
        ("frequency_penalty", 2.1), ("presence_penalty", -2.1), ("presence_penalty", math.inf),
        ("logprobs", -1), ("logprobs", 21), ("prompt_logprobs", 21), ("min_tokens", -1),
        ("logit_bias", ((1, math.nan),)), ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))), ("logit_bias", tuple((i, 0.0) for i in range(1025))),
        ("allowed_tokens", ()), ("stop_tokens", tuple(range(65))), ("regex", ""),
        ("grammar", "\ud800"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(field: str, value: object) -> None:
    """S13: NaN never passes."""
    with pytest.raises(SamplingError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_settings_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(SamplingError, match="min_tokens: 5 is not at most max_tokens, 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(SamplingError, match="grammar: given beside regex"):
        SamplingParams(regex="a", grammar="start: A")


def test_ids_beyond_the_vocabulary_do_not_fit() -> None:
    params = SamplingParams(
        logit_bias=((10, 1.0),), allowed_tokens=(3, 11), stop_tokens=(2**32 - 1,), min_tokens=1
    )
    assert [name for name, _ in params.misfits(10, {3})] == [
        "logit_bias", "allowed_tokens", "stop_tokens",
    ]  # fmt: skip
    assert (
        "only ends the text"
        in SamplingParams(allowed_tokens=(3,), min_tokens=1).misfits(10, {3})[0][1]
    )
    assert not SamplingParams(allowed_tokens=(3,), min_tokens=1, ignore_end_of_text=True).misfits(
        10, {3}
    )


@pytest.mark.parametrize("half", [0xD800, 0xDBFF, 0xDC80, 0xDFFF])
def test_half_a_surrogate_pair_is_no_stop_string(half: int) -> None:
    with pytest.raises(SamplingError, match=rf"stop\[1\]: has U\+{half:X}.*leave it out") as caught:
        SamplingParams(stop=("\ud7ff😀\ue000", "a" + chr(half)))
    str(caught.value).encode()  # the message can be printed and sent


def refused(name: str, make: Callable[..., object], *values: object) -> bool:
    """Whether it is, and if so, in a short line that names the setting."""
    with contextlib.suppress(SamplingError):
        make(*values)
        return False
    with pytest.raises(SamplingError, match=f"^{name}: .{{,150}}$"):
        make(*values)
    return True


def with_setting(name: str, value: Any) -> SamplingParams:
    return SamplingParams(**{name: value})


UNBOUNDED = ("top_k", "max_tokens", "min_tokens")


NUMBERS = [name for name in SETTINGS if SETTINGS[name].kind in ("int", "float")]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_refused_in_a_short_line_however_huge(name: str) -> None:
    """Python raises where thousands of digits are written, and where they are made a float."""
    for digits in (400, 5000):
        for number in (10**digits, -(10**digits)):
            allowed = number > 0 and name in UNBOUNDED
            assert refused(name, with_setting, name, number) != allowed
            assert refused(name, from_json, name, number) == (SETTINGS[name].kind == "float")
            assert refused("stop", from_json, "stop", [number])


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_typed_is_refused_in_a_short_line_however_long(name: str) -> None:
    def make(text: str) -> SamplingParams:
        return with_setting(name, from_text(name, text))

    for text in ("9" * 4000, "[" * 100_000, "[" + "9" * 5000 + "]"):
        if SETTINGS[name].kind == "text":
            text = 20 * text  # too long for any constraint
        allowed = text.isdecimal() and name in UNBOUNDED
        assert refused(rf"{name}(\[0\])?", make, text) != allowed
