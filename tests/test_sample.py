"""The `antiphon sample` command."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from gpt.errors import SamplingError
from gpt.generate import Piece
from gpt.params import SamplingParams
from gpt.sample import main, show
from gpt.stream import FinishReason
from gpt.transcript import Transcript


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    assert main([str(a) for a in arguments]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_a_seed_names_a_text(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (model_folder, "--prompt", "To be", "--max-tokens", 20)
    first, _ = run(capsys, *flags, "--seed", 1)
    assert first.startswith("To be")
    assert first.endswith("\n")
    assert run(capsys, *flags, "--seed", 1)[0] == first
    assert run(capsys, *flags, "--seed", 2)[0] != first
    greedy = run(capsys, *flags, "--temperature", 0, "--seed", 1)[0]
    assert run(capsys, *flags, "--temperature", 0, "--seed", 2)[0] == greedy
    assert run(capsys, *flags, "--top-k", 1, "--seed", 1)[0] == greedy
    assert run(capsys, *flags, "--top-p", 1e-9, "--seed", 1)[0] == greedy
    assert greedy != first


def test_several_samples_are_shown_one_after_another(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (model_folder, "--prompt", "x", "--max-tokens", 8, "--seed", 4)
    out, _ = run(capsys, *flags, "--num-samples", 3)
    assert [f"--- {i} of 3 ---" in out for i in (1, 2, 3)] == [True] * 3
    assert run(capsys, *flags)[0] in out


def test_stop_ends_the_text_before_it(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (model_folder, "--prompt", "x", "--max-tokens", 30, "--seed", 4)
    whole = run(capsys, *flags)[0].rstrip("\n")
    stop = whole[12:14]
    assert run(capsys, *flags, "--stop", stop)[0] == whole[: whole.index(stop, 1)] + "\n"


def test_the_prompt_can_come_from_standard_input(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    out, _ = run(capsys, model_folder, "--prompt", "-", "--max-tokens", 3)
    assert out.startswith("from a pipe")


def test_a_full_context_is_said(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = run(capsys, model_folder, "--prompt", "x" * 60, "--max-tokens", 40, "--seed", 1)
    assert "context of 64 tokens was full before --max-tokens 40" in err
    assert run(capsys, model_folder, "--max-tokens", 2, "--seed", 1)[1] == ""


def test_other_precisions_run(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for dtype in ("bfloat16", "float64"):
        out, _ = run(capsys, model_folder, "--dtype", dtype, "--prompt", "a", "--max-tokens", 3)
        assert out.startswith("a")


def test_bad_settings_are_refused_before_the_model_is_opened(model_folder: Path) -> None:
    with pytest.raises(SamplingError, match=r"temperature.*top_p"):
        main([str(model_folder), "--temperature", "nan", "--top-p", "2"])
    for flags in (["--num-samples", "0"], ["--threads", "0"], ["--top-k", "many"]):
        with pytest.raises(SystemExit) as caught:
            main([str(model_folder), *flags])
        assert caught.value.code == 2


def test_samples_that_finish_out_of_order_are_shown_in_order() -> None:
    def piece(choice: int, text: str, last: bool = False) -> Piece:
        return Piece(choice, 0, text, FinishReason.LENGTH if last else None)

    pieces = [
        piece(0, ""), piece(1, "b1"), piece(2, "", last=True),
        piece(0, "a"), piece(1, "b2", last=True), piece(0, "z", last=True),
    ]  # fmt: skip
    written: list[str] = []
    samples = [Transcript("P", SamplingParams(), 1, choice) for choice in range(3)]
    show(pieces, samples, written.append)
    assert "".join(written) == (
        "--- 1 of 3 ---\nPaz\n--- 2 of 3 ---\nPb1b2\n--- 3 of 3 ---\nP\n"
    )  # fmt: skip
