"""Open a GGUF file as a model of this project."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.tokenizer import Tokenizer
from gpt.weights.gguf_file import GGUFFile
from gpt.weights.gguf_names import FAMILIES, FREQUENCIES, parts, reader
from gpt.weights.gguf_settings import read_config, tokenizer_settings
from gpt.weights.source import Foreign


def open_gguf(path: Path | str) -> Foreign:
    """A GGUF file of the families llama (Llama 2 and 3, SmolLM2, TinyLlama, Mistral), qwen2, qwen3
    and gpt2. Only its header is read; weights are read, and dequantised, when they are asked for.

    Raises:
        CheckpointError: no such file, damaged, or with a setting, tensor or type that is not
            supported; the message names it.
        TokenizerError: a vocabulary that cannot be expressed here.
    """
    file = GGUFFile(path)
    config = read_config(file)
    wanted = parts(config)
    _check_tensors(file, config)
    family = FAMILIES[file.settings["general.architecture"]]
    template = file.settings.get("tokenizer.chat_template")
    return Foreign(
        config,
        {name: reader(pieces, file.read, family.rope_layout) for name, pieces in wanted.items()},
        _tokenizer(file, config),
        template if isinstance(template, str) else None,
        {
            "format": "gguf",
            "family": family.name,
            "name": file.path.name,
            "dtype": _commonest_kind(file),
        },
    )


def _check_tensors(file: GGUFFile, config: GPTConfig) -> None:
    """Raises CheckpointError unless the file has the tensors of this architecture and no others."""
    expected = {part.name: part.shape for pieces in parts(config).values() for part in pieces}
    names = set(file.names())
    for name, shape in expected.items():
        if name not in names:
            raise CheckpointError(f"{file.path}: the tensor {name!r} is missing")
        if file.shape(name) != shape:
            raise CheckpointError(
                f"{file.path}: the tensor {name!r} has the shape {file.shape(name)}, by the "
                f"settings it must be {shape}"
            )
    for name in file.names():
        if name not in expected and name != FREQUENCIES:
            raise CheckpointError(
                f"{file.path}: the tensor {name!r} has no place in this architecture "
                f"({file.settings['general.architecture']}); it is not supported"
            )


def _tokenizer(file: GGUFFile, config: GPTConfig) -> Tokenizer | None:
    try:
        settings = tokenizer_settings(file.settings, config.vocab_size)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    if settings is None:
        return None
    from gpt.vocab import from_gguf

    return from_gguf(settings)


def _commonest_kind(file: GGUFFile) -> str:
    """What the file is called by: the type of most of its matrices."""
    counts = Counter(file.kind(name) for name in file.names() if len(file.shape(name)) > 1)
    return counts.most_common(1)[0][0]
