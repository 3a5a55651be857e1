"""The parser of the training command: its help, its mistakes, and the configs it is given."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from typing import Any, NoReturn

import yaml
from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser

from gpt.config import PRESETS, GPTConfig
from gpt.training.command import DESCRIPTION, SUBCOMMANDS, command_of
from gpt.training.complaints import CONFIG_FLAGS, explain
from gpt.training.run import find_config

DERIVED_SIZES = ("n_kv_head", "head_dim", "d_ff")
"""Fields of an architecture that follow from others unless they are set."""

HAS_SKIP_UNSET = tuple(int(n) for n in version("jsonargparse").split(".")[:2]) >= (4, 49)


class UsageError(Exception):
    """A command line or config file that cannot be read."""


class HelpFormatter(DefaultHelpFormatter):
    """Leaves the lines of the examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return "".join(f"{indent}{line}\n" for line in text.splitlines())
        return super()._fill_text(text, width, indent)


class Parser(LightningArgumentParser):
    """Raises instead of printing a page of usage, and says what a misspelt option is near to.

    Lightning calls two methods of it by what newer versions of the parser deprecate.
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UsageError(explain(message, self.options())) from ex

    def add_class_arguments(self, theclass: Any, nested_key: str | None = None, *args: Any,
                            **kwargs: Any) -> Any:  # fmt: skip
        if nested_key == "data":
            # A file named as `data.source` is the text itself, not a config with the source in it.
            kwargs["sub_configs"] = False
        return super().add_class_arguments(theclass, nested_key, *args, **kwargs)

    def dump(self, cfg: Any, *args: Any, **kwargs: Any) -> str:
        if HAS_SKIP_UNSET and "skip_none" in kwargs:
            kwargs["skip_unset"] = kwargs.pop("skip_none")
        return str(super().dump(cfg, *args, **kwargs))

    def instantiate_classes(self, cfg: Any, **kwargs: Any) -> Any:
        current = getattr(self, "instantiate", None) or super().instantiate_classes
        return current(cfg, **kwargs)

    def subcommands(self) -> dict[str, Parser]:
        """The parsers of the subcommands, by name."""
        found: dict[str, Parser] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found |= action.choices
        return found

    def options(self) -> list[str]:
        """The names of all options, those of the subcommands included."""
        found = [name for action in self._actions for name in action.option_strings]
        for parser in self.subcommands().values():
            found += parser.options()
        return list(dict.fromkeys(name for name in found if name.startswith("--")))


def parser_kwargs(prog: str) -> dict[str, Any]:
    """What LightningCLI gives the parser and those of the subcommands."""
    command = command_of(prog)
    of_each = {
        name: {
            "description": description,
            "epilog": "\n  ".join(
                ["examples:", *(f"{command} {name} {rest}" for rest in examples)]
            ),
        }
        for name, (description, examples) in SUBCOMMANDS.items()
    }
    return {
        "prog": prog,
        "description": DESCRIPTION,
        "formatter_class": HelpFormatter,  # the subcommands take it over
        **of_each,
    }


def describe_subcommands(parser: argparse.ArgumentParser) -> None:
    """Put our line for each subcommand into the list of them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                listed.help = SUBCOMMANDS[listed.dest][0]


def with_config_paths(argv: list[str]) -> list[str]:
    """The arguments with the names of shipped configs replaced by their files.

    Configs are put first behind the subcommand: the parser goes by order, but flags win wherever
    they stand.
    """
    configs: list[str] = []
    others: list[str] = []
    after_flag = False
    for argument in argv:
        flag, equals, value = argument.partition("=")
        found = configs if after_flag or flag in CONFIG_FLAGS else others
        if after_flag:
            argument = _readable_config(argument)
        elif equals and flag in CONFIG_FLAGS:
            argument = f"{flag}={_readable_config(value)}"
        after_flag = not after_flag and argument in CONFIG_FLAGS
        found.append(argument)
    behind = 1 if others and not others[0].startswith("-") else 0
    return [*others[:behind], *configs, *others[behind:]]


def with_preset(argv: list[str], preset: str) -> list[str]:
    """The arguments with the values of a preset behind the configs: they win over those of a file
    and lose to flags of their own.

    Beside what the preset names these are the sizes that would follow from it but for the file.

    Raises:
        ConfigError: there is no such preset.
    """
    config = GPTConfig.preset(preset)
    names = dict.fromkeys((*PRESETS[preset], *DERIVED_SIZES))
    values = [
        f"--model.config.{name}={yaml.safe_dump(getattr(config, name)).split()[0]}"
        for name in names
        if name != "vocab_size" or config.vocab_size
    ]
    behind = 1  # the subcommand
    for place, word in enumerate(argv):
        flag, equals, _ = word.partition("=")
        if flag in CONFIG_FLAGS:
            behind = place + (1 if equals else 2)
    return [*argv[:behind], *values, *argv[behind:]]


def gives_preset(argv: list[str]) -> bool:
    """Whether a preset is named on the command line, not in a file."""
    return any(word.partition("=")[0] == "--model.preset" for word in argv)


def _readable_config(given: str) -> str:
    """The path of a config. Raises UsageError that names it if it holds no settings."""
    path = find_config(given)
    no_settings = (
        f"{path} is not a mapping of settings; a text to train on is given with --data.source"
    )
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        if path.suffix not in (".yaml", ".yml"):
            raise UsageError(no_settings) from None
        raise UsageError(f"{path} is not YAML: {error}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(found, dict):
        raise UsageError(no_settings)
    return str(path)
