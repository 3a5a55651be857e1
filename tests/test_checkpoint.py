"""Model folders: round trips, atomic writes, and everything that can be wrong with one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt.checkpoint import checkpoint_payload, load_model, save_model
from gpt.config import GPTConfig
from gpt.errors import CheckpointError, TokenizerError, UserError
from gpt.tokenizer import Tokenizer
from tests.strategies import build

TOKENIZER = Tokenizer.bytes()
CONFIG = GPTConfig(vocab_size=257, block_size=16, n_layer=2, n_head=2, d_model=16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "m", build(CONFIG, 1, torch.float32), TOKENIZER, training={"steps": 3})
    return tmp_path / "m"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_keeps_every_logit(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    """T13: tied stays tied, untied stays untied."""
    model = build(CONFIG.replace(tie_embeddings=tied), 1, dtype)
    save_model(tmp_path / "m", model, TOKENIZER, name="mine", training={"steps": 3})
    loaded = load_model(tmp_path / "m", dtype=None)
    assert (loaded.name, loaded.training) == ("mine", {"steps": 3})
    assert loaded.model.config == model.config
    assert loaded.tokenizer.fingerprint == TOKENIZER.fingerprint
    assert loaded.model.dtype == dtype
    assert not loaded.model.training
    assert (loaded.model.head.weight is loaded.model.embed.weight) == tied
    assert ("head.weight" in load_file(tmp_path / "m" / "model.safetensors")) != tied
    ids = torch.arange(16)[None]
    assert torch.equal(loaded.model(ids), model(ids))
    assert load_model(tmp_path / "m", dtype=torch.float64).model.dtype == torch.float64


def test_a_loaded_model_can_be_trained(folder: Path) -> None:
    model = load_model(folder).model
    model(torch.arange(16)[None]).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_run_folder_stands_for_the_model_in_it(tmp_path: Path) -> None:
    save_model(tmp_path / "run" / "model", build(CONFIG), TOKENIZER, name="run")
    assert load_model(tmp_path / "run").name == "run"


def test_saving_again_replaces_and_leaves_nothing_behind(folder: Path) -> None:
    save_model(folder, build(CONFIG, 2, torch.float32), TOKENIZER)
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert [p.name for p in folder.parent.iterdir()] == ["m"]
    wanted = build(CONFIG, 2, torch.float32).embed.weight
    assert torch.equal(load_model(folder).model.embed.weight, wanted)


def test_a_save_that_fails_leaves_the_earlier_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr("gpt.checkpoint.save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_model(folder, build(CONFIG, 2, torch.float32), TOKENIZER)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [p.name for p in folder.parent.iterdir()] == ["m"]


def test_somebody_elses_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="is no model folder"):
        save_model(tmp_path, build(CONFIG), TOKENIZER)
    assert (tmp_path / "thesis.tex").exists()


def checkpoint(path: Path, **changes: object) -> Path:
    model = build(CONFIG, 1, torch.float32)
    state = {f"gpt.{k}": v for k, v in model.state_dict().items()}
    payload = checkpoint_payload(CONFIG, TOKENIZER, name="run")
    torch.save({"state_dict": state, "antiphon": payload, "epoch": 3, **changes}, path)
    return path


def test_a_training_checkpoint_is_a_model(tmp_path: Path) -> None:
    loaded = load_model(checkpoint(tmp_path / "last.ckpt"))
    ids = torch.arange(16)[None]
    assert torch.equal(loaded.model(ids), build(CONFIG, 1, torch.float32)(ids))
    assert loaded.name == "run"
    assert loaded.model.head.weight is loaded.model.embed.weight


def test_a_checkpoint_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return (Path(tmp_path / "sprung").touch, ())

    path = checkpoint(tmp_path / "trap.ckpt", extra=Trap())
    with pytest.raises(CheckpointError, match="no readable checkpoint"):
        load_model(path)
    assert not (tmp_path / "sprung").exists()


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def spoil(folder: Path, case: str) -> None:
    weights = folder / "model.safetensors"
    if case == "another tokenizer":  # T10
        Tokenizer.chars("abc").save(folder / "tokenizer.json")
    elif case == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif case == "empty weights":
        weights.write_bytes(b"")
    elif case == "config is no JSON":
        (folder / "config.json").write_text("{")
    elif case == "config is a list":
        (folder / "config.json").write_text("[]")
    elif case == "another format":
        edit(folder, format="antiphon-model/99")
    elif case == "an unknown field":
        edit(folder, model={**CONFIG.to_dict(), "n_layers": 2})
    elif case == "a field of the wrong type":
        edit(folder, model={**CONFIG.to_dict(), "n_layer": "two"})
    elif case == "no architecture":
        edit(folder, model=None)
    elif case == "another size":
        edit(folder, model=CONFIG.replace(d_model=32).to_dict())
    elif case == "a billion layers":
        edit(folder, model=CONFIG.replace(n_layer=10**9).to_dict())
    elif case == "deep JSON":
        (folder / "config.json").write_text("[" * 100_000)
    elif case == "a width beyond all memory":
        edit(folder, model={**CONFIG.to_dict(), "d_model": 10**30})
    elif case == "matrices beyond all memory":
        wide = {"d_model": 2**31, "vocab_size": 2**31, "n_head": 1, "head_dim": 2**31}
        edit(folder, model={**CONFIG.to_dict(), **wide})
    elif case == "a tensor is missing":
        state = load_file(weights)
        del state["norm.weight"]
        save_file(state, weights)
    elif case.startswith("no "):
        (folder / case.removeprefix("no ")).unlink()
    else:
        raise AssertionError(case)


@pytest.mark.parametrize(
    ("case", "error", "says"),
    [
        ("another tokenizer", TokenizerError, "fingerprint"),
        ("truncated weights", CheckpointError, "model.safetensors cannot be read"),
        ("empty weights", CheckpointError, "model.safetensors cannot be read"),
        ("config is no JSON", CheckpointError, "not JSON"),
        ("config is a list", CheckpointError, "not written by Antiphon"),
        ("another format", CheckpointError, "antiphon-model/99"),
        ("an unknown field", CheckpointError, "did you mean n_layer"),
        ("a field of the wrong type", CheckpointError, "n_layer is 'two'"),
        ("no architecture", CheckpointError, "does not describe a model"),
        ("another size", CheckpointError, "size mismatch for embed.weight"),
        ("deep JSON", CheckpointError, "not JSON"),
        ("a width beyond all memory", CheckpointError, "d_model is 10"),
        ("matrices beyond all memory", CheckpointError, "larger matrices than there can be"),
        ("a billion layers", CheckpointError, "1000000000 layers, the weights have 2"),
        ("a tensor is missing", CheckpointError, "norm.weight"),
        ("no config.json", CheckpointError, "no model folder"),
        ("no model.safetensors", CheckpointError, "has no model.safetensors"),
        ("no tokenizer.json", CheckpointError, "has no tokenizer.json"),
    ],
)
def test_damage_is_named_in_one_line(
    folder: Path, case: str, error: type[UserError], says: str
) -> None:
    spoil(folder, case)
    with pytest.raises(error, match=says) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_other_files_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "poem.ckpt").write_text("So much depends")
    for path, says in [
        (tmp_path / "absent", "no model at"),
        (tmp_path, "no model folder"),
        (tmp_path / "poem.ckpt", "is no checkpoint: give a model folder"),
        (tmp_path / ("x" * 300), "no model at"),
        (Path("/dev/null"), "no model folder"),
    ]:
        with pytest.raises(CheckpointError, match=says) as caught:
            load_model(path)
        assert "\n" not in str(caught.value)
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(CheckpointError, match="not written by Antiphon"):
        load_model(tmp_path / "foreign.ckpt")


def test_opening_a_model_draws_no_random_weights(folder: Path) -> None:
    """They would be thrown away; and drawing them would shift the caller's random numbers."""
    before = torch.get_rng_state()
    load_model(folder)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(257, 16),
        torch.zeros(257, 16).to_sparse(),
        torch.zeros(257, 16, dtype=torch.complex64),
        torch.zeros(257, 16, device="meta"),
    ],
    ids=["expanded", "sparse", "complex", "meta"],
)
def test_tensors_that_only_claim_their_size_are_refused(
    tmp_path: Path, tensor: torch.Tensor
) -> None:
    state = {f"gpt.{k}": v for k, v in build(CONFIG, 1, torch.float32).state_dict().items()}
    path = checkpoint(tmp_path / "m.ckpt", state_dict={**state, "gpt.embed.weight": tensor})
    with pytest.raises(CheckpointError, match=r"embed.weight is no plain array|no readable"):
        load_model(path)


def test_a_name_with_control_characters_cannot_spoil_a_log(folder: Path) -> None:
    edit(folder, name="a\nb\x1b[31m\udc80", training="none")
    loaded = load_model(folder)
    assert loaded.name == "a?b?[31m?"
    assert loaded.training == {}


def test_all_files_of_a_model_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_model(tmp_path / "m", build(CONFIG, 1, torch.float32), TOKENIZER)
    finally:
        os.umask(before)
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "m").iterdir()}
    assert modes == {0o644}
