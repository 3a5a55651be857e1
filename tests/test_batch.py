"""`antiphon sample --input`: many prompts, side by side, in order, and again where it stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpt.batch import AHEAD, seed_of
from gpt.errors import DataError
from gpt.sample import main
from tests import warm

ROOT = Path(__file__).resolve().parents[1]
# float64: company may round otherwise than solitude, and these tests compare texts.
EXACT = ("--dtype", "float64", "--threads", "1")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "To be", "id": "first"},
        {"token_ids": [65, 66], "max_tokens": 3, "temperature": 0},
        {"prompt": "x" * 65, "id": "too long"},
        {"prompt": "", "seed": 4, "note": {"kept": [1, None]}},
        *({"prompt": "abcdefghij"[: i % 9], "max_tokens": 1 + i % 7} for i in range(12)),
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sample(model: Path, *arguments: object) -> int:
    return main([str(model), *map(str, arguments), *EXACT])


def lines(path: Path) -> list[dict[str, Any]]:
    # Of the bytes: in a text U+0085 and U+2028 would end a line too, and a model can write them.
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_results_come_in_order_and_say_what_they_are(
    model_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    flags = ("--input", prompts, "--output", out, "--seed", 3, "--max-tokens", 9)
    assert sample(model_folder, *flags, "--batch-size", 5) == 1
    found = lines(out)
    assert [record["index"] for record in found] == list(range(16))
    first, second, third, fourth = found[:4]
    assert first["id"] == "first"
    assert (first["prompt"], first["seed"], first["choice"]) == ("To be", 3, 0)
    assert first["usage"] == {"prompt_tokens": 5, "completion_tokens": len(first["token_ids"])}
    assert second["prompt_token_ids"] == [65, 66]
    assert len(second["token_ids"]) == 3
    assert third.keys() == {"error", "index", "line", "id"}
    assert "65 tokens but the model's context holds 64" in third["error"]
    assert (third["line"], third["id"]) == (3, "too long")
    assert (fourth["seed"], fourth["note"]) == (4, {"kept": [1, None]})
    assert len({record.get("seed") for record in found}) == 16  # each its own
    assert "15 results in" in (err := capsys.readouterr().err)
    assert '1 line with "error"' in err


def test_each_text_is_the_one_that_its_seed_names(
    model_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever else was in the batch: a lone run with the seed of the line gives the same text."""
    out = tmp_path / "out.jsonl"
    sample(model_folder, "--input", prompts, "--output", out, "--max-tokens", 9, "--num-samples", 2)
    capsys.readouterr()
    for record in [r for r in lines(out) if r.get("prompt") and r["index"] % 3 == 0]:
        asked = len(record["token_ids"])
        sample(
            model_folder, "--prompt", record["prompt"], "--seed", record["seed"],
            "--max-tokens", asked, "--json",
        )  # fmt: skip
        assert json.loads(capsys.readouterr().out)["token_ids"] == record["token_ids"]


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("kept", [0, 1, 4, 11])
def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not_been(
    model_folder: Path, prompts: Path, tmp_path: Path, kept: int, num_samples: int
) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    flags = ("--input", prompts, "--num-samples", num_samples, "--max-tokens", 6, "--logprobs", 1)
    sample(model_folder, *flags, "--output", whole, "--seed", 8, "--batch-size", 3)
    sample(model_folder, *flags, "--output", cut, "--seed", 8)
    content = cut.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(content[:kept]) + content[kept][:-5])
    # Without --seed: the one that the first run had is used.
    resumed = flags if kept else (*flags, "--seed", 8)
    assert sample(model_folder, *resumed, "--output", cut, "--batch-size", 2) == 1
    texts = [(r["index"], r.get("choice"), r.get("token_ids")) for r in lines(whole)]
    assert [(r["index"], r.get("choice"), r.get("token_ids")) for r in lines(cut)] == texts


