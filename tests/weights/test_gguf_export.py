"""Export to GGUF: what comes back is the same model, and what cannot be written says why."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader

from gpt.checkpoint import LoadedModel, load_model, save_model
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.model import GPT
from gpt.tokenizer import Tokenizer
from gpt.weights.gguf_export import Kind, export_gguf, find_family, write_gguf
from gpt.weights.gguf_file import GGUFFile
from gpt.weights.gguf_model import open_gguf
from tests.weights.test_gguf_model import model_of, turned

ROTARY: dict[str, Any] = {
    "vocab_size": 300, "block_size": 32, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "d_model": 32,
    "d_ff": 64, "position": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "qk_norm": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 300, "block_size": 32, "n_layer": 2, "n_head": 4, "d_model": 32, "d_ff": 64,
    "position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "qk_norm": False,
}  # fmt: skip
LLAMA3 = {
    "head_dim": 64, "rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_block_size": 500,
    "rope_low_freq_factor": 2.0, "rope_high_freq_factor": 5.5,
}  # fmt: skip
YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_block_size": 8}
SAME: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({**ROTARY}, "llama"),
    "untied": ({**ROTARY, "tie_embeddings": False}, "llama"),
    "wide heads": ({**ROTARY, "head_dim": 12, "norm_eps": 1e-3, "rope_base": 5e5}, "llama"),
    "biases": ({**ROTARY, "bias": True}, "llama"),
    "biases of the mlp": ({**ROTARY, "mlp_bias": True}, "llama"),
    "linear": ({**ROTARY, "rope_scaling": "linear", "rope_factor": 4.0}, "llama"),
    "yarn": ({**ROTARY, **YARN, "rope_beta_fast": 4.0}, "llama"),
    "llama3": ({**ROTARY, **LLAMA3}, "llama"),
    "llama3 with biases": ({**ROTARY, **LLAMA3, "qkv_bias": True}, "llama"),
    "wide heads with biases": ({**ROTARY, "head_dim": 12, "qkv_bias": True}, "llama"),
    "qwen2": ({**ROTARY, "qkv_bias": True}, "qwen2"),
    "qwen3": ({**ROTARY, "qk_norm": True, "head_dim": 16}, "qwen3"),
    "gpt2": (GPT2, "gpt2"),
    "gpt2 untied": ({**GPT2, "tie_embeddings": False}, "gpt2"),
}


def random_model(fields: dict[str, Any]) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def file_of(model: GPT, path: Path, kind: Kind | None = None) -> Path:
    write_gguf(path, model.config, model.state_dict(), {}, kind=kind)
    return path


@pytest.mark.parametrize("name", SAME)
def test_import_export_import_changes_no_bit(name: str, tmp_path: Path) -> None:
    fields, family = SAME[name]
    model = random_model(fields)
    foreign = open_gguf(file_of(model, tmp_path / "a.gguf"))
    assert foreign.origin["family"] == family
    assert foreign.config == model.config
    again = model_of(foreign)
    file_of(again, tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    state = model.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())


@torch.inference_mode()
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_layout": "interleaved"},
        {"rope_layout": "interleaved", "qkv_bias": True},
        {"rope_layout": "interleaved", "qk_norm": True},
        {"rope_scaling": "ntk", "rope_factor": 4.0},
        {**YARN, "rope_attention_factor": 0.8},
        {"pattern": ["window:32", "causal"]},
    ],
    ids=str,
)
def test_what_has_another_form_there_is_the_same_function(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model({**ROTARY, **changes})
    foreign = open_gguf(file_of(model, tmp_path / "a.gguf"))
    assert foreign.config.rope_layout == "half-split"
    ids = torch.randint(0, 300, (2, 32))
    wanted = model(ids)
    assert (model_of(foreign)(ids) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_rows_of_llama_heads_stand_as_llama_cpp_turns_them(tmp_path: Path) -> None:
    model = random_model(ROTARY)
    tensors = {x.name: x.data for x in GGUFReader(file_of(model, tmp_path / "a.gguf")).tensors}
    q, k, v = model.state_dict()["blocks.1.attn.qkv.weight"].split([32, 16, 16])
    assert (tensors["blk.1.attn_q.weight"] == turned(q.numpy(), 4)).all()
    assert (tensors["blk.1.attn_k.weight"] == turned(k.numpy(), 2)).all()
    assert (tensors["blk.1.attn_v.weight"] == v.numpy()).all()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", None])
def test_matrices_are_of_the_kind_asked_for_and_vectors_float32(
    kind: Kind | None, tmp_path: Path
) -> None:
    model = random_model(GPT2).to(torch.bfloat16 if kind is None else torch.float32)
    file = GGUFFile(file_of(model, tmp_path / "a.gguf", kind))
    for name in file.names():
        plain = len(file.shape(name)) == 1 or name == "position_embd.weight"
        assert file.kind(name) == ("F32" if plain else kind or "BF16")
    wanted = model.embed.weight.float()
    assert (file.read("token_embd.weight").float() - wanted).abs().max() < 0.01
    reader = GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["general.file_type"].contents() == {
        "F16": 1, "BF16": 32, "Q8_0": 7, None: 32,
    }[kind]  # fmt: skip


def test_numbers_too_large_for_float16_are_not_written(tmp_path: Path) -> None:
    model = random_model(ROTARY)
    with torch.no_grad():
        model.embed.weight[3, 3] = 1e6
    with pytest.raises(CheckpointError, match=r"token_embd\.weight has numbers too large"):
        file_of(model, tmp_path / "a.gguf", "F16")
    assert not list(tmp_path.iterdir())
    file_of(model, tmp_path / "a.gguf", "BF16")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "our default": ({"mlp": "relu2"}, "mlp is 'relu2', not 'swiglu'"),
    "norm": ({"norm": "layernorm"}, "norm is 'layernorm', not 'rmsnorm'"),
    "place": ({"norm_place": "post"}, "norm_place is 'post'"),
    "softcap": ({"logit_softcap": 30.0}, "logit_softcap is 30.0"),
    "residual": ({"residual_scale": 0.5}, "residual_scale is 0.5"),
    "capped scores": ({"attn_softcap": 50.0}, "attn_softcap is 50.0"),
    "values": ({"value_embeddings": True}, "value_embeddings is True, not False"),
    "convolutions": ({"conv_width": 4}, "conv_width is 4, not 0"),
    "scalars": ({"residual_scalars": True}, "residual_scalars is True"),
    "first stream": ({"x0_scalars": True}, "x0_scalars is True"),
    "scale": ({"attn_scale": 0.3}, "attn_scale is 0.3"),
    "alibi": ({"position": "alibi"}, "position is 'alibi'"),
    "part of a head": ({"rope_dims": 4}, "rope_dims is 4"),
    "window": ({"pattern": "window:16"}, "pattern is 'window:16'"),
    "sinks": ({"pattern": "window:40+sinks:4"}, "pattern is 'window:40"),
    "norm and biases": ({"qk_norm": True, "qkv_bias": True}, "has_qkv_bias is True"),
    "norm and llama3": ({**LLAMA3, "qk_norm": True}, "rope_scaling is 'llama3'"),
    "yarn": ({**YARN, "rope_truncate": False}, "rope_truncate is False"),
    "several": ({"mlp": "gelu", "logit_softcap": 3.0}, "logit_softcap is 3.0, not None; mlp is"),
    "gpt2 with another bend": ({**GPT2, "mlp": "gelu-exact"}, "mlp is 'gelu-exact', not 'gelu'"),
    "gpt2 without biases": ({**GPT2, "bias": False}, "bias is False"),
    "gpt2 with shared heads": ({**GPT2, "n_kv_head": 2}, "kv_heads is 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_without_a_counterpart_is_refused_by_field(name: str) -> None:
    changes, reason = REFUSED[name]
    with pytest.raises(CheckpointError) as caught:
        find_family(GPTConfig(**{**ROTARY, **changes}))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def loaded(folder: Path, template: str | None) -> LoadedModel:
    tokenizer = Tokenizer.bytes(["<|user|>"])
    model = random_model(ROTARY)
    save_model(folder, model, tokenizer, chat_template=template)
    return load_model(folder)


def test_vocabulary_and_template_come_along_padded_to_the_rows(tmp_path: Path) -> None:
    source = loaded(tmp_path / "model", "{{ messages }}")
    assert source.tokenizer.n_vocab == 258
    assert export_gguf(source, tmp_path / "a.gguf") == "llama"
    settings = GGUFFile(tmp_path / "a.gguf").settings
    assert settings["tokenizer.ggml.tokens"][257:260] == ["<|endoftext|>", "[PAD258]", "[PAD259]"]
    assert len(settings["tokenizer.ggml.tokens"]) == 300
    foreign = open_gguf(tmp_path / "a.gguf")
    assert foreign.chat_template == "{{ messages }}"
    assert foreign.tokenizer is not None
    assert foreign.tokenizer.n_vocab == 258
    text = "Now is the winter of our discontent – 日本"
    assert foreign.tokenizer.encode(text) == source.tokenizer.encode(text)
    assert foreign.tokenizer.special == source.tokenizer.special
    assert open_gguf(tmp_path / "a.gguf", vocabulary=False).tokenizer is None


def test_a_place_that_is_taken_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("mine")
    with pytest.raises(CheckpointError, match="exists"):
        file_of(random_model(ROTARY), tmp_path / "a.gguf")
    assert (tmp_path / "a.gguf").read_text() == "mine"


def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path) -> None:
    model = random_model(ROTARY)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot write"):
            file_of(model, tmp_path / "a.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
