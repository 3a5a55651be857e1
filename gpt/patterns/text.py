"""How a configuration spells a pattern: text to object, and whose code may be imported for it.

    causal                              everything before
    window:256                          itself and the 255 before it
    window:256+sinks:4                  and the first four (`global:4` is the same)
    dilated:256:4                       256 keys, every fourth position
    fixed:128:8                         the own block of 128, the last 8 of each earlier one
    bigbird:192:64:3:0                  window, first tokens, random blocks of 64, seed
    mypackage.patterns:Mine(16, x=2)    a subclass of `gpt.patterns.Pattern` of your own

**Your own, and whose code runs.** Importing a module runs it, and a model folder from elsewhere can
name any module. Therefore a class is used without ado only if it is a `Pattern` that the process
has imported already; a module is imported only if it is trusted: the training command trusts those
that its own settings name, everybody else those in `ANTIPHON_PATTERN_MODULES` (separated by
commas). Arguments are literals; nothing is evaluated.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from gpt.errors import ConfigError
from gpt.patterns.base import LayerPatterns, Pattern
from gpt.patterns.family import BigBird, Causal, Dilated, Fixed, SlidingWindow

TRUSTED_MODULES = "ANTIPHON_PATTERN_MODULES"

FORMS = (
    "causal",
    "window:WIDTH",
    "window:WIDTH+sinks:N",
    "dilated:WIDTH:STEP",
    "fixed:BLOCK:LAST",
    "bigbird:WINDOW:GLOBAL:RANDOM:SEED",
    "package.module:Class",
)
_NUMBER = r":([0-9]{1,9})"
_GRAMMAR: tuple[tuple[str, Callable[..., Pattern]], ...] = (
    ("causal", Causal),
    (rf"window{_NUMBER}", SlidingWindow),
    (rf"window{_NUMBER}\+(?:sinks|global){_NUMBER}", SlidingWindow),
    (rf"dilated{_NUMBER}{_NUMBER}", Dilated),
    (rf"fixed{_NUMBER}{_NUMBER}", Fixed),
    (rf"bigbird{_NUMBER}{_NUMBER}{_NUMBER}(?:{_NUMBER})?", BigBird),
)
_CLASS_PATH = re.compile(r"([A-Za-z_][\w.]{0,200}):([A-Za-z_]\w{0,100})(\(.{0,500}\))?", re.DOTALL)
_trusted: set[str] = set()


class ClassPath(NamedTuple):
    """A pattern of the user's own, as it is written."""

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def check_pattern(text: str) -> None:
    """Raise ConfigError unless this spells a pattern. Imports nothing: whether a class of the
    user's own exists is found out when it is needed (`parse_pattern`)."""
    _read(text)


@lru_cache(maxsize=256)
def parse_pattern(text: str) -> Pattern:
    """The pattern that a text spells.

    Raises:
        ConfigError: it spells none, or names a class that is not there, is no `Pattern`, or whose
            module is not trusted.
    """
    read = _read(text)
    return _instance(text, read) if isinstance(read, ClassPath) else read


def parse_patterns(texts: str | Sequence[str]) -> LayerPatterns:
    """One pattern, or the list of them that repeats over the layers. Raises ConfigError."""
    listed = [texts] if isinstance(texts, str) else list(texts)
    kinds = list(dict.fromkeys(map(parse_pattern, listed)))
    return LayerPatterns(tuple(kinds), tuple(kinds.index(parse_pattern(text)) for text in listed))


def trust(texts: str | Iterable[str]) -> None:
    """Let the modules that these patterns name be imported. For settings that the user wrote."""
    for text in [texts] if isinstance(texts, str) else texts:
        read = _read(text)
        if isinstance(read, ClassPath):
            _trusted.add(read.module)


def _read(text: str) -> Pattern | ClassPath:
    for form, kind in _GRAMMAR:
        if found := re.fullmatch(form, text, re.ASCII):
            numbers = [int(digits) for digits in found.groups() if digits is not None]
            return _checked(text, kind, numbers)
    if found := _CLASS_PATH.fullmatch(text):
        module, name, call = found.groups()
        args, kwargs = _arguments(text, call)
        return ClassPath(module, name, args, kwargs)
    name = text.partition(":")[0]
    names = [form.partition(":")[0] for form in FORMS[:-1]]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near and near[0] != name else ""
    raise ConfigError(f"pattern is {text[:60]!r}, but must be one of {', '.join(FORMS)}{hint}")


def _checked(text: str, kind: Callable[..., Pattern], numbers: list[int]) -> Pattern:
    """A built-in with numbers that make sense."""
    least = {SlidingWindow: (1, 0), Dilated: (1, 1), Fixed: (1, 1), BigBird: (1, 0, 0, 0)}
    for number, low in zip(numbers, least.get(kind, ()), strict=False):  # type: ignore[call-overload]
        if number < low:
            raise ConfigError(f"pattern is {text[:60]!r}, but its numbers must be at least 1")
    if kind is Fixed and numbers[1] > numbers[0]:
        raise ConfigError(
            f"pattern is {text[:60]!r}, but the last {numbers[1]} positions of a block of "
            f"{numbers[0]} are more than it has"
        )
    if kind is BigBird and numbers[2] > 1000:
        raise ConfigError(f"pattern is {text[:60]!r}, but may draw at most 1000 random blocks")
    return kind(*numbers)


def _arguments(text: str, call: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Literal arguments, as in `(16, names=['a'])`."""
    try:
        tree = ast.parse(f"f{call or '()'}", mode="eval").body
        assert isinstance(tree, ast.Call)
        args = tuple(ast.literal_eval(arg) for arg in tree.args)
        kwargs = {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords if word.arg}
        if len(kwargs) == len(tree.keywords):
            return args, kwargs
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        pass
    raise ConfigError(
        f"pattern is {text[:60]!r}, but its arguments must be plain numbers, texts and lists, "
        "as in package.module:Class(16, step=2)"
    )


def _instance(text: str, path: ClassPath) -> Pattern:
    module = sys.modules.get(path.module)
    if module is None:
        named = {part.strip() for part in os.environ.get(TRUSTED_MODULES, "").split(",")}
        if path.module not in _trusted | named:
            raise ConfigError(
                f"pattern {text[:60]!r} is a class of the module {path.module}, and importing it "
                f"runs its code; if you trust it, set {TRUSTED_MODULES}={path.module}"
            )
        try:
            module = importlib.import_module(path.module)
        except ImportError as error:
            raise ConfigError(
                f"pattern is {text[:60]!r}, but {path.module} cannot be imported ({error}); is its "
                "folder on PYTHONPATH?"
            ) from None
    kind = getattr(module, path.name, None)
    if not (isinstance(kind, type) and issubclass(kind, Pattern)):
        raise ConfigError(
            f"pattern is {text[:60]!r}, but {path.name} is no subclass of gpt.patterns.Pattern in "
            f"{path.module}"
        )
    try:
        pattern = kind(*path.args, **path.kwargs)
        hash(pattern)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"pattern {text[:60]!r} cannot be made: {error}") from None
    return pattern
