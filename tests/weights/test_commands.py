"""`antiphon import` and `antiphon export`, from the words typed to the files written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpt.checkpoint import LoadedModel, load_model, save_model
from gpt.cli import main
from gpt.config import GPTConfig
from gpt.tokenizer import Tokenizer
from gpt.vocab import open_vocabulary, to_huggingface
from gpt.weights.hf_config import read_config
from gpt.weights.hf_export import describe, export_folder
from gpt.weights.huggingface import open_folder
from tests.strategies import build
from tests.weights.foreign import llama_tensors, write_llama

TEMPLATE = "{% for m in messages %}{{ m.content }}\r\n{% endfor %}"
BYTES = Tokenizer.bytes(["<|begin|>"])
LLAMA = GPTConfig(
    vocab_size=300, block_size=32, n_layer=2, n_head=4, n_kv_head=2, d_model=16, d_ff=24,
    mlp="swiglu", qk_norm=False, tie_embeddings=False,
)  # fmt: skip


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A Hugging Face folder with a vocabulary and a chat template."""
    folder = write_llama(tmp_path / "theirs")
    for name, text in to_huggingface(BYTES).items():
        (folder / name).write_text(text)
    (folder / "chat_template.jinja").write_bytes(TEMPLATE.encode())
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_folder_is_imported_whole(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "import", theirs, tmp_path / "m", "--name", "tiny")
    assert status == 0, err
    assert "13,520 parameters in float32, 2 layers, context of 32 tokens" in out
    loaded = load_model(tmp_path / "m")
    assert loaded.name == "tiny"
    assert loaded.chat_template == TEMPLATE
    assert loaded.tokenizer.fingerprint == open_vocabulary(theirs).fingerprint
    assert loaded.training["imported"]["family"] == "llama"
    assert loaded.model.config == LLAMA
    wanted = llama_tensors()["model.embed_tokens.weight"]
    assert torch.equal(loaded.model.embed.weight, wanted)
    status, _, err = run(capsys, "import", tmp_path / "m", tmp_path / "n")
    assert status == 1
    assert "is a model folder of Antiphon already" in err


