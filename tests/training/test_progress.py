from __future__ import annotations

import io

import pytest
from tqdm import tqdm

from gpt.training.progress import BAR, RunProgress, count
from gpt.training.throughput import Throughput
from tests.training.small import fit, make_data


def test_without_a_terminal_there_are_a_few_plain_lines(tmp_path, corpus, capsys):
    make_data(corpus).prepare_data()  # which has a bar of its own
    capsys.readouterr()
    fit(tmp_path, corpus, 60, [Throughput(), RunProgress(terminal=False)],
        enable_progress_bar=True, val_check_interval=30)  # fmt: skip
    out, err = capsys.readouterr()
    assert err == ""
    assert "\r" not in out
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(lines) == 22  # 20 on the way and 2 validations
    assert lines[-1].startswith("step 60  val/loss ")
    assert "val/bpb" in lines[-1]
    before = lines[-2]
    assert before.startswith("step 60/60  loss ")
    assert all(
        name in before for name in ("  lr ", "  tokens/s ", "  mfu ", "  val ", "  left 0:00")
    )


def test_on_a_terminal_there_is_a_bar_that_ends_with_the_run(tmp_path, corpus, capsys):
    fit(tmp_path, corpus, 6, [RunProgress(terminal=True)], enable_progress_bar=True,
        accumulate_grad_batches=2)  # fmt: skip
    err = capsys.readouterr().err
    assert "6/6  loss " in err
    assert "12/" not in err


@pytest.mark.parametrize(
    ("columns", "total", "tokens", "left_out"),
    [
        (80, 2000, "12,345", ["val"]),
        (80, 1000000, "1,234,567", ["val", "mfu"]),
        (100, 2000, "12,345", []),
        (100, 1000000, "1,234,567", []),
    ],
)
def test_the_numbers_and_the_time_left_fit(columns, total, tokens, left_out):
    shown = ["loss 3.1234", "lr 3.00e-03", f"tokens/s {tokens}", "mfu 43%", "val 3.2345"]
    out = io.StringIO()
    progress = RunProgress(terminal=True)
    progress._bar = tqdm(
        total=total, initial=total // 2, bar_format=BAR, file=out, ncols=columns, mininterval=0
    )
    progress._bar.set_description_str(progress._that_fit(shown, total), refresh=False)
    progress._bar.update(1)
    progress._bar.refresh()
    line = out.getvalue().rstrip("\r\n").rpartition("\r")[2]
    assert len(line) <= columns
    assert line.startswith(f"{total // 2 + 1}/{total}  loss 3.1234  lr 3.00e-03  tokens/s {tokens}")
    assert "  left " in line
    assert [name for name in ("val", "mfu") if f"  {name} " not in line] == left_out


def test_the_start_of_a_run_says_what_is_trained_on_what_for_how_long(tmp_path, corpus, capsys):
    shown = [Throughput(), RunProgress(terminal=False)]
    module = fit(tmp_path, corpus, 1, shown, enable_progress_bar=True)
    out = capsys.readouterr().out
    assert f"{count(module.gpt.num_params())} parameters (1 layers, 16 wide, context 16" in out
    assert "(bytes)" in out
    assert "1 steps of 64 tokens" in out
    assert "speed: mfu is the share of the matrix product measured here" in out


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (950, "950"), (12345, "12.3 k"), (4.5e6, "4.5 M"), (2e9, "2 B")]
)
def test_numbers_are_short(number, text):
    assert count(number) == text
