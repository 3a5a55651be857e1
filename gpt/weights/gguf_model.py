"""Open a GGUF file as a model of this project."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gpt.errors import CheckpointError
from gpt.tokenizer import Tokenizer
from gpt.weights.gguf_file import GGUFFile
from gpt.weights.gguf_names import FAMILIES, FREQUENCIES, Halves, gguf_layout
from gpt.weights.gguf_settings import read_config
from gpt.weights.gguf_vocabulary import without_padding
from gpt.weights.layout import stacked
from gpt.weights.source import Foreign


def open_gguf(path: Path | str, *, vocabulary: bool = True) -> Foreign:
    """A GGUF file of the families llama (Llama 2 and 3, SmolLM2, TinyLlama, Mistral), qwen2, qwen3
    and gpt2. Only its header is read; weights are read, and dequantised, when they are asked for.

    Args:
        vocabulary: False leaves the tokenizer out: whoever asks has another.

    Raises:
        CheckpointError: no such file, damaged, or with a setting, tensor or type that is not
            supported; the message names it.
        TokenizerError: a vocabulary that cannot be expressed here.
    """
    file = GGUFFile(path)
    config = read_config(file)
    family = FAMILIES[file.settings["general.architecture"]]
    template = file.settings.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{file.path}: tokenizer.chat_template is no text")
    return Foreign(
        config,
        stacked(
            Halves(file, config, family.rope_layout),
            gguf_layout(config),
            str(file.path),
            FREQUENCIES.replace(".", r"\."),
        ),
        _tokenizer(file, config.vocab_size) if vocabulary else None,
        template,
        {
            "format": "gguf",
            "family": family.name,
            "name": file.path.name,
            "dtype": _commonest_kind(file),
        },
    )


def _tokenizer(file: GGUFFile, rows: int) -> Tokenizer | None:
    """None if the file has none, as that of a model without text has."""
    if file.settings.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return None
    tokens = file.settings.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or len(tokens) > rows:
        n = len(tokens) if isinstance(tokens, list) else "no"
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.tokens has {n} tokens, the embedding {rows} rows"
        )
    from gpt.vocab import from_gguf

    return from_gguf(without_padding(file.settings))


def _commonest_kind(file: GGUFFile) -> str:
    """What the file is called by: the type of most of its matrices."""
    counts = Counter(file.kind(name) for name in file.names() if len(file.shape(name)) > 1)
    return counts.most_common(1)[0][0]
