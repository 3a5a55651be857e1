"""Hugging Face folders of the GPT-2 and Llama families: `config.json`, weights, vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.tokenizer import Tokenizer
from gpt.weights.fields import read_json, read_text
from gpt.weights.files import open_weights
from gpt.weights.hf_config import read_config
from gpt.weights.layout import count_layers, gpt2_layout, llama_layout, same, stacked
from gpt.weights.source import Foreign, Tensors

CONFIG_FILE = "config.json"
VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "tokenizer_config.json")

_DERIVED = {
    # GPT-2's causal masks and the number that hides, Llama's table of frequencies: older folders
    # have them beside the weights.
    "gpt2": r"(transformer\.)?h\.[0-9]+\.attn\.(bias|masked_bias)",
    "llama": r"(model\.)?layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq",
}


def open_folder(path: Path, *, vocabulary: bool = True) -> Foreign:
    """A folder that `transformers` could load, as a model of ours. Reads no weights yet.

    Args:
        vocabulary: False leaves the tokenizer out: whoever asks has another.

    Raises:
        CheckpointError: a family, setting or tensor that is not supported, or damaged files.
        TokenizerError: a vocabulary that cannot be expressed here.
    """
    values = read_json(path / CONFIG_FILE)
    tensors = open_weights(path)
    gpt2 = values.get("model_type") == "gpt2"
    n_layer = count_layers(tensors, "h" if gpt2 else "layers")
    family, config = read_config(values, str(path / CONFIG_FILE), n_layer)
    return Foreign(
        config,
        _weights(tensors, config, path, gpt2=gpt2),
        open_vocabulary(path) if vocabulary else None,
        chat_template(path),
        {"format": "huggingface", "family": family, "source": path.resolve().name},
    )


def _weights(
    tensors: Tensors, config: GPTConfig, path: Path, *, gpt2: bool
) -> dict[str, Callable[[], Tensor]]:
    prefix, embedding = ("transformer.", "wte") if gpt2 else ("model.", "embed_tokens")
    names = set(tensors.names())
    if f"{prefix}{embedding}.weight" not in names:  # saved without the class that has the head
        prefix = ""
    layout = gpt2_layout(config, prefix) if gpt2 else llama_layout(config, prefix)
    derived, embedding = _DERIVED["gpt2" if gpt2 else "llama"], f"{prefix}{embedding}.weight"
    if config.tie_embeddings and {"lm_head.weight", embedding} <= names:
        if not same(tensors, "lm_head.weight", embedding):
            raise CheckpointError(
                f"{path / CONFIG_FILE} sets tie_word_embeddings, but lm_head.weight is not "
                f"{embedding}; set it to false if the weights are right"
            )
        derived += r"|lm_head\.weight"
    return stacked(tensors, layout, str(path), derived)


def open_vocabulary(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder; None if it has none."""
    if not any((folder / name).is_file() for name in VOCABULARY_FILES[:3]):
        return None
    from gpt.vocab import open_vocabulary as read

    return read(folder)


def chat_template(folder: Path) -> str | None:
    """The Jinja text that lays out a conversation: a file of its own, or in the tokenizer's
    settings. Of several, the one called `default`."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    for name in ("tokenizer_config.json", "chat_template.json"):
        if (folder / name).is_file():
            found = read_json(folder / name).get("chat_template")
            if found is not None:
                return _chosen(found, folder / name)
    return None


def _chosen(found: Any, where: Path) -> str:
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise CheckpointError(f"{where}: chat_template is neither text nor a list with a default")
    return found