@pytest.mark.parametrize("kind", ["file", "folder", "model", "name", "theirs"])
def test_a_tokenizer_can_be_given(
    kind: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = write_llama(tmp_path / "bare")
    status, _, err = run(capsys, "import", bare, tmp_path / "m")
    assert status == 1
    assert "holds no vocabulary; give the one" in err
    assert not (tmp_path / "m").exists()
    own = Tokenizer.bytes()
    own.save(tmp_path / "tokenizer.json")
    save_model(tmp_path / "own", build(LLAMA, dtype=torch.float32), own)
    given, wanted = {
        "file": (tmp_path / "tokenizer.json", own),
        "folder": (tmp_path, own),
        "model": (tmp_path / "own", own),
        "name": ("bytes", own),
        "theirs": (theirs, open_vocabulary(theirs)),
    }[kind]
    status, _, err = run(capsys, "import", bare, tmp_path / "m", "--tokenizer", given)
    assert status == 0, err
    assert load_model(tmp_path / "m").tokenizer.fingerprint == wanted.fingerprint


def test_a_tokenizer_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Tokenizer.bytes([f"<{i}>" for i in range(50)]).save(tmp_path / "tokenizer.json")
    bare = write_llama(tmp_path / "bare")
    words = ("--tokenizer", tmp_path / "tokenizer.json")
    status, _, err = run(capsys, "import", bare, tmp_path / "m", *words)
    assert status == 1
    assert "the tokenizer has 307 tokens, but the model's vocabulary only 300" in err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_can_be_converted(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {name: value.to(torch.float64) for name, value in llama_tensors().items()}
    bare = write_llama(tmp_path / "bare", tensors)
    words = ("--tokenizer", "bytes", "--dtype", dtype)
    assert run(capsys, "import", bare, tmp_path / "m", *words)[0] == 0
    found = load_file(tmp_path / "m" / "model.safetensors")["embed.weight"]
    assert torch.equal(found, tensors["model.embed_tokens.weight"].to(getattr(torch, dtype)))


def test_mixed_dtypes_are_kept_and_run_as_the_widest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {
        name: value if "norm" in name else value.to(torch.bfloat16)
        for name, value in llama_tensors().items()
    }
    bare = write_llama(tmp_path / "bare", tensors)
    _, out, _ = run(capsys, "import", bare, tmp_path / "m", "--tokenizer", "bytes")
    assert "in bfloat16 and float32" in out
    saved = load_file(tmp_path / "m" / "model.safetensors")
    assert saved["embed.weight"].dtype == torch.bfloat16
    assert saved["norm.weight"].dtype == torch.float32
    loaded = load_model(tmp_path / "m", dtype=None)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


def test_a_number_too_large_for_the_dtype_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = llama_tensors()
    tensors["model.norm.weight"][3] = 1e5
    bare = write_llama(tmp_path / "bare", tensors)
    words = ("--tokenizer", "bytes", "--dtype", "float16")
    status, _, err = run(capsys, "import", bare, tmp_path / "m", *words)
    assert status == 1
    assert "norm.weight has numbers too large for float16" in err
    assert not (tmp_path / "m").exists()


def test_nothing_that_is_no_model_of_ours_is_overwritten(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor the source itself, which has a config.json too. A model of ours is replaced whole."""
    (tmp_path / "file").write_text("mine")
    before = {file.name: file.read_bytes() for file in theirs.iterdir()}
    for out in (theirs, tmp_path, tmp_path / "file"):
        status, _, err = run(capsys, "import", theirs, out)
        assert status == 1
        assert "exists and is no model folder" in err
    assert {file.name: file.read_bytes() for file in theirs.iterdir()} == before
    save_model(tmp_path / "m", build(LLAMA), BYTES, chat_template="old")
    assert run(capsys, "import", theirs, tmp_path / "m")[0] == 0
    assert load_model(tmp_path / "m").chat_template == TEMPLATE
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_a_disk_that_is_full_leaves_the_earlier_model(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    save_model(tmp_path / "m", build(LLAMA), BYTES, name="earlier")
    monkeypatch.setattr("gpt.checkpoint.save_file", full)
    status, _, err = run(capsys, "import", theirs, tmp_path / "m")
    assert (status, "No space left" in err) == (1, True)
    assert load_model(tmp_path / "m").name == "earlier"


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "a"}}, "a"),
        ({"tokenizer_config.json": {"chat_template": None}}, None),
        ({"chat_template.json": {"chat_template": "b"}}, "b"),
        (
            {"tokenizer_config.json": {"chat_template": [
                {"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"},
            ]}},
            "d",
        ),
        ({"chat_template.jinja": "file", "tokenizer_config.json": {"chat_template": "a"}}, "file"),
    ],
)  # fmt: skip
def test_a_chat_template_is_found_where_it_can_be(
    tmp_path: Path, files: dict[str, Any], wanted: str | None
) -> None:
    folder = write_llama(tmp_path / "theirs")
    for name, value in files.items():
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    assert open_folder(folder, vocabulary=False).chat_template == wanted


# --- Export -------------------------------------------------------------------------------------


def loaded(config: GPTConfig, tokenizer: Tokenizer = BYTES) -> LoadedModel:
    return LoadedModel(
        build(config, dtype=torch.float32), tokenizer, "m", Path("m"), {}, chat_template=TEMPLATE
    )


def test_a_folder_is_exported_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(LLAMA, dtype=torch.float32)
    save_model(tmp_path / "m", model, BYTES, chat_template=TEMPLATE)
    words = ("--format", "hf", "--dtype", "bfloat16")
    status, out, err = run(capsys, "export", tmp_path / "m", tmp_path / "hf", *words)
    assert status == 0, err
    assert "transformers loads it as LlamaForCausalLM" in out
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert settings["torch_dtype"] == "bfloat16"
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (None, BYTES.eot)
    foreign = open_folder(tmp_path / "hf")
    assert foreign.chat_template == TEMPLATE
    assert foreign.tokenizer is not None
    assert foreign.tokenizer.encode("Ünïcode") == BYTES.encode("Ünïcode")
    assert foreign.tokenizer.end_ids == BYTES.end_ids
    found = foreign.weights["blocks.1.attn.qkv.weight"]()
    assert torch.equal(found, model.blocks[1].attn.qkv.weight.bfloat16())
    status, _, err = run(capsys, "export", tmp_path / "m", tmp_path / "hf", *words)
    assert (status, "exists and is not empty" in err) == (1, True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"position": "alibi"}, "position is 'alibi', not 'rotary'"),
        ({"mlp": "relu2"}, "mlp is 'relu2', not 'swiglu'"),
        ({"norm": "layernorm"}, "norm is 'layernorm'"),
        ({"norm_place": "post"}, "norm_place is 'post', not 'pre'"),
        ({"residual_scale": 0.5}, r"residual_scale is 0\.5"),
        ({"logit_softcap": 30.0}, r"logit_softcap is 30\.0"),
        ({"attn_softcap": 50.0}, r"attn_softcap is 50\.0, not None"),
        ({"value_embeddings": True}, "value_embeddings is True"),
        ({"conv_width": 4}, "conv_width is 4, not 0"),
        ({"residual_scalars": True, "x0_scalars": True}, "residual_scalars is True.*x0_scalars is"),
        ({"rope_dims": 2}, "rope_dims is 2, not null"),
        ({"attn_scale": 0.3}, r"attn_scale is 0\.3"),
        ({"pattern": "window:4+sinks:1"}, "pattern is 'window:4.sinks:1'"),
        ({"pattern": ["window:4", "window:5"]}, "pattern is"),
        ({"pattern": ["window:4", "causal"]}, "needs qk_norm .Qwen3. or qkv_bias alone"),
        ({"pattern": "window:4", "bias": True}, "a window in every layer needs"),
        ({"qkv_bias": True, "mlp_bias": True}, "qkv_bias is set against bias"),
        ({"qk_norm": True, "qkv_bias": True}, "Qwen3, whose biases"),
        ({"bias": True, "d_model": 18, "head_dim": 4}, "d_model is no multiple of n_head"),
        ({"position": "learned"}, "norm is 'rmsnorm', not 'layernorm'; bias is False"),
        ({"position": "learned"}, "kv_heads is 2, not 4"),
    ],
)
def test_what_no_class_computes_is_refused_by_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match=says):
        describe(LLAMA.replace(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": "ntk", "rope_factor": 3.0},
        {"rope_layout": "interleaved", "bias": True},
        {"rope_layout": "interleaved", "qk_norm": True},
    ],
)
def test_rotary_settings_that_only_we_spell_so_are_rewritten(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Pairs that lie side by side, and a base that is given by a factor: the same function."""
    before = loaded(LLAMA.replace(**changes))
    export_folder(before, tmp_path / "hf")
    foreign = open_folder(tmp_path / "hf")
    assert (foreign.config.rope_layout, foreign.config.rope_scaling) == ("half-split", "none")
    after = build(foreign.config, dtype=torch.float32)
    after.load_state_dict({name: read() for name, read in foreign.weights.items()})
    ids = torch.arange(32)[None]
    with torch.inference_mode():
        wanted = before.model(ids)
        assert (after(ids) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_a_described_architecture_is_read_back() -> None:
    """Over what the classes can express, writing a configuration and reading it are inverse."""
    for changes in (
        {}, {"bias": True}, {"mlp_bias": True}, {"qkv_bias": True}, {"qk_norm": True},
        {"pattern": "window:4"}, {"pattern": ["window:4", "causal"], "qkv_bias": True},
        {"n_kv_head": None}, {"d_model": 18, "head_dim": 4}, {"tie_embeddings": True},
    ):  # fmt: skip
        config = LLAMA.replace(**changes)
        family, settings = describe(config)
        values = {"model_type": family, **json.loads(json.dumps(settings))}
        assert read_config(values, "config.json", 2) == (family, config)
