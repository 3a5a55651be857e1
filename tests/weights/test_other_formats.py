"""nanoGPT's checkpoints and LitGPT's folders: the same weights as in a Hugging Face folder become
the same model, bit for bit. (That those are read rightly is measured against transformers.)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.model import GPT
from gpt.weights import huggingface, litgpt
from gpt.weights.command import open_source
from gpt.weights.nanogpt import open_checkpoint
from gpt.weights.source import Foreign
from tests.strategies import build
from tests.weights.foreign import llama_tensors, write_llama


def state_of(foreign: Foreign) -> dict[str, Tensor]:
    return {name: read() for name, read in foreign.weights.items()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


# --- nanoGPT ------------------------------------------------------------------------------------

ARGS = {
    "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "bias": False, "vocab_size": 65,
    "dropout": 0.2,
}  # fmt: skip


def nanogpt_model(bias: bool) -> GPT:
    return build(
        GPTConfig(
            vocab_size=65, block_size=12, n_layer=2, n_head=2, d_model=16, position="learned",
            norm="layernorm", mlp="gelu-exact", bias=bias, qk_norm=False,
        ),
        dtype=torch.float32,
    )  # fmt: skip


def nanogpt_state(model: GPT, prefix: str = "") -> dict[str, Tensor]:
    """Our weights under its names."""
    names = {
        "embed.weight": "wte.weight", "embed_pos.weight": "wpe.weight", "blocks.": "h.",
        "norm_attn": "ln_1", "norm_mlp": "ln_2", "attn.qkv": "attn.c_attn",
        "attn.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    state = {}
    for name, value in model.state_dict().items():
        theirs = name
        for ours, other in names.items():
            theirs = theirs.replace(ours, other)
        theirs = theirs.replace("norm.", "ln_f.") if theirs.startswith("norm.") else theirs
        whole = "lm_head.weight" if name == "head.weight" else f"transformer.{theirs}"
        state[prefix + whole] = value
    return state


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_a_nanogpt_checkpoint_is_the_model(tmp_path: Path, bias: bool, prefix: str) -> None:
    model = nanogpt_model(bias)
    state = nanogpt_state(model, prefix)
    state[f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 12, 12).tril()
    checkpoint = {
        "model": state, "model_args": {**ARGS, "bias": bias}, "iter_num": 9,
        "optimizer": {"state": {}, "param_groups": []}, "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "shakespeare_char"},
    }  # fmt: skip
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    foreign = open_source(tmp_path)  # the folder stands for the file in it
    assert foreign.config == model.config
    assert foreign.tokenizer is None
    wanted = model.state_dict()
    del wanted["head.weight"]
    assert_same(state_of(foreign), wanted)


@pytest.mark.parametrize(
    ("args", "change", "says"),
    [
        ({"n_layer": 10**9}, None, "n_layer is 1000000000, but the weights have 2 layers"),
        ({"use_rmsnorm": True}, None, "sets use_rmsnorm, which is not known"),
        ({"n_embd": 18}, None, "has the shape"),
        ({"bias": True}, None, "lacks the tensor"),
        ({"vocab_size": None}, None, "vocab_size is missing"),
        ({}, lambda s: s.update({"transformer.x": torch.ones(1)}), "a tensor 'transformer.x'"),
        ({}, lambda s: s.update({"lm_head.weight": torch.ones(65, 16)}), "to which nanoGPT ties"),
        ({}, lambda s: s.update({"_orig_mod.lm_head.weight": torch.ones(1)}), "with and without"),
    ],
)
def test_what_is_wrong_with_a_nanogpt_checkpoint_is_named(
    tmp_path: Path, args: dict[str, Any], change: Callable[[dict], Any] | None, says: str
) -> None:
    state = nanogpt_state(nanogpt_model(False))
    if change:
        change(state)
    torch.save({"model": state, "model_args": {**ARGS, **args}}, tmp_path / "ckpt.pt")
    with pytest.raises(CheckpointError, match=says):
        state_of(open_checkpoint(tmp_path / "ckpt.pt"))


def test_another_checkpoint_of_torch_is_told_from_nanogpts(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="is no checkpoint of nanoGPT"):
        open_source(tmp_path / "other.pt")


# --- LitGPT -------------------------------------------------------------------------------------

LIT = {
    "name": "tiny", "hf_config": {}, "block_size": 32, "n_layer": 2, "n_embd": 16,
    "vocab_size": 299, "padding_multiple": 4, "padded_vocab_size": 300, "n_head": 4,
    "head_size": 4, "n_query_groups": 2, "norm_class_name": "RMSNorm", "norm_eps": 1e-5,
    "parallel_residual": False, "shared_attention_norm": False, "bias": False,
    "attn_bias": False, "lm_head_bias": False, "rotary_percentage": 1.0, "rope_base": 10000,
    "rope_condense_ratio": 1, "rope_adjustments": None, "mlp_class_name": "LLaMAMLP",
    "gelu_approximate": "none", "intermediate_size": 24, "n_expert": 0, "n_expert_per_token": 0,
    "scale_embeddings": False, "norm_1": True, "norm_2": True, "norm_qk": False,
    "sliding_window_size": None, "latent_attention": None,
}  # fmt: skip


def litgpt_tensors(by_groups: bool = False) -> dict[str, Tensor]:
    """`llama_tensors` as LitGPT's conversion lays them out."""
    source = llama_tensors()
    out = {
        "lm_head.weight": source["lm_head.weight"],
        "transformer.wte.weight": source["model.embed_tokens.weight"],
        "transformer.ln_f.weight": source["model.norm.weight"],
    }
    for i in range(2):
        ours, theirs = f"model.layers.{i}", f"transformer.h.{i}"
        q, k, v = (source[f"{ours}.self_attn.{name}_proj.weight"] for name in "qkv")
        if by_groups:  # two query heads of 4, a key head, a value head; and again
            rows = [q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]]
            out[f"{theirs}.attn.attn.weight"] = torch.cat(rows)
        else:
            out[f"{theirs}.attn.qkv.weight"] = torch.cat([q, k, v])
        for name, other in {
            "attn.proj": "self_attn.o_proj", "mlp.fc_1": "mlp.gate_proj",
            "mlp.fc_2": "mlp.up_proj", "mlp.proj": "mlp.down_proj",
            "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
        }.items():  # fmt: skip
            out[f"{theirs}.{name}.weight"] = source[f"{ours}.{other}.weight"]
    return out