def test_a_seed_that_was_drawn_is_kept_for_the_rest(
    model_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    flags = ("--input", prompts, "--output", out, "--max-tokens", 4)
    sample(model_folder, *flags)
    before = out.read_bytes()
    out.write_bytes(before[: len(before) // 2])
    sample(model_folder, *flags)
    assert [r.get("token_ids") for r in lines(out)] == [
        json.loads(line).get("token_ids") for line in before.splitlines()
    ]
    capsys.readouterr()
    assert sample(model_folder, *flags) == 1  # the error is still there
    assert "nothing to do: 15 results" in capsys.readouterr().err


def test_other_inputs_settings_and_models_are_refused(
    model_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    sample(model_folder, "--input", prompts, "--output", out, "--max-tokens", 2)
    before = out.read_bytes()
    with pytest.raises(DataError, match=r"max_tokens \(2, now 3\).*--overwrite"):
        sample(model_folder, "--input", prompts, "--output", out, "--max-tokens", 3)
    with open(prompts, "a") as file:
        file.write('{"prompt": "one more"}\n')
    with pytest.raises(DataError, match="another input"):
        sample(model_folder, "--input", prompts, "--output", out, "--max-tokens", 2)
    with pytest.raises(DataError, match=r"is the input"):
        sample(model_folder, "--input", prompts, "--output", prompts, "--overwrite")
    assert out.read_bytes() == before
    sample(model_folder, "--input", prompts, "--output", out, "--max-tokens", 3, "--overwrite")
    assert len(lines(out)) == 17


def test_a_text_file_and_standard_output(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n")
    assert sample(model_folder, "--input", path, "--max-tokens", 2, "--min-p", 0.01) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["prompt"] for record in found] == ["one", "two"]


def test_inputs_that_cannot_be_used_are_refused(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*gone.jsonl: No such file"):
        sample(model_folder, "--input", tmp_path / "gone.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="has no prompts"):
        sample(model_folder, "--input", tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    "flags",
    [
        ("--output", "x"), ("--input-format", "txt"), ("--overwrite",),
        ("--input", "x", "--prompt", "y"), ("--input", "x", "-i"), ("-i", "--json"),
        ("--input", "x", "--batch-size", "0"),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit_together_are_usage_errors(flags: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["nowhere", *flags])
    assert caught.value.code == 2


def test_seeds_of_neighbouring_runs_share_nothing() -> None:
    seeds = {seed_of(run, number) for run in range(20) for number in range(20)}
    assert len(seeds) == 400
    assert all(seed_of(run, 0) == run and 0 <= seed_of(run, 1) < 2**63 for run in range(20))


@contextlib.contextmanager
def running(*arguments: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = warm.Popen(
        [sys.executable, "-m", "gpt", "sample", *map(str, arguments), *EXACT],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.integration
def test_who_waits_for_an_answer_before_asking_again_gets_it(model_folder: Path) -> None:
    flags = (model_folder, "--input", "-", "--max-tokens", 3, "--seed", 1)
    with running(*flags, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for prompt in ("one", "two"):
            process.stdin.write(json.dumps({"prompt": prompt}) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["prompt"] == prompt
        process.stdin.write("nonsense\n")
        out, err = process.communicate(timeout=60)
        assert "error" in json.loads(out)
        assert "2 results; " in err
        assert process.returncode == 1


@pytest.mark.integration
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_interrupted_or_killed_can_be_finished(
    model_folder: Path, tmp_path: Path, how: signal.Signals
) -> None:
    path, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    path.write_text("".join(f"prompt {i}\n" for i in range(200)))
    flags = (model_folder, "--input", path, "--output", out, "--max-tokens", 50, "--batch-size")
    with running(*flags, 4) as process:
        deadline = time.monotonic() + 100
        while not (out.exists() and out.stat().st_size > 4_000):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(how)
        _, err = process.communicate(timeout=60)
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert "same command again" in err
        assert "Traceback" not in err
    done = out.read_bytes().count(b"\n")
    assert 0 < done < 200
    before = out.read_bytes().splitlines()[:done]
    assert sample(*flags, 32) == 0
    found = lines(out)
    assert [record["index"] for record in found] == list(range(200))
    assert out.read_bytes().splitlines()[:done] == before


def test_what_waits_for_its_turn_is_bounded(model_folder: Path, tmp_path: Path) -> None:
    """One long text in front: those behind it are made, but not without end."""
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    path.write_text(
        '{"prompt": "", "max_tokens": 60}\n' + '{"prompt": "a", "max_tokens": 1}\n' * 200
    )
    from gpt import batch

    most = 0
    plain = batch.Batch._fill

    def watched(self: batch.Batch) -> None:
        nonlocal most
        plain(self)
        most = max(most, len(self._entries))

    batch.Batch._fill = watched  # type: ignore[method-assign]
    try:
        sample(model_folder, "--input", path, "--output", out, "--batch-size", 2, "--seed", 1)
    finally:
        batch.Batch._fill = plain  # type: ignore[method-assign]
    assert most == 2 * AHEAD
    assert [record["index"] for record in lines(out)] == list(range(201))


def test_no_more_pages_than_the_budget_and_yet_all_texts(
    model_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, narrow = tmp_path / "whole.jsonl", tmp_path / "narrow.jsonl"
    sample(model_folder, "--input", prompts, "--output", whole, "--seed", 1)
    monkeypatch.setattr("gpt.sample_file.CACHE_BYTES", 1)  # a single context
    sample(model_folder, "--input", prompts, "--output", narrow, "--seed", 1)
    assert [r.get("token_ids") for r in lines(narrow)] == [r.get("token_ids") for r in lines(whole)]


def test_a_damaged_model_gives_errors_and_no_traceback(
    model_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from gpt.checkpoint import load_model, save_model

    loaded = load_model(model_folder)
    with torch.no_grad():
        loaded.model.blocks[0].mlp.down.weight.fill_(float("nan"))  # type: ignore[union-attr,operator]
    save_model(tmp_path / "broken", loaded.model, loaded.tokenizer)
    assert sample(tmp_path / "broken", "--input", prompts, "--max-tokens", 2) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 16
    assert "not finite" in found[0]["error"]


def test_results_on_a_closed_pipe_end_quietly(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a\n" * 800)
    with running(model_folder, "--input", path, "--max-tokens", 2) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.close(process.stdout.fileno())
        process.stdout = None
        _, err = process.communicate(timeout=60)
        assert "Traceback" not in err
        assert process.returncode == 141


def test_an_output_that_is_a_folder_is_refused_before_the_model_is_read(
    prompts: Path, tmp_path: Path
) -> None:
    for name in ("", ".", "/", tmp_path):
        with pytest.raises(DataError, match=r"is a folder|is empty"):
            sample(tmp_path / "no model", "--input", prompts, "--output", name)


def test_the_output_is_json_whatever_numbers_the_input_has(
    model_folder: Path, tmp_path: Path
) -> None:
    path, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"prompt": "a", "id": 1e999}\n{"prompt": "a", "id": 1e308}\n')
    assert sample(model_folder, "--input", path, "--output", out, "--max-tokens", 2) == 1
    bad, good = lines(out)
    assert "too large" in bad["error"]
    assert good["id"] == 1e308
    assert "Infinity" not in out.read_text(encoding="utf-8")
