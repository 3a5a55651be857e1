"""`antiphon train`: what is answered before Lightning is imported, and that it is true."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpt.training.command import SUBCOMMANDS, flags_of, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        ([], 2, "Measure a run's best checkpoint"),
        (["--help"], 0, "antiphon train fit --config shakespeare-tiny\n"),
        (["fit", "--help"], 0, "optimizer steps"),
        (["fit", "--config", "x", "-h"], 0, "optimizer steps"),
        (["validte"], 2, "did you mean validate?"),
    ],
)
def test_help_and_misspelt_subcommands_need_neither_torch_nor_lightning(
    arguments: list[str], status: int, told: str
) -> None:
    code = (
        "import sys; from gpt.training.command import main\n"
        "try:\n    status = main(sys.argv[1:], 'antiphon train')\n"
        "except SystemExit as end:\n    status = end.code or 0\n"
        "print(status, [m for m in ('torch', 'lightning', 'jsonargparse') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == f"{status} []"
    assert told in done.stdout + done.stderr


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_the_short_help_shows_flags_that_there_are_with_their_defaults(subcommand: str) -> None:
    from gpt.training.cli import build_parser

    parser = build_parser("train.py").subcommands()[subcommand]
    actions = {name: action for action in parser._actions for name in action.option_strings}
    defaults = parser.get_defaults()
    for flags in flags_of(subcommand).values():
        for flag in flags:
            assert flag.name in actions
            if flag.default is not None:
                assert str(defaults.get(flag.name.removeprefix("--"))) == str(flag.default)


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_the_full_help_lists_every_flag(
    subcommand: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([subcommand, "--help-all"])
    shown = capsys.readouterr().out
    assert "--trainer.gradient_clip_algorithm" in shown
    assert f"python train.py {subcommand} --config" in shown


def test_every_example_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shlex

    from gpt.training.cli import build_parser
    from gpt.training.parser import with_config_paths

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("name: mine\n")
    parser = build_parser("train.py")
    for subcommand, (_, lines) in SUBCOMMANDS.items():
        for line in lines:
            parser.parse_args(with_config_paths([subcommand, *shlex.split(line)]))
