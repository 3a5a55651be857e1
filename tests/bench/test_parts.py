"""`benchmarks.parts`: it finds every part of a step, with kernels and without, and leaves nothing
watched."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import gpt.generate
from benchmarks import parts
from gpt.config import GPTConfig
from gpt.native import build as building
from gpt.native import kernels as native
from gpt.native import linear
from gpt.native.kernels import Kernels
from gpt.native.linear import Routes, speed_up

LAYERS = 3
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in building.COMPILERS), reason="no C++ compiler here"
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tiny = GPTConfig.preset("nano", n_layer=LAYERS, n_head=2, d_model=32, block_size=64)
    monkeypatch.setattr(GPTConfig, "preset", lambda name: tiny)
    native.use(None)
    yield
    native.use(None)
    native._refused = None


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[str, dict[str, list[str]]]:
    """What was said ahead of the table, and its rows by name."""
    monkeypatch.setattr(sys, "argv", ["parts", "--preset", "nano", "--steps", "2", *options])
    parts.main()
    said = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(said) if line.lstrip().startswith("calls"))
    rows = [line.split("  ", 1) for line in said[begin + 1 : -1]]
    assert "times as long as the sum" in said[-1]
    return "\n".join(said[:begin]), {name: cells.split() for name, cells in rows}


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_with_kernels_is_taken_to_pieces(
    dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(linear, "WORTH_BYTES", 0)
    monkeypatch.setattr(linear, "measure", lambda kernels, dtype: Routes(kernels, 16, False))
    head, rows = run(monkeypatch, capsys, "--texts", "2", "--dtype", dtype)
    assert f"parameters in {dtype}, 2 texts of 16 tokens, 2 rounds; own products" in head
    calls = {name: cells[0] for name, cells in rows.items() if cells[0].isdigit()}
    assert calls == {
        "products": str(2 * LAYERS + 1),
        "norms and turns of heads": str(LAYERS),
        "attention": str(LAYERS),
        "storing keys and values": str(LAYERS),
        "plan": "1",
        "drawing": "1",
    }
    assert list(rows)[-4:] == ["the rest", "a step in parts", "a step", "sum of all weights"]


def test_without_kernels_its_products_are_torch_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head, rows = run(monkeypatch, capsys)
    assert "1 text of 16 tokens, 2 rounds; no kernels of our own" in head
    calls = {name: cells[0] for name, cells in rows.items() if cells[0].isdigit()}
    assert calls == {"torch's products": str(4 * LAYERS + 1), "plan": "1", "drawing": "1"}


@needs_compiler
def test_products_are_counted_with_the_bytes_of_their_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "WORTH_BYTES", 0)
    monkeypatch.setattr(linear, "measure", lambda kernels, dtype: Routes(kernels, 16, False))
    model = parts.GPT(GPTConfig.preset("nano").replace(vocab_size=300)).eval().bfloat16()
    assert speed_up(model) is not None
    found = parts.measure(model, parts.Texts(model, 1, 4, 32), 2)
    matrices = [block.get_parameter(name) for block in model.blocks for name in (
        "attn.qkv.weight", "attn.out.weight", "mlp.up.weight", "mlp.down.weight")]  # fmt: skip
    assert found.sizes["products"] == sum(m.nbytes for m in [*matrices, model.head.weight])
    assert {len(each) for each in found.parts.values()} == {2}
    for *own, whole in zip(*found.parts.values(), found.whole, strict=True):
        assert 0 < sum(own) <= whole


def test_only_what_runs_meanwhile_is_watched() -> None:
    before = [getattr(owner, name) for owner, name, _ in parts.PARTS.values()]
    x = torch.ones(1, 1)
    with parts.watched() as calls:
        F.linear(x, x)
    F.linear(x, x)
    assert [(call.part, call.size) for call in calls] == [("torch's products", 4)]
    assert [getattr(owner, name) for owner, name, _ in parts.PARTS.values()] == before
    assert Kernels.chain in before
    assert gpt.generate._draw in before
