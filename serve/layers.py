"""Settings from flags, environment, a YAML file and defaults, in this order of precedence.

The parser is the one description of them: names, types, bounds and defaults are its, wherever a
value comes from.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpt.arguments import hint
from gpt.errors import ConfigError

PREFIX = "ANTIPHON_SERVE_"
"""Of variables. Longer than the program's name, since Kubernetes sets ANTIPHON_PORT and others for
a service of that name."""

NOT_SETTINGS = ("help", "config", "print_config")
_TRUTHS = {"true": True, "yes": True, "on": True, "1": True}
_TRUTHS |= {"false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class Layered:
    """Attributes:
    values: all that the parser knows, by name.
    origins: where each that is no default comes from, in words.
    """

    values: dict[str, Any]
    origins: dict[str, str]


def read(
    parser: argparse.ArgumentParser,
    argv: list[str],
    environ: Mapping[str, str],
    *,
    secrets: Iterable[str] = (),
) -> Layered:
    """Parse the flags, and look for what they do not say in the other places.

    Args:
        parser: has a `--config FILE`.
        secrets: names that are read from the environment alone, as text.

    Raises:
        ConfigError: a name that is not known, or a value that the parser does not take.
    """
    actions = settings_of(parser)
    unset = object()
    given = parser.parse_intermixed_args(
        argv, argparse.Namespace(**dict.fromkeys([*actions, *NOT_SETTINGS[1:]], unset))
    )
    flags = {name: value for name, value in vars(given).items() if value is not unset}
    # A positional argument that is left out counts as given, with its default.
    flags = {name: value for name, value in flags.items() if value not in (None, [])}

    values = {name: action.default for name, action in actions.items()}
    origins: dict[str, str] = {}
    file = flags.get("config") or environ.get(f"{PREFIX}CONFIG")
    if file:
        for name, text, where in _in_file(Path(file), actions, secrets):
            values[name], origins[name] = _converted(parser, actions[name], text, where), where
    known = {_variable(name): name for name in [*actions, *secrets, "config"]}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or not text:  # empty is as good as none
            continue
        if variable not in known:
            raise ConfigError(f"unknown setting {variable}{hint(variable, known)}")
        name = known[variable]
        if name in actions:
            listed = isinstance(actions[name], Listed)
            parts = [part.strip() for part in text.split(",")] if listed else text
            values[name] = _converted(parser, actions[name], parts, variable)
            origins[name] = variable
        elif name in secrets:
            values[name], origins[name] = text, variable
    for name, value in flags.items():
        values[name] = value
        if name in actions:
            origins[name] = "flag"
    return Layered(values, origins)


def settings_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """What can be set, by name."""
    others = (*NOT_SETTINGS, argparse.SUPPRESS)
    return {action.dest: action for action in parser._actions if action.dest not in others}


def shown(parser: argparse.ArgumentParser, layered: Layered, secrets: Iterable[str] = ()) -> str:
    """All settings as a file that `--config` takes; of secrets only that there are some."""
    lines = []
    for name, action in settings_of(parser).items():
        line = f"{name}: {scalar(action, layered.values[name])}"
        lines.append(line + _remark(layered.origins.get(name, "")))
    for name in secrets:
        if layered.values.get(name):
            lines.append(f"# {name}: hidden, from {layered.origins[name]}")
    return "\n".join(lines)


def summary(parser: argparse.ArgumentParser, layered: Layered) -> str:
    """What is no default, in one line; of secrets only that there are some."""
    actions = settings_of(parser)
    parts = [
        f"{name} {scalar(actions[name], layered.values[name]) if name in actions else 'hidden'} "
        f"({where})"
        for name, where in sorted(layered.origins.items())
    ]
    return ", ".join(parts) or "all defaults"


class Listed(argparse.Action):
    """A flag that may be given several times, or an argument of any number: its value is a list,
    in a file too; in a variable there are commas between its parts."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        new = values if isinstance(values, list) else [values]
        setattr(namespace, self.dest, [*before, *new] if isinstance(before, list) else new)


def scalar(action: argparse.Action, value: Any) -> str:
    """A setting's value as YAML has it."""
    if value is None:
        return "null"
    if isinstance(value, list):
        if len(value) == 1:
            return scalar(action, value[0])
        parts = [str(each) for each in value]
        listed: str = yaml.safe_dump(
            parts, width=10**6, allow_unicode=True, default_flow_style=True
        )
        return listed.strip()
    if action.dest.endswith("_mode"):
        return f'"{value:o}"'
    if isinstance(value, bool | int | float):
        return str(value).lower()
    text: str = yaml.safe_dump(str(value), width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _remark(origin: str) -> str:
    return f"  # {origin}" if origin else ""


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _in_file(
    path: Path, actions: Mapping[str, argparse.Action], secrets: Iterable[str]
) -> Iterator[tuple[str, str | list[str], str]]:
    """Names, values as text, and where they stand. A value of null is as good as none."""
    try:
        # Every value stays the text that it is: 0660 and no are nothing else here.
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ConfigError(f"cannot read the settings {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if root is None:  # empty
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} must hold NAME: VALUE lines, as max_running: 8")
    seen: set[str] = set()
    for key, value in root.value:
        where = f"{path}:{key.start_mark.line + 1}"
        written = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
        name = written.replace("-", "_")
        if name in secrets:
            raise ConfigError(
                f"{where}: {written} is secret and only taken from the environment "
                f"({_variable(name)})"
            )
        if name not in actions:
            raise ConfigError(f"{where}: unknown setting {written!r}{hint(name, actions)}")
        if name in seen:
            raise ConfigError(f"{where}: {written} is set twice; leave one of them out")
        seen.add(name)
        if isinstance(value, yaml.SequenceNode) and isinstance(actions[name], Listed):
            parts = [part for part in value.value if isinstance(part, yaml.ScalarNode)]
            if len(parts) < len(value.value):
                raise ConfigError(f"{where}: {written} takes a list of plain values")
            yield name, [str(part.value) for part in parts], where
            continue
        if not isinstance(value, yaml.ScalarNode):
            raise ConfigError(f"{where}: {written} takes one value, not a list or a table")
        plain = value.style is None
        if not (plain and value.value in ("", "null", "~")):
            yield name, str(value.value), where


def _converted(
    parser: argparse.ArgumentParser, action: argparse.Action, text: str | list[str], where: str
) -> Any:
    """The value that a text stands for, as if it had been given by flag."""
    if isinstance(action, Listed):
        parts = [text] if isinstance(text, str) else text
        return [_one(parser, action, part, where) for part in parts] or None
    assert isinstance(text, str)
    return _one(parser, action, text, where)


def _one(parser: argparse.ArgumentParser, action: argparse.Action, text: str, where: str) -> Any:
    if isinstance(action, argparse.BooleanOptionalAction):
        if text.strip().lower() not in _TRUTHS:
            raise ConfigError(f"{where}: {action.dest} is {text!r}, but must be true or false")
        return _TRUTHS[text.strip().lower()]
    try:
        value = parser._get_value(action, text)
        parser._check_value(action, value)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{where}: {action.dest}: {error.message}") from None
    return value
