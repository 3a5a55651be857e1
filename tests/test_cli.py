"""The `antiphon` command: dispatch, help, exit statuses, and how mistakes are shown."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from gpt import cli
from tests import warm

ROOT = Path(__file__).resolve().parents[1]

# Subcommands that do one thing each, for what no real subcommand does on demand.
PLAYED = """
import os, signal, sys
from gpt.errors import DataError

def mistaken(argv, prog):
    raise DataError("notes.txt is empty; give a file with some text")

def talkative(argv, prog):
    while True:
        print("again and again")

def interrupted(argv, prog):
    print("started", flush=True)
    signal.pause()

def inner_pipe(argv, prog):
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"x")

def repeat(argv, prog):
    print(prog, argv)
    return 7
"""


@pytest.fixture
def played(tmp_path: Path) -> dict[str, str]:
    """The environment for `python -m played COMMAND`, which has the commands above alone."""
    (tmp_path / "played_commands.py").write_text(PLAYED)
    (tmp_path / "played.py").write_text(
        "import sys\n"
        "from gpt import cli\n"
        "names = ['mistaken', 'talkative', 'interrupted', 'inner_pipe', 'repeat']\n"
        "cli.COMMANDS = {n: cli.Command(f'played_commands:{n}', n, ()) for n in names}\n"
        "sys.exit(cli.main())\n"
    )
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def run(
    *arguments: str, module: str = "gpt", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, env=env, text=True, timeout=120
    )


def test_help_lists_every_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in shown
        assert command.help in shown
        assert all(f"antiphon {example}" in shown for example in command.examples)


def test_help_fits_a_terminal_of_100_columns() -> None:
    assert max(map(len, cli.overview().splitlines())) <= 100


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nonsense"]])
def test_the_overview_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from gpt.cli import main; main(sys.argv[1:]); "
        "heavy = ('torch', 'numpy', 'grpc', 'lightning', 'tiktoken'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_no_command_shows_the_overview_and_is_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 2
    assert "usage: antiphon" in capsys.readouterr().err


def test_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        expected = metadata.version("antiphon")
    except metadata.PackageNotFoundError:
        expected = "unknown (not installed"
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"antiphon {expected}")


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("sampel", "sample"), ("genrate", "generate"), ("--versoin", "--version")],
)
def test_an_unknown_command_suggests_the_nearest(
    given: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([given]) == 2
    assert f"did you mean {nearest}?" in capsys.readouterr().err


def test_an_unknown_command_like_no_other_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["zzz"]) == 2
    assert f"there are: {', '.join(cli.COMMANDS)}" in capsys.readouterr().err


def test_arguments_reach_the_command_and_its_status_comes_back(played: dict[str, str]) -> None:
    done = run("repeat", "a", "--b", "-h", module="played", env=played)
    assert (done.returncode, done.stdout) == (7, "antiphon repeat ['a', '--b', '-h']\n")


def test_help_of_one_command_is_that_commands_own(played: dict[str, str]) -> None:
    done = run("help", "repeat", module="played", env=played)
    assert done.stdout == "antiphon repeat ['--help']\n"


def test_help_of_a_subcommand_is_that_subcommands(played: dict[str, str]) -> None:
    done = run("help", "repeat", "deep", module="played", env=played)
    assert done.stdout == "antiphon repeat ['deep', '--help']\n"


def test_help_of_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "sampel"]) == 2
    assert "did you mean sample?" in capsys.readouterr().err


def test_a_users_mistake_is_one_line_and_status_1(played: dict[str, str]) -> None:
    done = run("mistaken", module="played", env=played)
    assert done.returncode == 1
    assert done.stderr == (
        "antiphon mistaken: error: notes.txt is empty; give a file with some text\n"
    )


def test_a_closed_reader_ends_the_command_without_a_word(played: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "played", "talkative"],
        env=played,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "again and again\n"
        process.stdout.close()
        assert process.wait(30) == 141
        assert process.stderr.read() == ""


def test_a_broken_pipe_that_is_not_stdout_is_no_secret(played: dict[str, str]) -> None:
    done = run("inner_pipe", module="played", env=played)
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr


def test_ctrl_c_ends_the_command_with_130_and_no_traceback(played: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "played", "interrupted"],
        env=played,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == "\nantiphon interrupted: interrupted\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_has_help_under_its_own_name(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"antiphon {name}" in done.stdout


def parser_of(name: str) -> argparse.ArgumentParser:
    module = importlib.import_module(cli.COMMANDS[name].target.partition(":")[0])
    parser: argparse.ArgumentParser = module.build_parser(f"antiphon {name}")
    return parser


def with_subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parser and those below it."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                found += with_subcommands(below)
    return found


def calls(line: str) -> list[list[str]]:
    """The arguments of each `antiphon` in a line of shell; all it can hold are pipes and files."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = list(lexer)
    found: list[list[str]] = []
    current: list[str] = []
    for word in [*words, "|"]:
        if word in ("|", "&&", ";", ">", ">>", "<"):
            if current[:1] == ["antiphon"]:
                found.append(current[1:])
            current = []
        else:
            current.append(word)
    return found


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_each_command_teaches(name: str) -> None:
    for parser in with_subcommands(parser_of(name)):
        assert parser.description, parser.prog
        _, _, epilog = (parser.epilog or "").partition("examples:\n")
        assert f"  {parser.prog}" in epilog or "| antiphon" in epilog, f"{parser.prog} shows none"
        for action in parser._actions:
            listed = isinstance(action, argparse._SubParsersAction)
            assert listed or action.help, f"{parser.prog} {action.option_strings or action.dest}"
        assert max(map(len, (parser.epilog or "").splitlines())) <= 100


