"""The parser that all commands share: help laid out as written, and mistakes met with a hint."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` that says what a misspelt option, command or choice is near to.

    Descriptions and epilogs keep their lines, so that examples stay examples. Parsers of
    subcommands made from one are of this class too.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += hint(str(value), map(str, action.choices or ()))
            raise

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            given = next((word for word in message.split() if word.startswith("--")), None)
            if given is not None:
                message += hint(given.partition("=")[0], self._options())
        super().error(message)

    def _options(self) -> list[str]:
        """Those of subcommands too: what they do not know is complained of here."""
        found = [*self._option_string_actions]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    found += parser._option_string_actions
        return found


def hint(given: str, possible: Iterable[str]) -> str:
    """`; did you mean X?` if something is spelt much like what was given, else nothing."""
    near = difflib.get_close_matches(given, list(possible), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def examples(*lines: str) -> str:
    """An epilog of examples, one command a line."""
    return "\n".join(["examples:", *(f"  {line}" for line in lines)])