def write_litgpt(folder: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model_config.yaml").write_text(yaml.safe_dump({**LIT, **changes}))
    torch.save(tensors or litgpt_tensors(), folder / "lit_model.pth")
    return folder


@pytest.mark.parametrize("by_groups", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_litgpt_folder_is_the_model(tmp_path: Path, by_groups: bool, wrapped: bool) -> None:
    """With queries, keys and values one below the other, or sorted by groups as before; bare, or
    wrapped as its trainer saves."""
    tensors: Any = litgpt_tensors(by_groups)
    folder = write_litgpt(tmp_path / "lit", {"model": tensors} if wrapped else tensors)
    found = open_source(folder, vocabulary=False)
    wanted = huggingface.open_folder(write_llama(tmp_path / "hf"), vocabulary=False)
    assert found.config == wanted.config
    assert_same(state_of(found), state_of(wanted))


def test_a_head_that_is_the_embedding_is_tied(tmp_path: Path) -> None:
    tensors = litgpt_tensors()
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    found = litgpt.open_folder(write_litgpt(tmp_path / "lit", tensors))
    assert found.config.tie_embeddings
    assert "head.weight" not in found.weights


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"sliding_window_size": 4}, {"pattern": "window:4"}),
        (
            {"sliding_window_size": 4, "sliding_window_indices": [0, 1]},
            {"pattern": ["causal", "window:4"]},
        ),
        ({"rotary_percentage": 0.5}, {"rope_dims": 2}),
        ({"rope_condense_ratio": 4}, {"rope_scaling": "linear", "rope_factor": 4.0}),
        (
            {"rope_adjustments": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_seq_len": 16,
            }},
            {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_block_size": 16},
        ),
        ({"attention_scores_scalar": 16}, {"attn_scale": 0.25}),
        ({"final_logit_softcapping": 30.0}, {"logit_softcap": 30.0}),
    ],
)  # fmt: skip
def test_litgpts_settings_are_carried_over(
    tmp_path: Path, changes: dict[str, Any], wanted: dict[str, Any]
) -> None:
    config = litgpt.open_folder(write_litgpt(tmp_path / "lit", **changes)).config
    assert config == litgpt.open_folder(write_litgpt(tmp_path / "lit")).config.replace(**wanted)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_layer": 10**9}, "n_layer is 1000000000, but the weights have 2"),
        ({"parallel_residual": True}, "parallel_residual is True|parallel_residual is true"),
        ({"parallel_residual": None}, "parallel_residual is true"),
        ({"n_expert": 8}, "n_expert is 8, which is not supported"),
        ({"mlp_class_name": "GemmaMLP"}, "mlp_class_name is GemmaMLP"),
        ({"name": "Gemma-2b"}, "name is Gemma-2b"),
        ({"norm_qk": True, "norm_qk_type": "olmo2"}, "norm_qk is true"),
        ({"norm_class_name": "LayerNorm"}, "bias is false with norm_class_name LayerNorm"),
        ({"norm_class_name": "Other"}, "norm is 'Other'"),
        ({"attention_logit_softcapping": 50.0}, "attention_logit_softcapping is 50.0"),
        ({"novelty": 1}, "sets novelty, which is not known"),
        ({"rope_adjustments": {"factor": 2.0, "beta_fast": 32}}, "sets beta_fast"),
        ({"sliding_window_size": 4, "sliding_window_indices": [1]}, "is no list of 2 numbers"),
        ({"rotary_percentage": float("nan")}, "rotary_percentage is nan"),
        ({"padded_vocab_size": 10**30}, "padded_vocab_size is 1000"),
    ],
)
def test_a_setting_of_litgpt_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        litgpt.open_folder(write_litgpt(tmp_path / "lit", **changes))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "is no object of fields"),
        ("", "is no object of fields"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n", "uses aliases"),
        ("a: " + "[" * 20_000, "values 8 deep"),
        ("a: " + "1" * 100_000, "that is no configuration"),
    ],
)
def test_a_yaml_that_is_none(tmp_path: Path, text: str, says: str) -> None:
    folder = write_litgpt(tmp_path / "lit")
    (folder / "model_config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        litgpt.open_folder(folder)
