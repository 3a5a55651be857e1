"""The `antiphon completion` command: a script that makes a shell complete all other commands.

It is made with shtab from the commands' own parsers, so it knows what they know. The script is
static: the seconds that the trainer's parser takes are spent once, when it is written to a file.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import shtab

from gpt.arguments import CommandParser, examples

SHELLS = [shell for shell in ("bash", "zsh", "fish", "tcsh") if shell in shtab.SUPPORTED_SHELLS]

PATHS = frozenset({"MODEL", "RUN", "FILE", "FOLDER", "DIR", "PATH", "CKPT", "YAML", "SOURCE"})
"""Placeholders that stand for a path."""

TOKENIZERS = ("bpe", "bytes", "chars", "gpt2", "cl100k_base", "o200k_base")

WORDS: dict[str, Callable[[], Iterable[str]]] = {
    "--config": lambda: importlib.import_module("gpt.training.run").shipped_configs(),
    "--data.source": lambda: importlib.import_module("gpt.data.named").NAMED,
    "SOURCE": lambda: importlib.import_module("gpt.data.named").NAMED,
    "--data.tokenizer": lambda: TOKENIZERS,
    "--tokenizer": lambda: TOKENIZERS,
    "--ckpt_path": lambda: ("best", "last"),
    "--device": lambda: ("cpu", "cuda", "mps"),
    "--model.preset": lambda: importlib.import_module("gpt.config").PRESETS,
}
"""Names that are offered beside files: for an option, or for a placeholder."""

DESCRIPTION = """\
Print a script that makes a shell complete antiphon's commands, options, choices and files.

Write it to a file once, and again after an update (it takes some seconds):

  bash  antiphon completion bash > ~/.local/share/bash-completion/completions/antiphon
        (make the folder first: mkdir -p; it needs the package bash-completion. Without that, write
        it to any file, and put `source FILE` into ~/.bashrc)
  zsh   antiphon completion zsh > ~/.zfunc/_antiphon
        (make the folder first; ~/.zshrc needs `fpath+=~/.zfunc` before `compinit`)
  fish  antiphon completion fish > ~/.config/fish/completions/antiphon.fish
  tcsh  antiphon completion tcsh > ~/.antiphon.tcsh, and `source ~/.antiphon.tcsh` in ~/.tcshrc

A new shell completes then: antiphon sa<Tab>, antiphon sample --temp<Tab>."""


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=examples("antiphon completion bash", "antiphon completion zsh"),
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")
    return parser


def main(argv: list[str], prog: str = "antiphon completion") -> int:
    """Print the script."""
    args = build_parser(prog).parse_args(argv)
    sys.stdout.write(script(args.shell).rstrip() + "\n")
    return 0


def script(shell: str) -> str:
    """The completion script for that shell."""
    made: str = shtab.complete(whole_parser(), shell=shell)
    return made


def whole_parser() -> argparse.ArgumentParser:
    """One parser that has every command below it, with what completes each argument."""
    from gpt.cli import COMMANDS

    def parser_of(*, prog: str, **_: Any) -> argparse.ArgumentParser:
        """What `add_parser` calls to make the parser of a command: the command's own."""
        name = prog.rpartition(" ")[2]
        if name == "train":
            return _train(prog)
        module = importlib.import_module(COMMANDS[name].target.partition(":")[0])
        parser: argparse.ArgumentParser = module.build_parser(prog)
        return parser

    root = CommandParser(prog="antiphon")
    root.add_argument("-V", "--version", action="store_true", help="show which version this is")
    make = cast("type[argparse.ArgumentParser]", parser_of)
    commands = root.add_subparsers(metavar="COMMAND", parser_class=make)
    for name, command in COMMANDS.items():
        _describe(commands.add_parser(name, help=command.help))
    return root


def _train(prog: str) -> argparse.ArgumentParser:
    """`antiphon train` as plain argparse: shtab cannot read the actions of the trainer's parser."""
    from gpt.training.cli import build_parser

    parser = CommandParser(prog=prog)
    subparsers = parser.add_subparsers(metavar="SUBCOMMAND")
    for name, read in build_parser(prog).subcommands().items():
        below = subparsers.add_parser(name, help=read.description)
        for action in read._actions:
            flags = [
                flag
                for flag in action.option_strings
                if not flag.endswith((".help", "+")) and flag not in ("-h", "--help")
            ]
            if flags:
                below.add_argument(*flags, help=_plain(action.help), choices=_choices(action))
    return parser


def _choices(action: argparse.Action) -> list[str] | None:
    """The words that an option takes, which the trainer's parser has in its placeholder only."""
    shown = action.metavar if isinstance(action.metavar, str) else ""
    if shown.startswith("{") and shown.endswith("}"):
        return shown[1:-1].split(",")
    return None


def _plain(text: str | None) -> str:
    """The first sentence of a help text, without what argparse would fill in."""
    return (text or "").partition(". ")[0].replace("%", "%%")


def _describe(parser: argparse.ArgumentParser) -> None:
    """Say, of every argument, whether it is a file or one of some names."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _describe(below)
        elif action.choices is None and action.nargs != 0:
            # As NAME|PATH, or FILE.jsonl.
            placeholder = action.metavar if isinstance(action.metavar, str) else ""
            parts = re.split(r"[|.:]", placeholder)
            keys = [*action.option_strings, *parts]
            words = next((list(WORDS[key]()) for key in keys if key in WORDS), [])
            named = bool(PATHS & set(parts)) or action.type is Path
            if words:
                action.complete = _words_or_files(words)  # type: ignore[attr-defined]
            elif named:
                action.complete = shtab.FILE  # type: ignore[attr-defined]


def _words_or_files(words: list[str]) -> dict[str, Any]:
    """Some names, or any file. Other shells than bash are offered the files."""
    name = "_antiphon_" + "_".join("".join(filter(str.isalnum, word)) for word in words[:2])
    function = f'{name}() {{\n  compgen -W "{" ".join(words)}" -- $1\n  compgen -f -- $1\n}}'
    return {**shtab.FILE, "bash": name, "preamble": {"bash": function}}
