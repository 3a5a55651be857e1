"""What the parser complains of, in words that help: the name that was meant, and the file."""

from __future__ import annotations

import contextlib
import difflib
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

CONFIG_FLAGS = ("--config", "-c")
UNKNOWN_KEY = re.compile(r"does not accept (?:option|nested key) '([^']+)'")
WRONG_VALUE = re.compile(
    r"Parser key \"([^\"]+)\":(.*?)(?:Got value|Given value): (.*?)\s*$", re.DOTALL
)
SETTING = re.compile(r"there is no setting ([^\s;]+)|(\S+) is '")
TYPE = re.compile(r"<class '(\w+)'>")
WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list, as [a, b]",
    "tuple": "a list, as [a, b]",
    "dict": "settings with names, as {a: 1}",
    "str": "text",
    "NoneType": "null",
}
LITERAL = re.compile(r"Literal\[([^\]]*)\]")


def explain(message: str, options: list[str]) -> str:
    """The parser's complaint with what was probably meant, and without what only its authors read.

    Args:
        message: of the parser.
        options: names of all options.
    """
    given = None
    if message.startswith("unrecognized arguments: "):
        given = next((word for word in message.split() if word.startswith("--")), None)
    elif (unknown := UNKNOWN_KEY.search(message)) is not None:
        name = unknown[1]
        given = f"--{name}"
        message = f"there is no setting {name}"
    elif (wrong := WRONG_VALUE.search(message)) is not None:
        name, value = wrong[1], wrong[3].strip()
        allowed = [
            word.strip("'\"")
            for literal in LITERAL.findall(message)
            for word in literal.split(", ")
        ]
        allowed = list(dict.fromkeys(allowed))
        if not allowed:
            return _in_words(name, value, wrong[2]) or message
        near = difflib.get_close_matches(value, allowed, n=1)
        message = f"{name} is {value!r}, but must be one of {', '.join(allowed)}"
        return message + (f"; did you mean {near[0]}?" if near else "")
    near_option = None if given is None else nearest(given.partition("=")[0], options)
    if near_option is not None:
        dashes = "--" if message.startswith("unrecognized") else ""
        message += f"; did you mean {dashes}{near_option.removeprefix('--')}?"
    return message


def _in_words(name: str, value: str, expected: str) -> str | None:
    """A complaint about the type of a value, or None if a type has no words here."""
    expected = expected.partition("Given value type")[0]
    types = list(dict.fromkeys(TYPE.findall(expected)))
    if not types or not all(kind in WORDS for kind in types):
        return None
    if "float" in types and "int" in types:
        types.remove("int")
    first, *others = (WORDS[kind] for kind in types)
    return f"{name} is {value!r}, but must be {' or '.join([first, *others])}"


def nearest(given: str, options: list[str]) -> str | None:
    """The option that was probably meant: one begun so (seed), one with the same last part, or one
    spelt nearly so.

    Of several with the same last part it is the one whose whole name is nearest.
    """
    begun = [name for name in options if "." not in name and name.startswith(f"{given}_")]
    if begun:
        return begun[0]
    last = given.removeprefix("--").rpartition(".")[2]
    same = [name for name in options if name.removeprefix("--").rpartition(".")[2] == last]
    if same:
        return max(same, key=lambda name: difflib.SequenceMatcher(None, given, name).ratio())
    near = difflib.get_close_matches(given, options, n=1, cutoff=0.75)
    if not near:
        lasts = {name.removeprefix("--").rpartition(".")[2]: name for name in reversed(options)}
        near = [lasts[word] for word in difflib.get_close_matches(last, lasts, n=1, cutoff=0.75)]
    return near[0] if near else None


def naming_the_file(message: str, argv: list[str]) -> str:
    """A complaint about a setting, with the config file that it stands in, if it is from one."""
    found = SETTING.match(message)
    if found is None:
        return message
    name = found[1] or found[2]
    for path in _configs(argv):
        with contextlib.suppress(OSError, yaml.YAMLError, UnicodeDecodeError):
            if _holds(yaml.safe_load(path.read_text(encoding="utf-8")), name.split(".")):
                return f"{path}: {message}"
    return message


def _configs(argv: list[str]) -> list[Path]:
    after = [value for flag, value in pairwise(argv) if flag in CONFIG_FLAGS]
    parts = [argument.partition("=") for argument in argv]
    joined = [value for flag, equals, value in parts if equals and flag in CONFIG_FLAGS]
    return [Path(given) for given in (*after, *joined)]


def _holds(tree: Any, keys: list[str]) -> bool:
    for key in keys:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True
