"""The sampling settings by name: as flags, as `/set NAME VALUE`, and as keys of a line of JSON.

One table says for each what kind of value it takes and what it does, so that the three agree. No
torch.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from gpt.errors import SamplingError
from gpt.params import MAX_SEED, SamplingParams, brief


@dataclass(frozen=True)
class Setting:
    """One field of `SamplingParams`.

    Attributes:
        kind: what a value is; str stands for several of them.
        allowed: what may be given, for messages.
        help: what it does, one line.
        optional: whether it may be left without a value (`none`, in JSON `null`).
    """

    kind: type[int] | type[float] | type[str]
    allowed: str
    help: str
    optional: bool = False


SETTINGS: dict[str, Setting] = {
    "max_tokens": Setting(
        int, "a whole number from 1 up", "most tokens to make (default: fill the context)", True
    ),
    "temperature": Setting(
        float,
        "a number from 0 up",
        "below 1 keeps more to what is likely, above 1 strays further, 0 always takes the most "
        "likely token (default: 1)",
    ),
    "top_k": Setting(
        int,
        "a whole number from 0 up",
        "choose among the N most likely tokens only (default: 0, all)",
    ),
    "top_p": Setting(
        float,
        "a number above 0, up to 1",
        "choose among the most likely tokens that together have probability X (default: 1)",
    ),
    "min_p": Setting(
        float,
        "a number from 0 to 1",
        "leave out tokens less than X times as likely as the most likely one (default: 0)",
    ),
    "typical_p": Setting(
        float,
        "a number above 0, up to 1",
        "choose among the tokens about as surprising as is to be expected that together have "
        "probability X (default: 1)",
    ),
    "repetition_penalty": Setting(
        float,
        "a number above 0",
        "above 1 makes tokens that prompt or text have already less likely (default: 1)",
    ),
    "frequency_penalty": Setting(
        float,
        "a number from -2 to 2",
        "make a token less likely each time the text has it (default: 0)",
    ),
    "presence_penalty": Setting(
        float,
        "a number from -2 to 2",
        "make a token less likely once the text has it (default: 0)",
    ),
    "stop": Setting(
        str,
        "up to 16 texts of 1 to 1024 characters",
        "end the text before TEXT; may be given several times",
        True,
    ),
    "seed": Setting(
        int,
        f"a whole number from 0 to {MAX_SEED}",
        "the same seed makes the same text (default: random)",
        True,
    ),
    "logprobs": Setting(
        int,
        "a whole number from 0 to 20",
        "give the log-probability of each token and of the N most likely ones (default: none)",
        True,
    ),
}

assert set(SETTINGS) == {field.name for field in fields(SamplingParams)}

MAX_FLOAT = 1e300
"""JSON's whole numbers have no bound, floats do; nothing here is meant to be this large."""

ALIASES = {
    "temp": "temperature",
    "maxnewtokens": "max_tokens",
    "maxlength": "max_tokens",
    "numpredict": "max_tokens",
    "stopsequences": "stop",
    "stopstrings": "stop",
    "toplogprobs": "logprobs",
}
"""What other programs call these, letters only."""


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `SamplingParams`, for every command that makes text."""
    group = parser.add_argument_group("sampling")
    for name, setting in SETTINGS.items():
        flag = "--" + name.replace("_", "-")
        if setting.kind is str:
            group.add_argument(flag, action="append", metavar="TEXT", help=setting.help)
        else:
            group.add_argument(
                flag,
                type=setting.kind,
                metavar="N" if setting.kind is int else "X",
                help=setting.help,
            )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises SamplingError that lists every value out of range."""
    given = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    return SamplingParams(**given)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `names` that was probably meant, whatever its case and its dashes, if any."""
    plain = {"".join(filter(str.isalnum, known.lower())): known for known in names}
    letters = "".join(filter(str.isalnum, name.lower()))
    if letters in ALIASES and ALIASES[letters] in plain.values():
        return ALIASES[letters]
    found = difflib.get_close_matches(letters, plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def from_text(name: str, text: str) -> Any:
    """A value that somebody typed: `0.7`, `none`, and for stop a text or JSON for several.

    Raises:
        SamplingError: that is no value of this setting. The range is not looked at.
    """
    setting = SETTINGS[name]
    if setting.optional and text.lower() in ("none", "off", "null"):
        return from_json(name, None)
    if setting.kind is str:
        if text[:1] in ('"', "["):  # how to give a newline, or several
            try:
                return from_json(name, json.loads(text))
            except (ValueError, RecursionError):
                raise _no_value(name, text) from None
        return (text,)
    try:
        return setting.kind(text)
    except ValueError:
        raise _no_value(name, text) from None


def from_json(name: str, value: Any) -> Any:
    """A value out of JSON, with the type that the setting has.

    Raises:
        SamplingError: it has another type. The range is not looked at.
    """
    setting = SETTINGS[name]
    if value is None and setting.optional:
        return () if setting.kind is str else None
    if setting.kind is str:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return tuple(texts)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if setting.kind is float and abs(value) < MAX_FLOAT:
            return float(value)
        if setting.kind is int and isinstance(value, int):
            return value
    raise _no_value(name, value)


def shown(name: str, value: Any) -> str:
    """A value as one would type it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return json.dumps(value[0] if len(value) == 1 else value, ensure_ascii=False)
    return repr(value).removesuffix(".0")


def _no_value(name: str, value: Any) -> SamplingError:
    try:
        given = repr(brief(value if isinstance(value, str) else json.dumps(value)))
    except ValueError:  # a number that is too long to be written
        given = brief(value)
    allowed = SETTINGS[name].allowed + (", or none" if SETTINGS[name].optional else "")
    return SamplingError([(name, f"{given} is not {allowed}")])
