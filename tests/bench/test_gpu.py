"""`benchmarks.gpu`: it runs on a CPU in small, leaves out what does not fit, and finds out a kernel
that computes something else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import gpu


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", *options])
    return gpu.main()


@pytest.mark.integration
def test_a_dry_run_goes_through_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    assert run(monkeypatch, "--device", "cpu", "--dry-run", "--json", str(out)) == 0
    found = {part["part"]: part for part in json.loads(out.read_text())["results"]}
    assert list(found) == ["bandwidth", "decode 3", "train", "attention", "varlen", "compile 3"]
    assert not any("failed" in part for part in found.values())
    (decode,) = found["decode 3"]["rows"]
    assert decode["tokens_per_s"] > 0
    assert 0 < decode["bandwidth_share"] < 1
    assert [row["row"] for row in found["train"]["rows"][:2]] == ["eager", "traced"]
    assert all(0 < row["mfu"] < 1 for row in found["train"]["rows"][:2])
    assert [row["row"] for row in found["attention"]["rows"]] == ["fused", "window:256"]
    compiled = found["compile 3"]["rows"][-1]
    assert compiled["same"] == 3
    assert compiled["graphs"] == 2  # one for steps that begin a page
    said = capsys.readouterr().out
    assert "no kernel without a GPU" in said
    assert "reduce-overhead is left out" in said


def test_what_does_not_fit_is_left_out_and_a_part_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> list[dict[str, Any]]:
        raise RuntimeError("no such kernel\non this device")

    monkeypatch.setattr(
        gpu, "parts_of", lambda bench: {"one": (1, fails), "two": (1, lambda: [{"said": "done"}])}
    )
    assert run(monkeypatch, "--device", "cpu", "--dry-run") == 1
    said = capsys.readouterr().out
    assert "failed: RuntimeError: no such kernel on this device" in said
    assert "  done" in said
    assert run(monkeypatch, "--device", "cpu", "--dry-run", "--seconds", "-1") == 0
    assert capsys.readouterr().out.count("left out: ") == 2


def plain(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, k_starts: Tensor | None, *_: int,
    window_size: tuple[int, int] = (-1, -1), seqused_k: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """What varlen_attn does, a sequence at a time."""
    found = []
    for i in range(len(starts) - 1):
        mine = slice(int(starts[i]), int(starts[i + 1]))
        keys, values = k[mine], v[mine]
        if block_table is not None:
            assert seqused_k is not None
            keys, values = (x[block_table[i].long()].flatten(0, 1)[: seqused_k[i]] for x in (k, v))
        q_, k_, v_ = (x.transpose(0, 1)[None] for x in (q[mine], keys, values))
        y = F.scaled_dot_product_attention(q_, k_, v_, is_causal=window_size == (-1, 0))
        found.append(y[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("judge", [gpu.packed, gpu.paged])
def test_a_kernel_is_timed_only_if_it_is_equal(judge: Callable[..., dict[str, Any]]) -> None:
    bench = gpu.Bench(torch.device("cpu"), gpu.DRY, bandwidth=1e9)
    lengths = [300, 40, 257]
    right = judge(bench, plain, lengths)
    assert right["equal"]
    assert right["seconds"] > 0
    wrong = judge(bench, lambda *a, **k: plain(*a, **k).roll(1, 0), lengths)
    assert not wrong["equal"]
    assert "seconds" not in wrong
    assert "WRONG" in wrong["said"]


def test_without_a_gpu_it_asks_for_a_dry_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--device", "cpu")
    assert "add --dry-run" in capsys.readouterr().err
