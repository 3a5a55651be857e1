"""The model that a run begins with: `model.init_from`.

Architecture and tokenizer are that model's. What the command line does not say is taken from it,
what it says otherwise is refused; but dropout belongs to the training, and blocks may be shorter
than the context (`data.block_size`). Weights come from it at the first step only: a checkpoint
holds all of them, so a resumed run does not need it any more.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.checkpoint import LoadedModel, load_model
from gpt.config import GPTConfig
from gpt.encodings import named_tokenizer
from gpt.errors import CheckpointError, ConfigError, TokenizerError
from gpt.lora import LoRAConfig
from gpt.tokenizer import Tokenizer

if TYPE_CHECKING:  # Lightning takes seconds, and `antiphon inspect` reads this
    from gpt.training.data import TextDataModule

FREE = ("dropout", "attn_dropout")
"""Fields of an architecture that a run may have otherwise than the model it begins with."""
FULL_RATE, LORA_RATE = 5e-5, 5e-4
"""Default learning rates: weights that know something are moved less than new ones."""


def open_base(given: str) -> LoadedModel:
    """The model meant by `model.init_from`, with the weights as they are saved.

    Raises:
        CheckpointError: there is none, or it is damaged; what to do is said.
        TokenizerError: the tokenizer beside it is not its own.
    """
    if not Path(given).exists():
        raise CheckpointError(
            f"model.init_from is {given}, but there is no model there: give a model folder, a "
            "run's folder or a .ckpt file (`make smollm2` makes models/smollm2, `antiphon import` "
            "a folder of any model that it can read)"
        )
    return load_model(given, dtype=None)


def defaults_from(base: LoadedModel | None, init_from: str, lora: LoRAConfig) -> dict[str, Any]:
    """Settings of the command line that follow from the model to begin with, by name.

    Args:
        base: None where it is gone; a run's `config.yaml` holds its architecture.
    """
    rate = LORA_RATE if lora.on else FULL_RATE
    found: dict[str, Any] = {"data.tokenizer": init_from, "model.optimizer.lr": rate}
    if base is not None:
        config = base.model.config.to_dict()
        found |= {f"model.config.{name}": value for name, value in config.items()}
    return found


def check_architecture(base: LoadedModel, init_from: str, wanted: GPTConfig) -> None:
    """Raises ConfigError that names each field in which the settings contradict the model."""
    has = base.model.config
    for field in dataclasses.fields(GPTConfig):
        name = field.name
        theirs, ours = getattr(has, name), getattr(wanted, name)
        if name in FREE or theirs == ours or (name == "vocab_size" and ours == 0):
            continue
        hint = "leave it out"
        if name == "block_size" and ours < theirs:
            hint += f"; to train on blocks of {ours} tokens, data.block_size {ours}"
        raise ConfigError(
            f"model.config.{name} is {ours}, but the model in {init_from} has {theirs}; {hint}"
        )


def check_given_tokenizer(data: TextDataModule, init_from: str, tokenizer: Tokenizer) -> None:
    """Raises ConfigError where the data settings ask for other tokens than the model's."""
    given = data.given_tokenizer
    its = f"{tokenizer.kind}, {tokenizer.n_vocab} tokens"
    if given != init_from:
        try:
            other = None if given in ("bpe", "chars") else named_tokenizer(given)
        except TokenizerError:
            other = None
        if other is None or other.fingerprint != tokenizer.fingerprint:
            raise ConfigError(
                f"data.tokenizer is {given}, but the model in {init_from} has its own ({its}); "
                "leave data.tokenizer out"
            )
    new = [name for name in data.special_tokens if name not in tokenizer.special]
    if new:
        raise ConfigError(
            f"data.special_tokens has {new[0]!r}, which the tokenizer of the model in {init_from} "
            f"has not ({its}); it may name {', '.join(map(repr, tokenizer.special)) or 'nothing'}"
        )


def check_block_size(data: TextDataModule, config: GPTConfig, *, begins_with_model: bool) -> None:
    """Raises ConfigError for blocks that the model has no positions for, or that leave a new model
    with positions it never learns."""
    context, block = config.block_size, data.block_size
    if block > context:
        raise ConfigError(
            f"data.block_size is {block}, but the model's context (model.config.block_size) is "
            f"{context} tokens; give at most that"
        )
    if block < context and not begins_with_model:
        raise ConfigError(
            f"data.block_size is {block}, but model.config.block_size {context}: a new model would "
            f"never learn the positions between; set model.config.block_size to {block} (shorter "
            "blocks are for a model from model.init_from)"
        )


def check_same_adapters(saved: LoRAConfig, wanted: LoRAConfig) -> None:
    """Raises CheckpointError where a checkpoint's adapters are not those asked for."""
    for name in ("rank", "alpha", "matrices"):
        theirs, ours = getattr(saved, name), getattr(wanted, name)
        if theirs != ours and (saved.on or wanted.on):
            raise CheckpointError(
                f"model.lora.{name} was {theirs} in the checkpoint's run and is {ours}; give the "
                "config.yaml of that run, or begin a new run with model.init_from and the "
                "checkpoint's path"
            )
