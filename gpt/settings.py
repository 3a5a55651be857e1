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
from typing import Any, Literal

from gpt.errors import SamplingError
from gpt.params import MAX_CONSTRAINT_BYTES, MAX_SEED, SamplingParams, brief

Kind = Literal["int", "float", "bool", "text", "texts", "ids", "bias"]


@dataclass(frozen=True)
class Setting:
    """One field of `SamplingParams`.

    Attributes:
        kind: what a value is; "texts" is a tuple of them, "ids" one of token ids, "bias" one of
            (token id, number).
        allowed: what may be given, for messages.
        help: what it does, one line.
        optional: whether it may be left without a value (`none`, in JSON `null`).
    """

    kind: Kind
    allowed: str
    help: str
    optional: bool = False


SETTINGS: dict[str, Setting] = {
    "max_tokens": Setting(
        "int", "a whole number from 1 up", "most tokens to make (default: fill the context)", True
    ),
    "temperature": Setting(
        "float",
        "a number from 0 up",
        "below 1 keeps more to what is likely, above 1 strays further, 0 always takes the most "
        "likely token (default: 1)",
    ),
    "top_k": Setting(
        "int",
        "a whole number from 0 up",
        "choose among the N most likely tokens only (default: 0, all)",
    ),
    "top_p": Setting(
        "float",
        "a number above 0, up to 1",
        "choose among the most likely tokens that together have probability X (default: 1)",
    ),
    "min_p": Setting(
        "float",
        "a number from 0 to 1",
        "leave out tokens less than X times as likely as the most likely one (default: 0)",
    ),
    "typical_p": Setting(
        "float",
        "a number above 0, up to 1",
        "choose among the tokens about as surprising as is to be expected that together have "
        "probability X (default: 1)",
    ),
    "repetition_penalty": Setting(
        "float",
        "a number above 0",
        "above 1 makes tokens that prompt or text have already less likely (default: 1)",
    ),
    "frequency_penalty": Setting(
        "float",
        "a number from -2 to 2",
        "make a token less likely each time the text has it (default: 0)",
    ),
    "presence_penalty": Setting(
        "float",
        "a number from -2 to 2",
        "make a token less likely once the text has it (default: 0)",
    ),
    "stop": Setting(
        "texts",
        "up to 16 texts of 1 to 1024 characters",
        "end the text before TEXT; may be given several times",
        True,
    ),
    "seed": Setting(
        "int",
        f"a whole number from 0 to {MAX_SEED}",
        "the same seed makes the same text (default: random)",
        True,
    ),
    "logprobs": Setting(
        "int",
        "a whole number from 0 to 20",
        "give the log-probability of each token and of the N most likely ones (default: none)",
        True,
    ),
    "min_tokens": Setting(
        "int",
        "a whole number from 0 to max_tokens",
        "do not end the text before N tokens are made (default: 0)",
    ),
    "stop_tokens": Setting(
        "ids",
        "up to 64 token ids",
        "end the text at one of these tokens (default: none)",
        True,
    ),
    "ignore_end_of_text": Setting(
        "bool",
        "true or false",
        "go on after end-of-text as after any other token (default: false)",
    ),
    "logit_bias": Setting(
        "bias",
        "up to 1024 token ids with a number from -100 to 100 each",
        "add to the logits of these tokens (default: none)",
        True,
    ),
    "allowed_tokens": Setting(
        "ids", "token ids, one or more", "make only these tokens (default: all)", True
    ),
    "json_schema": Setting(
        "text", "a JSON schema", "make JSON that fits this schema (default: any text)", True
    ),
    "regex": Setting(
        "text",
        "a regular expression",
        "make a text that all of this expression matches (default: any text)",
        True,
    ),
    "grammar": Setting(
        "text",
        "a grammar in Lark's notation",
        "make a sentence of this grammar (default: any text)",
        True,
    ),
}

