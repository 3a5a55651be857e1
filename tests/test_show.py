"""`antiphon attention show`: the picture and the facts, against the predicate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt import cli, show
from gpt.errors import ConfigError, UserError
from gpt.patterns import parse_pattern
from gpt.pictures import PLAIN_SHADES


@pytest.mark.parametrize(
    "text", ["causal", "window:5+sinks:2", "dilated:3:4", "fixed:6:2", "bigbird:30:4:1:0"]
)
@pytest.mark.parametrize(("length", "cells"), [(20, 20), (50, 7), (100, 28)])
def test_shares_are_those_of_the_predicate(text: str, length: int, cells: int) -> None:
    at = torch.arange(length)
    seen = parse_pattern(text).allowed(at[:, None], at).float().numpy()
    causal = np.tril(np.ones((length, length)))
    side = -(-length // cells)
    grid = show.shares(parse_pattern(text), length, cells)
    assert len(grid) == -(-length // side)
    for i, row in enumerate(grid):
        for j, share in enumerate(row):
            cell = np.s_[i * side : (i + 1) * side, j * side : (j + 1) * side]
            if causal[cell].sum() == 0:
                assert np.isnan(share)
            else:
                assert share == pytest.approx(seen[cell].sum() / causal[cell].sum())


def test_it_draws_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main(["show", "window:2+sinks:1", "--length", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:10].rstrip() for line in lines[:5]] == [
        "██", "████", "██████", "██  ████", "██    ████"
    ]  # fmt: skip
    text = "\n".join(line[13:] for line in lines)
    assert "12, 2.4 keys a query" in text
    assert "80.0% of causal" in text
    assert "the last 2 positions and the first 1\n  3 of 5" in text


def test_the_picture_fits_a_terminal_and_is_plain_where_it_must_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert show.main(["show", "bigbird:128:64:2:0", "--length", "3000"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    assert "".join(show.picture(parse_pattern("window:9"), 99, PLAIN_SHADES)).isascii()


def test_a_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from matplotlib.image import imread

    file = tmp_path / "pattern.png"
    assert show.main(["show", "window:2", "--length", "4", "--png", str(file)]) == 0
    grey = imread(file)[..., 0]
    assert grey.shape == (4, 4)
    assert (grey == 0).tolist() == [[q - k in (0, 1) for k in range(4)] for q in range(4)]
    with pytest.raises(UserError, match="cannot write"):
        show.main(["show", "causal", "--png", str(file / "below")])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["widow:4"], "did you mean window"),
        (["causal", "--length", "0"], "--length is 0, but must be in 1 to"),
        (["no_such_module_there:Mine"], "cannot be imported"),
    ],
)
def test_mistakes_are_named(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        show.main(["show", *words])


def test_it_is_a_command_and_needs_no_torch() -> None:
    assert cli.COMMANDS["attention"].target == "gpt.show:main"
    code = (
        "import sys\nfrom gpt.cli import main\n"
        "assert main(['attention', 'show', 'fixed:128:8']) == 0\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
