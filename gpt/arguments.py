"""The parser that all commands share: help laid out as written, and mistakes met with a hint."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

MAX_THREADS = 1024


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


def add_machine_arguments(
    parser: argparse.ArgumentParser,
    *,
    precision_of: str = "weights and cache",
    measures: bool = False,
) -> argparse._ArgumentGroup:
    """`--device`, `--dtype` and `--threads`: where a model runs, and how. Returns their group.

    Args:
        measures: whether there is `--dtype auto`, the default then (`gpt.native.precision`).
    """
    group = parser.add_argument_group("machine")
    group.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or mps (default: cpu)")
    group.add_argument(
        "--dtype",
        default="auto" if measures else "float32",
        choices=[*(["auto"] if measures else []), "float32", "bfloat16", "float64"],
        help=f"precision of {precision_of} (default: "
        + ("auto: bfloat16 for large models where it is measured to be faster, else " * measures)
        + "float32)",
    )
    group.add_argument(
        "--threads",
        type=number(int, 1, MAX_THREADS),
        metavar="N",
        help="CPU threads (default: torch's own choice)",
    )
    return group


def add_switch(group: argparse._ActionsContainer, flag: str, *, default: bool, help: str) -> None:
    """`--NAME` and `--no-NAME`. The help says what the default is, in words."""
    action = group.add_argument(flag, action=argparse.BooleanOptionalAction, help=help)
    action.default = default  # given above, older Pythons add it to the help once more


class SecretFlag(argparse.Action):
    """A flag that there is not, for what is secret. Without it argparse would take it as short for
    another one, and what was given would be repeated where that one's value is.

    Args:
        place: where the secret belongs, in words.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, place: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, help=argparse.SUPPRESS)
        self._place = place

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(
            f"there is no {option_string}, since whoever is on this machine sees what a command "
            f"was given; put it into {self._place}"
        )


class number:  # noqa: N801 - used like a function; its name shows in no message
    """An argparse type: a number within bounds. Written so that NaN never passes."""

    def __init__(self, kind: type[int] | type[float], low: float, high: float = math.inf) -> None:
        self._kind, self._low, self._high = kind, low, high

    def __call__(self, text: str) -> float:
        try:
            value = self._kind(text)
        except ValueError:
            noun = "a whole number" if self._kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun}") from None
        if not (self._low <= value <= self._high and math.isfinite(value)):
            upper = "" if self._high == math.inf else f" and at most {self._high:g}"
            raise argparse.ArgumentTypeError(f"{text} must be at least {self._low:g}{upper}")
        return value


def examples(*lines: str) -> str:
    """An epilog of examples, one command a line."""
    return "\n".join(["examples:", *(f"  {line}" for line in lines)])
