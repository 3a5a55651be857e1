"""`antiphon bench attention`: rows compute what they say, numbers are what they mean."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt.bench import attention, command, mixers
from gpt.bench.memory import peak_on_cpu

SHAPE = mixers.Shape(batch=2, length=40, heads=4, kv_heads=2, width=8)


def same_inputs(*rows: str) -> list[mixers.Mixer]:
    found = []
    for row in rows:
        torch.manual_seed(0)
        mixer = mixers.make(row, SHAPE)
        mixer.ready()
        found.append(mixer)
    return found


def test_naive_fused_and_causal_are_the_same_function() -> None:
    outs, grads = [], []
    for mixer in same_inputs("naive", "fused", "causal", "window:40"):
        out = mixer.forward()
        outs.append(out)
        grads.append(torch.autograd.grad(out.square().sum(), mixer.given))
    for out, grad in zip(outs[1:], grads[1:], strict=True):
        torch.testing.assert_close(out, outs[0], atol=1e-5, rtol=1e-5)
        for got, expected in zip(grad, grads[0], strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_pattern_is_its_predicate() -> None:
    naive, windowed = same_inputs("naive", "window:7")
    assert isinstance(naive, mixers.Naive)
    at = torch.arange(SHAPE.length)
    naive.hidden = ~((at[:, None] >= at) & (at[:, None] - at < 7))
    torch.testing.assert_close(windowed.forward(), naive.forward(), atol=1e-5, rtol=1e-5)


def test_the_useful_products_are_counted() -> None:
    fused, windowed, lstm, rnn = same_inputs("fused", "window:1", "lstm", "rnn")
    assert fused.flops == 2 * 2 * 2 * 4 * 8 * (40 * 41 // 2)  # 2 products, 2 FLOPs, B, H, D, pairs
    assert windowed.flops == 2 * 2 * 2 * 4 * 8 * 40
    assert lstm.flops == 4 * rnn.flops == 4 * 2 * 2 * 40 * (2 * 32 * 32)
    assert mixers.flops_of(fused, mixers.BOTH) == 3 * mixers.flops_of(fused, mixers.FORWARD)


def test_naive_attention_is_left_out_where_memory_is_short() -> None:
    assert attention._too_large("naive", SHAPE) is None
    assert attention._too_large("window:4", replace(SHAPE, length=2**24)) is None
    huge = attention._too_large("naive", replace(SHAPE, length=2**24))
    assert huge is not None
    assert "are free" in huge


class Takes:
    """Holds so many bytes at once, and in between twice that."""

    def __init__(self, size: int) -> None:
        self.size = size

    def prepare(self) -> None:
        self.given = torch.ones(self.size)

    def warm_up(self) -> None:
        torch.ones(self.size)

    def __call__(self) -> None:
        a = torch.ones(self.size)  # float32: 4 * size bytes
        b = a + a
        del a
        torch.ones(self.size) + b[0]


@pytest.mark.integration
def test_the_peak_is_that_of_the_tensors_that_live_together() -> None:
    size = 8 * 2**20
    peak = peak_on_cpu(Takes(size), 1)
    assert peak is not None
    # b, the ones, and their sum; what was given and the warm-up do not count.
    assert 3 * 4 * size == pytest.approx(peak, rel=0.05)


@pytest.mark.integration
def test_the_command_measures_draws_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, plot = tmp_path / "out" / "a.json", tmp_path / "a.png"
    line = (
        "attention --lengths 64,96 --heads 2 --width 8 --window 16 --rounds 2 --threads 1 "
        f"--json {target} --plot {plot} --no-memory"
    )
    assert command.main(line.split()) == 0
    shown = capsys.readouterr().out
    rows = ["naive", "fused", *attention.usual_patterns(16), "lstm", "rnn"]
    for length in (64, 96):
        assert f"\n{length} tokens\n" in shown
    assert "exponents" in shown
    assert max(map(len, shown.splitlines()[2:])) <= 100
    found = json.loads(target.read_text())
    assert found["benchmark"] == "attention"
    assert found["interrupted"] is False
    assert found["machine"]["threads"] == 1
    assert found["settings"]["window"] == 16
    measured = {(each["row"], each["phase"], each["length"]) for each in found["results"]}
    assert measured == {(r, p, n) for r in rows for p in mixers.PHASES for n in (64, 96)}
    assert all(len(each["time"]["rounds_s"]) == 2 for each in found["results"])
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.integration
def test_memory_of_a_window_grows_in_line_and_of_naive_attention_with_the_square() -> None:
    peaks = {
        (row, length): peak_on_cpu(
            mixers.Once(row, mixers.BOTH, mixers.Shape(1, length, 2, 2, 32)),
            1,
        )
        for row in ("window:64", "naive")
        for length in (1024, 2048)
    }
    assert all(peaks.values())
    growth = {
        row: peaks[row, 2048] / peaks[row, 1024]  # type: ignore[operator]
        for row in ("window:64", "naive")
    }
    assert growth["window:64"] < 2.4
    assert growth["naive"] > 3.5


def test_after_ctrl_c_what_is_whole_is_shown_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, target = attention.measure, tmp_path / "a.json"

    def stopped(*given: object) -> list[attention.Result]:
        if given[2] == 32:
            raise KeyboardInterrupt
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "measure", stopped)
    line = (
        f"attention --lengths 16,32 --rows fused --rounds 1 --no-memory --threads 1 --json {target}"
    )
    assert command.main(line.split()) == 130
    out, err = capsys.readouterr()
    assert "16 tokens" in out
    assert "interrupted" in err
    found = json.loads(target.read_text())
    assert found["interrupted"] is True
    assert {each["length"] for each in found["results"]} == {16}