# tests/training/test_command.py holds those of `train` to the trainer's own parser.
@pytest.mark.parametrize("name", sorted(set(cli.COMMANDS) - {"train"}))
def test_every_example_is_understood(name: str) -> None:
    whole = parser_of(name)
    lines = [*cli.COMMANDS[name].examples]
    lines = [f"antiphon {line}" for line in lines]
    for parser in with_subcommands(whole):
        _, _, epilog = (parser.epilog or "").partition("examples:\n")
        lines += [line.strip() for line in epilog.partition("\n\n")[0].splitlines()]
    tried = 0
    for line in lines:
        for command, *rest in calls(line):
            if command == name:
                tried += 1
                whole.parse_args(rest)
    assert tried > len(cli.COMMANDS[name].examples)


@pytest.mark.parametrize("name", sorted(set(cli.COMMANDS) - {"train"}))
def test_a_misspelt_option_is_told_what_it_is_near_to(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_of(name)
    *_, below = with_subcommands(parser)
    required = [action for action in below._actions if action.required]
    optional = [
        flag
        for action in below._actions
        for flag in action.option_strings
        if flag.startswith("--") and flag != "--help" and not action.required
    ]
    option = max(optional, key=len, default="--help")
    path = below.prog.split()[2:]
    needed = [
        word
        for action in required
        for word in (*action.option_strings[:1], next(iter(action.choices or ["x"])))
    ]
    with pytest.raises(SystemExit):
        parser.parse_args([*path, *needed, f"{option}x"])
    assert f"did you mean {option}?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sample", "serve", "generate", "demo"])
def test_an_unknown_option_is_a_usage_error(name: str) -> None:
    done = run(name, "--no-such-option", "x")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_missing_model_is_a_users_mistake(tmp_path: Path) -> None:
    done = run("sample", str(tmp_path / "nowhere"), "--prompt", "x")
    assert done.returncode == 1
    assert done.stderr.startswith("antiphon sample: error: ")
    assert "nowhere" in done.stderr
    assert done.stderr.count("\n") == 1
