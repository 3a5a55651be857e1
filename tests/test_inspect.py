"""`antiphon inspect`: what a model is, from its folder, its config or its name."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt.amounts import number, shown, size
from gpt.checkpoint import save_model
from gpt.config import PRESETS, GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.flops import flops_per_token
from gpt.footprint import CPU_SLACK, Training, footprint
from gpt.inspect import main, text, verdict
from gpt.machine import Memory
from gpt.model import GPT
from gpt.subject import find
from gpt.tokenizer import Tokenizer
from gpt.training.run import shipped_configs

ROOT = Path(__file__).resolve().parents[1]
MUCH = Memory("a large machine", 2**50, 2**51)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_facts_are_shown_without_braces_and_quotes() -> None:
    record = {"sources": [{"source": "notes", "weight": 1.0}], "val_fraction": 0.1, "field": None}
    assert shown(record) == "sources source notes, weight 1.0000, val fraction 0.1000, field none"
    assert shown(["a", "b"]) == "a, b"


def test_a_model_folder_tells_its_parts_files_and_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.bytes()
    config = GPTConfig(vocab_size=tokenizer.n_vocab, block_size=16, n_layer=2, n_head=2, d_model=16)
    model = GPT(config)
    save_model(tmp_path / "m", model, tokenizer, training={"steps": 1200, "val_loss": 2.5})
    found = told(capsys, str(tmp_path / "m"))
    assert found["parameters"]["total"] == model.num_params()
    assert sum(part["count"] for part in found["parameters"]["parts"]) == model.num_params()
    assert found["flops_per_token"]["training"] == flops_per_token(config).training
    assert found["kv_bytes"]["per_token"]["float32"] == 2 * 2 * 16 * 4
    assert found["kv_bytes"]["full_context"]["bfloat16"] == 2 * 2 * 16 * 2 * 16
    assert found["weight_bytes"]["float32"] == 4 * model.num_params()
    assert found["facts"]["tokenizer"] == "bytes, 257 tokens"
    assert found["facts"]["steps"] == "1,200"
    assert found["facts"]["model.safetensors"].endswith("KiB")
    assert main([str(tmp_path / "m")]) == 0
    page = capsys.readouterr().out
    assert f"{model.num_params():,}" in page
    assert "the embedding's" in page
    assert "fits: " in page


@pytest.mark.parametrize("name", [*shipped_configs(), *PRESETS])
def test_every_shipped_name_can_be_inspected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "smollm2-shakespeare":
        with pytest.raises(CheckpointError, match="make smollm2"):  # it begins with that model
            find(name)
        return
    subject = find(name)
    assert subject.config.vocab_size > 0
    assert "together about" in text(subject, MUCH, gpu=False)


def test_a_training_config_is_read_as_the_trainer_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "data: {source: x.txt, tokenizer: bytes, batch_size: 3}\n"
        "model:\n  preset: nano\n  config: {n_layer: 5, vocab_size: 0}\n"
        "  activation_checkpointing: true\n  optimizer: {ema_decay: 0.99}\n"
        "trainer: {precision: bf16-mixed, accumulate_grad_batches: 4}\n"
    )
    subject = find(str(path))
    assert subject.name == "mine"
    assert (subject.config.n_layer, subject.config.d_model) == (5, 64)
    assert subject.config.vocab_size == 257
    assert subject.training == Training(3, 32, "bf16-mixed", 4, True, True)
    path.write_text("n_layer: 3\nd_model: 32\nn_head: 2\nvocab_size: 99\n")
    assert find(str(path)).config.vocab_size == 99


def test_a_config_that_begins_with_a_model_is_read_with_that_model(tmp_path: Path) -> None:
    config = GPTConfig(vocab_size=257, block_size=64, n_layer=2, d_model=32, n_head=2)
    save_model(tmp_path / "base", GPT(config), Tokenizer.bytes())
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"data: {{batch_size: 3, block_size: 16}}\nmodel:\n  init_from: {tmp_path / 'base'}\n"
        "  lora: {rank: 2, matrices: [attn.out]}\n"
    )
    subject = find(str(path))
    assert subject.config == config
    assert (subject.training.block_size, subject.training.adapters) == (16, 2 * 2 * (32 + 32))
    assert subject.facts["trained by LoRA"].startswith("256 numbers beside ")
    page = text(subject, MUCH, gpu=False)
    assert "the frozen matrices' gradients left out" in page
    assert "3 blocks of 16 tokens" in page
    whole = dataclasses.replace(subject.training, adapters=None)
    assert footprint(config, subject.training).optimizer == 2 * 4 * 256
    assert footprint(config, whole).peak > footprint(config, subject.training).peak
    path.write_text("model: {preset: nano, lora: {rnk: 2}}\n")
    with pytest.raises(ConfigError, match=r"lora\.rnk; did you mean rank"):
        find(str(path))


def test_an_unknown_vocabulary_is_assumed_and_said() -> None:
    subject = find("tinyshakespeare-char")
    assert subject.config.vocab_size == 256
    assert "256 tokens are assumed (--vocab-size sets it)" in subject.notes[0]


def test_flags_change_what_is_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(
        capsys, "nano", "--vocab-size", "500", "--block-size", "64", "--batch-size", "3",
        "--precision", "bf16-true", "--activation-checkpointing",
    )  # fmt: skip
    config = GPTConfig.preset("nano", vocab_size=500, block_size=64)
    assert found["config"] == config.to_dict()
    expected = footprint(config, Training(3, 3, "bf16-true", 1, True), slack=CPU_SLACK)
    if not torch.cuda.is_available():
        assert found["training"]["memory"]["weights"] == expected.weights
        assert found["training"]["needed"] > expected.peak
    assert found["notes"] == []


def test_what_is_not_there_or_no_config_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model, config or preset 'gpt2-124'.*gpt2-124m"):
        find("gpt2-124")
    with pytest.raises(CheckpointError):
        find(str(tmp_path))
    broken = tmp_path / "broken.yaml"
    for content, message in (
        ("a: [", "is not YAML"),
        ("- 1", "holds no settings"),
        ("data: {source: x}", "describes no model"),
        ("model: {preset: nani}", "did you mean nano"),
        ("model: {config: {n_layers: 2}}", "did you mean n_layer"),
        ("model: {preset: nano}\ndata: {batch_size: -1}", "batch_size is -1"),
    ):
        broken.write_text(content)
        with pytest.raises(ConfigError, match=message):
            find(str(broken))
    with pytest.raises(ConfigError, match=r"--batch-size is 0"):
        main(["nano", "--batch-size", "0"])


def test_what_does_not_fit_is_told_with_what_would() -> None:
    config = GPTConfig.preset("small", vocab_size=8192)
    training = Training(64, 64)
    whole = footprint(config, training).peak

    def said(free: int) -> str:
        return verdict(config, training, Memory("m", free, None), slack=CPU_SLACK, base=0)

    assert said(whole).startswith("fits: m has ")
    half = said(whole * 6 // 10)
    assert (
        "data.batch_size and data.eval_batch_size 32 with trainer.accumulate_grad_batches 2" in half
    )
    assert "model.activation_checkpointing true" in half
    assert footprint(config, Training(32, 32, accumulate=2)).peak <= whole * 6 // 10
    assert "alone are too many: a smaller model.config" in said(10 * 2**20)


def test_a_config_is_inspected_without_torch() -> None:
    code = (
        "import sys; from gpt.inspect import main; main(['shakespeare-tiny']); "
        "print([m for m in ('torch', 'lightning') if m in sys.modules])"
    )
    if Path("/dev/nvidiactl").exists():
        pytest.skip("where there is a GPU, torch is asked for its memory")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_numbers_are_for_people() -> None:
    assert [size(n) for n in (5, 2048, 1.5 * 2**20, 3 * 2**30)] == [
        "5 B",
        "2 KiB",
        "1.5 MiB",
        "3 GiB",
    ]
    assert [number(n) for n in (5, 1500, 2.5e9)] == ["5 FLOP", "1.5 kFLOP", "2.5 GFLOP"]
