"""A session at a terminal: lines that are texts for a model, and commands that begin with `/`.

What is made of a text is the business of a subclass: `gpt.interactive` continues it, `gpt.chat`
answers it. Here is what they share: the loop, the commands for the sampling settings, and Ctrl-C,
which stops the text that is being made. Ctrl-D leaves. Without a terminal the lines are read as
they come, which is good for scripts.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import FrameType
from typing import TypeVar

from gpt.errors import SamplingError, UserError
from gpt.line_input import line_input
from gpt.params import SamplingParams, random_seed
from gpt.settings import SETTINGS, from_text, nearest, shown
from gpt.terminal import dim, printable, red, shows_colour
from gpt.transcript import Transcript

NOT_UTF8 = "the line is not UTF-8; check the terminal's encoding"

T = TypeVar("T")


class Session(ABC):
    """What is set and what was said last. Mistakes are shown, never raised.

    Attributes:
        commands: usage and help, in the order of `/help`.
        a_text: what a line that is no command is called.

    Args:
        seed: for every text; None: a new one each time.
    """

    commands: dict[str, str]
    a_text: str

    def __init__(self, params: SamplingParams, seed: int | None) -> None:
        self._params = params
        self._seed = seed
        self._at_start = (params, seed)
        self._colour = shows_colour(sys.stdout)
        self._clean: Callable[[str], str] = printable if sys.stdout.isatty() else str
        self._last: Transcript | None = None

    @abstractmethod
    def greeting(self) -> str:
        """What stands above the first line on a terminal."""

    @abstractmethod
    def _text(self, text: str) -> None:
        """Do what is to be done with a line that is no command.

        Raises:
            UserError: shown as any mistake.
        """

    def run(self) -> int:
        """Ask for lines until there are no more. Returns the exit status."""
        on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if on_terminal:
            print(self.greeting())
        with line_input(self.completions) as read:
            while True:
                try:
                    line = read("> ")
                except EOFError:
                    if on_terminal:
                        print()
                    return 0
                except KeyboardInterrupt:  # as in a shell: what was typed is dropped
                    print("\n(Ctrl-D or /quit leaves)")
                    continue
                except UnicodeDecodeError:
                    self.complain(NOT_UTF8)
                    continue
                try:
                    if not self.take(line, lambda: read("… ")):
                        return 0
                except KeyboardInterrupt:
                    print()

    def completions(self, line: str) -> list[str]:
        """Lines that begin like this one: commands and names of settings."""
        lines = [*self._names(), *(f"/set {name} " for name in self._settings())]
        return [whole for whole in lines if line.startswith("/") and whole.startswith(line)]

    def complain(self, message: str) -> None:
        print(f"{red('error', shows_colour(sys.stderr))}: {message}", file=sys.stderr)

    def take(self, line: str, read: Callable[[], str]) -> bool:
        """Do what a line says; False: leave.

        Args:
            read: gives further lines, for `/multi`; raises EOFError after the last.
        """
        try:
            if line.startswith("/") and not line.startswith("//"):
                name, _, rest = line.partition(" ")
                return self._command(name, rest.strip(), read)
            if line.strip():
                self._text(line[1:] if line.startswith("//") else line)
        except SamplingError as error:
            for field, description in error.violations:
                name = field.partition("[")[0]  # of several stop strings it says which
                self.complain(f"{field}: {description}; it stays {self._value(name)}")
        except UserError as error:
            self.complain(str(error))
        except UnicodeDecodeError:  # a further line
            self.complain(NOT_UTF8)
        except ValueError as error:  # nothing that is typed shall end the session
            self.complain(f"that cannot be done: {error}")
        return True

    # Commands

    def _names(self) -> list[str]:
        return [usage.split()[0] for usage in self.commands]

    def _command(self, name: str, rest: str, read: Callable[[], str]) -> bool:
        """Carry a command out; False: leave. A subclass handles its own and hands others on."""
        if name == "/quit":
            return False
        if name == "/help":
            self._help()
        elif name == "/set":
            self._set(rest)
        elif name == "/show":
            self._show()
        elif name == "/reset":
            self._reset()
            self._say("all settings are as they were at the start")
        elif name == "/seed":
            self._seed_command(rest)
        elif name == "/multi":
            self._text("\n".join(lines_of(read)))
        else:
            names = self._names()
            near = nearest(name, names)
            hint = f"did you mean {near}?" if near else "/help lists them"
            self.complain(f"unknown command {name!r}; {hint} ({self.a_text} may begin with //)")
        return True

    def _help(self) -> None:
        columns = max(map(len, self.commands))
        for usage, what in self.commands.items():
            print(f"  {usage:{columns}}  {what}")
        print(f"Any other line is {self.a_text}; // at its beginning stands for one slash.")
        print("Ctrl-C stops the text that is being made, Ctrl-D leaves.")

    # Settings

    def _settings(self) -> dict[str, str]:
        """What can be set, and what it does."""
        return {name: setting.help for name, setting in SETTINGS.items()}

    def _set(self, rest: str) -> None:
        name, _, text = rest.replace("=", " ", 1).partition(" ")
        if not name:
            self._list()
            return
        known = [*self._settings()]
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else "/set lists them"
            self.complain(f"unknown setting {name!r}; {hint}")
            return
        text = text.strip()
        if text:
            self._change(name, text)
        print(f"{name} = {self._value(name)}" + ("" if text else f" ({self._allowed(name)})"))

    def _change(self, name: str, text: str) -> None:
        """Raises SamplingError: no value for this setting."""
        if name == "seed":
            value = None if text == "random" else from_text(name, text)
            if value is not None:
                replace(self._params, seed=value)  # checks it
            self._seed = value
        else:
            self._params = replace(self._params, **{name: from_text(name, text)})

    def _reset(self) -> None:
        self._params, self._seed = self._at_start

    def _seed_command(self, rest: str) -> None:
        if rest:
            self._change("seed", rest)
        if rest or self._last is None:
            print(f"seed = {self._value('seed')}")
        else:
            print(f"the last text had seed {self._last.params.seed}")

    def _value(self, name: str) -> str:
        if name == "seed":
            return "random" if self._seed is None else str(self._seed)
        return shown(name, getattr(self._params, name))

    def _allowed(self, name: str) -> str:
        setting = SETTINGS[name]
        none = ", or random" if name == "seed" else ", or none" if setting.optional else ""
        return setting.allowed + none

    def _list(self) -> None:
        helps = self._settings()
        columns = max(map(len, helps))
        for name, what in helps.items():
            print(f"  {name:{columns}}  {self._value(name):>6}  {dim(what, self._colour)}")

    def _changed(self) -> list[str]:
        """The settings that are not at their defaults."""
        defaults = SamplingParams()
        changed = [name for name in SETTINGS if name != "seed"]
        changed = [n for n in changed if getattr(self._params, n) != getattr(defaults, n)]
        return changed + (["seed"] if self._seed is not None else [])

    def _show(self) -> None:
        changed = self._changed()
        for name in changed:
            print(f"{name} = {self._value(name)}")
        if not changed:
            self._say("all settings are at their defaults; /set lists them")

    # For subclasses

    def _params_of_a_text(self) -> SamplingParams:
        return replace(self._params, seed=random_seed() if self._seed is None else self._seed)

    def _say(self, message: str) -> None:
        print(dim(f"({message})", self._colour))


def lines_of(read: Callable[[], str]) -> Iterator[str]:
    """Lines up to an empty one, a dot, or the end."""
    with contextlib.suppress(EOFError):
        while (line := read()) not in ("", "."):
            yield line


def until(pieces: Iterable[T], pressed: Callable[[], bool]) -> Iterator[T]:
    for piece in pieces:
        yield piece
        if pressed():
            return


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C set a mark that is looked at between two tokens; a second one interrupts at once.

    Yields:
        A function that says whether it was pressed.
    """
    presses = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, before)


def write(text: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
