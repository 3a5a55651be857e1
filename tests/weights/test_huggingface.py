"""Logits of imported models are those of `transformers`, which nobody here wrote; and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt.cache import KVCache
from gpt.checkpoint import LoadedModel, load_model, write_folder
from gpt.model import GPT
from gpt.plan import AttentionPlan, Chunk
from gpt.tokenizer import Tokenizer
from gpt.weights.command import read_weights
from gpt.weights.hf_export import export_folder
from gpt.weights.huggingface import open_folder

CONTEXT, TOLERANCE = 48, 1e-4
TOKENIZER = Tokenizer.bytes()

SMALL = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
}  # fmt: skip
GPT2 = {"vocab_size": 300, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 3, "n_head": 4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
# Of 8 pairs, some are stretched, some not, and some in between.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 300}
WIDE = {**SMALL, "head_dim": 16, "rope_theta": 100.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-exact-gelu": ("GPT2", {**GPT2, "activation_function": "gelu", "n_inner": 40}),
    "gpt2-unscaled-untied": (
        "GPT2", {**GPT2, "scale_attn_weights": False, "tie_word_embeddings": False},
    ),
    "llama": ("Llama", SMALL),
    "llama-multi-head-tied": (
        "Llama", {**SMALL, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "llama-wide-heads": ("Llama", {**SMALL, "head_dim": 12, "rms_norm_eps": 1e-3}),
    "llama-attention-bias": ("Llama", {**SMALL, "attention_bias": True}),
    "llama-all-biases": ("Llama", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    "llama-mlp-bias": ("Llama", {**SMALL, "mlp_bias": True}),
    "llama-linear": ("Llama", {**SMALL, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama3": ("Llama", {**SMALL, "rope_theta": 500.0, "rope_scaling": LLAMA3}),
    "llama-yarn": ("Llama", {**WIDE, "rope_scaling": YARN}),
    "llama-yarn-magnitudes": (
        "Llama", {**WIDE, "rope_scaling": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}},
    ),
    "llama-yarn-all-options": (
        "Llama",
        {**WIDE, "rope_scaling": {
            **YARN, "attention_factor": 0.7, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False,
        }},
    ),
    "mistral-window": ("Mistral", {**SMALL, "sliding_window": 7}),
    "mistral-without": ("Mistral", {**SMALL, "sliding_window": None, "rope_theta": 1e6}),
    "mistral-odd-heads": ("Mistral", {
        **SMALL, "hidden_size": 30, "head_dim": 8, "sliding_window": None,
    }),
    "qwen2": ("Qwen2", {**SMALL, "tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {
        **SMALL, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
    }),
    "qwen2-yarn": ("Qwen2", {**WIDE, "rope_scaling": YARN}),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 16}),
    "qwen3-biases-windows": ("Qwen3", {
        **SMALL, "head_dim": 8, "attention_bias": True, "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }),
}  # fmt: skip


def theirs(name: str, seed: int = 0) -> Any:
    """A model of theirs with random weights everywhere, biases and norms too."""
    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**json.loads(json.dumps(settings)))
    torch.manual_seed(seed)
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def ours(folder: Path) -> GPT:
    foreign = open_folder(folder)
    model = GPT(foreign.config).eval()
    state = {name: read() for name, read in foreign.weights.items()}
    if foreign.config.tie_embeddings:
        state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state)
    return model


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


@torch.inference_mode()
def token_by_token(model: GPT, ids: Tensor) -> Tensor:
    """(T, V) logits over a paged cache: a first chunk, then single tokens."""
    page, T = 16, len(ids)
    cache = KVCache(model.config, 1 + -(-T // page), page, dtype=model.dtype)
    tables = [list(range(1, 1 + -(-T // page)))] * len(cache.spec.groups)
    first = max(1, T - 8)
    logits, done = [], 0
    for n in [first, *[1] * (T - first)]:
        plan = AttentionPlan.paged([Chunk(done, n, tables)], page_size=page, pattern=model.pattern)
        logits.append(model(ids[done : done + n], plan, cache))
        done += n
    return torch.cat(logits)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts of 1 token to the whole context, with a cache and without."""
    wanted = theirs(name)
    wanted.save_pretrained(tmp_path)
    model = ours(tmp_path)
    assert model.config.tie_embeddings == wanted.config.tie_word_embeddings
    assert model.num_params() == sum(p.numel() for p in wanted.parameters())
    for length in (1, 2, 13, CONTEXT):
        ids = torch.randint(0, 300, (2, length))
        with torch.inference_mode():
            logits = wanted(ids).logits
            assert close(model(ids), logits)
        assert close(token_by_token(model, ids[0]), logits[0])