assert set(SETTINGS) == {field.name for field in fields(SamplingParams)} - {"prompt_logprobs"}

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
        more: dict[str, Any] = {
            "int": {"type": int, "metavar": "N"},
            "float": {"type": float, "metavar": "X"},
            "bool": {"action": "store_const", "const": True},
            "texts": {"action": "append", "metavar": "TEXT"},
            "text": {"metavar": "TEXT|@FILE"},
            "ids": {"metavar": "ID,ID,…"},
            "bias": {"metavar": "ID:X,ID:X,…"},
        }
        group.add_argument(flag, help=setting.help, **more[setting.kind])


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises SamplingError that lists every value out of range."""
    given = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    for name, value in given.items():
        kind = SETTINGS[name].kind
        if kind == "texts":
            given[name] = tuple(value)
        elif kind in ("ids", "bias", "text"):
            given[name] = from_text(name, value)
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
    """A value that somebody typed: `0.7`, `none`; for stop a text or JSON for several; `3,17` and
    `3:-1.5,17:2` for tokens; `@FILE` for a constraint that stands in a file.

    Raises:
        SamplingError: that is no value of this setting. The range is not looked at.
    """
    setting = SETTINGS[name]
    if setting.optional and text.lower() in ("none", "off", "null"):
        return from_json(name, None)
    if setting.kind == "texts":
        if text[:1] in ('"', "["):  # how to give a newline, or several
            try:
                return from_json(name, json.loads(text))
            except (ValueError, RecursionError):
                raise _no_value(name, text) from None
        return (text,)
    if setting.kind == "text":
        return _read(name, text[1:]) if text.startswith("@") else text
    try:
        if setting.kind == "bool":
            return {"true": True, "false": False, "on": True, "off": False}[text.lower()]
        if setting.kind == "ids":
            return tuple(int(part) for part in text.split(","))
        if setting.kind == "bias":
            pairs = (part.split(":") for part in text.split(","))
            return tuple((int(token), float(number)) for token, number in pairs)
        return int(text) if setting.kind == "int" else float(text)
    except (ValueError, KeyError):
        raise _no_value(name, text) from None


def from_json(name: str, value: Any) -> Any:
    """A value out of JSON, with the type that the setting has.

    Raises:
        SamplingError: it has another type. The range is not looked at.
    """
    setting = SETTINGS[name]
    if value is None and setting.optional:
        return () if name in ("stop", "stop_tokens", "logit_bias") else None
    found: Any = None
    if setting.kind == "texts":
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            found = tuple(texts)
    elif setting.kind == "text":
        if isinstance(value, str):
            found = value
        elif name == "json_schema" and isinstance(value, dict | bool):
            found = json.dumps(value)
    elif setting.kind == "bool":
        found = value if isinstance(value, bool) else None
    elif setting.kind == "ids":
        if isinstance(value, list) and all(map(_whole, value)):
            found = tuple(value)
    elif setting.kind == "bias":
        found = _bias(value)
    elif _number(value) and (setting.kind == "float" or isinstance(value, int)):
        found = float(value) if setting.kind == "float" else value
    elif setting.kind == "int" and _whole(value):
        found = value
    if found is None:
        raise _no_value(name, value)
    return found


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_FLOAT


def _bias(value: Any) -> tuple[tuple[int, float], ...] | None:
    """JSON spells the ids as the names of an object; lists of pairs are taken, too."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        return None
    found = []
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and _number(pair[1])):
            return None
        token = pair[0]
        if isinstance(token, str) and token.isdecimal() and len(token) < 20:
            token = int(token)
        if not _whole(token):
            return None
        found.append((token, float(pair[1])))
    return tuple(found)


def _read(name: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(MAX_CONSTRAINT_BYTES[name] + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise SamplingError([(name, f"cannot read {brief(path)}: {reason}")]) from None


def shown(name: str, value: Any) -> str:
    """A value as one would type it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if SETTINGS[name].kind == "text":
        return str(value)
    if SETTINGS[name].kind == "ids":
        return ",".join(map(str, value))
    if SETTINGS[name].kind == "bias":
        return ",".join(f"{token}:{number:g}" for token, number in value)
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
