"""`antiphon bench train`: its rows compute the same, and a peer that does not is found out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gpt.bench.command import main
from gpt.errors import ConfigError

PEER = """
import torch, torch.nn as nn, torch.nn.functional as F
from dataclasses import dataclass

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float
    bias: bool

class Part(nn.Module):
    pass

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c, t, C = c, Part(), c.n_embd
        self.transformer, t.h = t, nn.ModuleList()
        t.wte, t.wpe = nn.Embedding(c.vocab_size, C), nn.Embedding(c.block_size, C)
        t.ln_f, self.lm_head = nn.LayerNorm(C, bias=False), nn.Linear(C, c.vocab_size, bias=False)
        t.wte.weight = self.lm_head.weight
        for _ in range(c.n_layer):
            b = Part(); t.h.append(b); b.attn, b.mlp = Part(), Part()
            b.ln_1, b.ln_2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
            b.attn.c_attn, b.attn.c_proj = nn.Linear(C, 3 * C, False), nn.Linear(C, C, False)
            b.mlp.c_fc, b.mlp.c_proj = nn.Linear(C, 4 * C, False), nn.Linear(4 * C, C, False)

    def configure_optimizers(self, decay, rate, betas, device):
        return torch.optim.AdamW(self.parameters(), lr=rate, betas=betas)

    def forward(self, ids, targets):
        t, (B, T) = self.transformer, ids.shape
        x = t.wte(ids) + t.wpe.weight[:T]
        for b in t.h:
            q, k, v = (
                z.view(B, T, self.c.n_head, -1).transpose(1, 2)
                for z in b.attn.c_attn(b.ln_1(x)).chunk(3, -1)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + b.attn.c_proj(y.transpose(1, 2).flatten(2))
            x = x + b.mlp.c_proj(F.gelu(b.mlp.c_fc(b.ln_2(x)))) * FACTOR
        logits = self.lm_head(t.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
"""
SIZES = {
    "layers": 1, "heads": 2, "width": 16, "block": 8, "vocabulary": 40, "batch": 2, "rounds": 2,
    "threads": 1,
}  # fmt: skip
SMALL = ["train", *(word for name, n in SIZES.items() for word in (f"--{name}", str(n)))]


def test_all_rows_lose_the_same_and_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text("FACTOR = 1\n" + PEER)
    out = tmp_path / "a.json"
    files = ["--nanogpt", str(tmp_path), "--json", str(out), "--plot", str(tmp_path / "a.png")]
    assert main([*SMALL, *files]) == 0
    found = json.loads(out.read_text())["results"]
    names = ["antiphon", "  AdamW not fused", "  loss in shares", "nanogpt"]
    assert [each["name"] for each in found] == names * 2
    for each in found:
        assert each["same_loss"]
        assert len(each["rounds_s"]) == 2
        assert each["times_nanogpt"] > 0
    assert [each["times_nanogpt"] for each in found if each["name"] == "nanogpt"] == [1.0, 1.0]
    for ours, changed, on in ((0, 1, False), (0, 2, True), (4, 5, False), (4, 6, True)):
        ratio = found[changed]["median_s"] / found[ours]["median_s"]
        assert found[changed]["switched_on"] is on
        assert found[changed]["switch_gives"] == pytest.approx(1 / ratio if on else ratio)
    said = capsys.readouterr().out
    assert "float32" in said
    assert "x nanogpt" in said
    below = said.split("what a switch gives")[1].splitlines()
    assert [line.split("  ")[0] for line in below[1:]] == ["fused AdamW", "loss in shares", "bf16"]
    assert "yes" in below[1]
    assert "yes" not in below[2]  # of so small a vocabulary
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_compiled_steps_run_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced, but run as it is, since compiling takes a minute and is torch's affair."""
    (tmp_path / "model.py").write_text("FACTOR = 1\n" + PEER)
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **_: compile_(model, backend="eager"))
    given = ["--compile", "--precisions", "float32", "--nanogpt", str(tmp_path)]
    out = tmp_path / "a.json"
    assert main([*SMALL, *given, "--json", str(out)]) == 0
    found = json.loads(out.read_text())["results"]
    assert [each["name"] for each in found][-3:] == ["  compiled", "nanogpt", "nanogpt compiled"]
    assert all(each["same_loss"] for each in found)
    assert "compile " in capsys.readouterr().out.split("what a switch gives")[1]


def test_a_large_vocabulary_has_the_loss_in_shares_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    large = ["--vocabulary", "600000", "--width", "2", "--heads", "1", "--rounds", "1"]
    assert main([*SMALL, *large, "--precisions", "float32"]) == 0
    said = capsys.readouterr().out
    assert "  loss whole" in said
    below = said.split("what a switch gives")[1].splitlines()
    assert [line.split("  ")[0] for line in below[1:]] == ["fused AdamW", "loss in shares"]
    assert "yes" in below[2]


def test_a_peer_that_computes_something_else_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.py").write_text("FACTOR = 9\n" + PEER)
    given = [*SMALL, "--nanogpt", str(tmp_path / "other.py"), "--precisions", "float32"]
    assert main([*given, "--no-switches"]) == 1
    assert "nanogpt in float32 loses" in capsys.readouterr().err


def test_a_peer_that_is_not_there_is_left_out_with_a_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*SMALL, "--no-switches", "--precisions", "bf16"]) == 0
    said = capsys.readouterr()
    assert "nanogpt is left out: --nanogpt PATH" in said.err
    assert "antiphon" in said.out
    (tmp_path / "model.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "empty.py").write_text("")
    for name, reason in (
        ("nowhere", "there is no model.py"),
        ("model.py", "cannot be imported"),
        ("empty.py", "has no GPT and GPTConfig"),
    ):
        with pytest.raises(ConfigError, match=reason):
            main([*SMALL, "--nanogpt", str(tmp_path / name)])
