"""The `antiphon sample` command."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest

from gpt.errors import SamplingError
from gpt.generate import Piece
from gpt.params import Made, SamplingParams
from gpt.sample import main, show
from gpt.stream import FinishReason
from gpt.terminal import printable, shows_colour
from gpt.tokenizer import Tokenizer
from gpt.transcript import Transcript, table


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


def test_json_says_all_about_each_sample(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (model_folder, "--prompt", "文", "--max-tokens", 4, "--seed", 4, "--num-samples", 2)
    out, err = run(capsys, *flags, "--json", "--logprobs", 2)
    assert err == ""
    first, second = map(json.loads, out.splitlines())
    assert first.keys() == {
        "prompt", "choice", "text", "token_ids", "finish_reason", "matched_stop", "seed", "usage",
        "logprobs",
    }  # fmt: skip
    assert (first["prompt"], first["seed"], second["choice"]) == ("文", 4, 1)
    assert first["finish_reason"] == "length"
    assert first["usage"] == {"prompt_tokens": 3, "completion_tokens": 4}
    tokens = first["logprobs"]
    assert [t["token_id"] for t in tokens] == first["token_ids"]
    joined = b"".join(bytes(t["bytes"]) for t in tokens)
    assert joined.decode("utf-8", "replace") == first["text"]
    for token in tokens:
        assert token["logprob"] <= token["top"][0]["logprob"] < 0
        assert len(token["top"]) == 2
    assert first["token_ids"] != second["token_ids"]
    plain = run(capsys, *flags)[0]
    assert f"文{first['text']}\n" in plain
    assert "logprobs" not in json.loads(run(capsys, *flags, "--json")[0].splitlines()[0])


def test_log_probabilities_stand_in_a_table_below_the_text(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (model_folder, "--prompt", "ab", "--max-tokens", 3, "--seed", 4)
    plain = run(capsys, *flags)[0]
    out = run(capsys, *flags, "--logprobs", 2)[0]
    assert out.startswith(plain)
    head, *rows = out.removeprefix(plain).splitlines()
    assert head.split() == ["token", "logprob", "most", "likely"]
    assert len(rows) == 3
    assert all(len(re.findall(r"-\d+\.\d{3}", row)) == 3 for row in rows)
    assert "most likely" not in run(capsys, *flags, "--logprobs", 0)[0]


def test_tokens_are_spelt_so_that_they_fit_a_table() -> None:
    tokenizer = Tokenizer.bytes(special_tokens=["<|user|>"])
    made = [
        Made(token, -1.5)
        for token in (10, 0x80, tokenizer.eot, tokenizer.special["<|user|>"], 97)
    ]  # fmt: skip
    lines = table(made, tokenizer).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        r"'\n'", r"b'\x80'", tokenizer.end_of_text, "<|user|>", "'a'",
    ]  # fmt: skip
    assert len({line.rindex("-1.500") for line in lines[1:]}) == 1
    wide = Tokenizer.chars("文a")
    lines = table([Made(t, -1.5) for t in wide.encode("文a")], wide).splitlines()
    assert lines[1].index("-1.500") == lines[2].index("-1.500") - 1  # the sign takes two columns


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _, terminal = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with open(terminal, "w") as stream:
        assert shows_colour(stream)
        monkeypatch.setenv("TERM", "dumb")
        assert not shows_colour(stream)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")
        assert not shows_colour(stream)
    monkeypatch.delenv("NO_COLOR")
    assert not shows_colour(io.StringIO())


def test_a_text_commands_no_terminal() -> None:
    assert printable("a\n\t文\x1b[2J\x07\x9b") == "a\n\t文\ufffd[2J\ufffd\ufffd"


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
