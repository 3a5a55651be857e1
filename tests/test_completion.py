"""`antiphon completion`: the script, tried in a real bash."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpt import cli, completion

ASK = """\
source "$1"; shift
function_of_antiphon=$(complete -p antiphon | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=()
"$function_of_antiphon"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "antiphon"
    path.write_text(completion.script("bash"), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "short.yaml").touch()
    return tmp_path


def completed(script: Path, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", str(script), "antiphon", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0
    assert done.stderr == ""
    return done.stdout.split()


def test_the_script_offers_every_command(script: Path, folder: Path) -> None:
    assert set(completed(script, folder, "")) == set(cli.COMMANDS)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["sa"], ["sample"]),
        (["sample", "--temp"], ["--temperature"]),
        (["sample", "mo"], ["models"]),
        (["sample", "models", "--dtype", "b"], ["bfloat16"]),
        (["serve", "models", "--device", "cu"], ["cuda"]),
        (["data", "pre"], ["prepare"]),
        (["data", "prepare", "sh"], ["shakespeare", "short.yaml"]),
        (["tokenize", "--tokenizer", "o2"], ["o200k_base"]),
        (["tokenize", "--tokenizer", "mo"], ["models"]),
        (["train", "f"], ["fit"]),
        (
            ["train", "fit", "--config", "sh"],
            ["shakespeare-fast", "shakespeare-tiny", "short.yaml"],
        ),
        (["train", "fit", "--data.source", "so"], ["sotu"]),
        (["train", "fit", "--model.config.position", "r"], ["rotary", "relative"]),
        (["train", "fit", "--trainer.max_st"], ["--trainer.max_steps"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_words_are_completed(
    script: Path, folder: Path, words: list[str], offered: list[str]
) -> None:
    assert sorted(completed(script, folder, *words)) == sorted(offered)


@pytest.mark.parametrize("shell", [each for each in completion.SHELLS if each != "bash"])
def test_other_shells_get_a_script_that_they_can_read(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completion.main([shell]) == 0
    text = capsys.readouterr().out
    for word in ("sample", "temperature", "trainer.max_steps"):
        assert word in text
    if shutil.which(shell) is not None and shell != "tcsh":
        (tmp_path / "script").write_text(text)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=30)
