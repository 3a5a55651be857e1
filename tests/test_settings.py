"""One table of settings: as flags, as typed text, as JSON."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
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
        "presence_penalty": 0.25, "stop": ("a", "b"), "seed": 9, "logprobs": 0,
    }  # fmt: skip
    assert set(wanted) == set(SETTINGS)
    flags: list[str] = []
    for name, value in wanted.items():
        for one in value if isinstance(value, tuple) else [value]:
            flags += ["--" + name.replace("_", "-"), str(one)]
    assert parsed(*flags) == SamplingParams(**wanted)  # type: ignore[arg-type]
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
    ],
)
def test_values_can_be_typed_and_are_shown_as_typed(name: str, text: str, value: object) -> None:
    assert from_text(name, text) == value
    assert from_text(name, shown(name, value)) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "hot"), ("temperature", "none"), ("top_k", "1.5"), ("stop", '["a", 1]'),
        ("stop", '"a'), ("seed", ""),
    ],
)  # fmt: skip
def test_what_is_no_value_says_what_is_allowed(name: str, text: str) -> None:
    with pytest.raises(SamplingError, match=f"{name}: .* is not (a|up)"):
        from_text(name, text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.7"), ("temperature", True), ("temperature", None), ("temperature", []),
        ("temperature", 10**400), ("top_k", 2.0), ("top_k", False), ("stop", [1]), ("stop", {}),
        ("max_tokens", "5"),
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
        ("logprobs", -1), ("logprobs", 21),
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(field: str, value: object) -> None:
    """S13: NaN never passes."""
    with pytest.raises(SamplingError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


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


UNBOUNDED = ("top_k", "max_tokens")


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "stop"])
def test_numbers_are_refused_in_a_short_line_however_huge(name: str) -> None:
    """Python raises where thousands of digits are written, and where they are made a float."""
    for digits in (400, 5000):
        for number in (10**digits, -(10**digits)):
            allowed = number > 0 and name in UNBOUNDED
            assert refused(name, with_setting, name, number) != allowed
            assert refused(name, from_json, name, number) == (SETTINGS[name].kind is float)
            assert refused("stop", from_json, "stop", [number])


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_typed_is_refused_in_a_short_line_however_long(name: str) -> None:
    def make(text: str) -> SamplingParams:
        return with_setting(name, from_text(name, text))

    for text in ("9" * 4000, "[" * 100_000, "[" + "9" * 5000 + "]"):
        allowed = text.isdecimal() and name in UNBOUNDED
        assert refused(rf"{name}(\[0\])?", make, text) != allowed