@pytest.mark.parametrize("name", ["llama-yarn", "llama-yarn-all-options", "mistral-window", "gpt2"])
def test_a_difference_in_any_setting_is_seen(name: str, tmp_path: Path) -> None:
    """The comparison has teeth: another angle, window, bend or epsilon fails it."""
    wanted = theirs(name)
    wanted.save_pretrained(tmp_path)
    model = ours(tmp_path)
    ids = torch.randint(0, 300, (1, CONTEXT))
    changed = {
        "llama-yarn": {"rope_beta_slow": 2.0},
        "llama-yarn-all-options": {"rope_truncate": True},
        "mistral-window": {"pattern": "window:8"},
        "gpt2": {"mlp": "gelu-exact"},
    }[name]
    other = GPT(model.config.replace(**changed)).eval()
    other.load_state_dict(model.state_dict())
    with torch.inference_mode():
        assert not close(other(ids), wanted(ids).logits)


def imported(folder: Path, out: Path, **changes: Any) -> LoadedModel:
    foreign = open_folder(folder, vocabulary=False)
    write_folder(out, foreign.config, read_weights(foreign), TOKENIZER, **changes)
    return load_model(out, dtype=None)


@pytest.mark.parametrize("name", MODELS)
def test_import_export_import_changes_no_bit(name: str, tmp_path: Path) -> None:
    """T13: what was tied is tied, what was bf16 is bf16; transformers computes the same."""
    wanted = theirs(name).to(torch.bfloat16)
    wanted.save_pretrained(tmp_path / "a")
    first = imported(tmp_path / "a", tmp_path / "b")
    kind = export_folder(first, tmp_path / "c")
    second = imported(tmp_path / "c", tmp_path / "d")
    assert second.model.config == first.model.config
    assert second.model.dtype == torch.bfloat16
    assert (second.model.head.weight is second.model.embed.weight) == (
        wanted.config.tie_word_embeddings
    )
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in "bd")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    read = getattr(transformers, kind).from_pretrained
    source = read(tmp_path / "a", dtype=torch.float32)
    export, info = read(tmp_path / "c", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.randint(0, 300, (1, CONTEXT))
    with torch.inference_mode():
        assert torch.equal(export(ids).logits, source(ids).logits)


@pytest.mark.parametrize("safe", [True, False])
def test_shards_and_pickles_hold_the_same(safe: bool, tmp_path: Path) -> None:
    """Several files with an index; `.bin` as transformers wrote it for years; and links, as the
    hub's cache has them."""
    wanted = theirs("llama-attention-bias")
    wanted.save_pretrained(tmp_path / "a", max_shard_size="40KB")
    shards = sorted((tmp_path / "a").glob("model-*.safetensors"))
    assert len(shards) > 2
    if not safe:
        index = json.loads((tmp_path / "a/model.safetensors.index.json").read_text())
        for i, shard in enumerate(shards):
            torch.save(load_file(shard), tmp_path / "a" / f"pytorch_model-{i}.bin")
        number = {shard.name: f"pytorch_model-{i}.bin" for i, shard in enumerate(shards)}
        index["weight_map"] = {key: number[file] for key, file in index["weight_map"].items()}
        (tmp_path / "a/pytorch_model.bin.index.json").write_text(json.dumps(index))
        (tmp_path / "a/model.safetensors.index.json").unlink()
        for shard in shards:
            shard.unlink()
    (tmp_path / "b").mkdir()
    for file in (tmp_path / "a").iterdir():
        (tmp_path / "b" / file.name).symlink_to(file)
    ids = torch.randint(0, 300, (1, CONTEXT))
    with torch.inference_mode():
        assert close(ours(tmp_path / "b")(ids), wanted(ids).logits)


def test_an_old_gpt2_folder_is_read(tmp_path: Path) -> None:
    """The first checkpoints were saved without the head's class, and with the masks."""
    wanted = theirs("gpt2")
    wanted.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = {
        name.removeprefix("transformer."): value
        for name, value in load_file(file).items()
        if name != "lm_head.weight"
    }
    for i in range(3):
        state[f"h.{i}.attn.bias"] = torch.ones(1, 1, CONTEXT, CONTEXT).tril()
        state[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(state, file)
    ids = torch.randint(0, 300, (1, CONTEXT))
    with torch.inference_mode():
        assert close(ours(tmp_path)(ids), wanted(ids).logits)


def test_a_tied_head_that_is_in_the_file_must_be_the_embedding(tmp_path: Path) -> None:
    theirs("llama-multi-head-tied").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, file)
    assert "head.weight" not in open_folder(tmp_path).weights
    state["lm_head.weight"][3, 3] += 1
    save_file(state, file)
    with pytest.raises(Exception, match=r"tie_word_embeddings, but lm_head\.weight is not"):
        open_folder(tmp_path)
