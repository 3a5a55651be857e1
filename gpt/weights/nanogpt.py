"""Checkpoints of nanoGPT: one `ckpt.pt` with the model's arguments and its state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.weights.fields import Fields
from gpt.weights.files import Held, load_torch, tensors_of
from gpt.weights.layout import count_layers, gpt2_layout, same, stacked
from gpt.weights.source import Foreign

COMPILED = "_orig_mod."
"""`torch.compile` puts this before every name."""


def is_nanogpt(checkpoint: Any) -> bool:
    return isinstance(checkpoint, dict) and {"model", "model_args"} <= checkpoint.keys()


def open_checkpoint(path: Path) -> Foreign:
    """A checkpoint that nanoGPT's `train.py` wrote. It holds no vocabulary.

    Its GELU is taken to be exact, as in the program since 2023.

    Raises:
        CheckpointError: it is none, or has arguments or tensors that are not known.
    """
    checkpoint = load_torch(path)
    if not is_nanogpt(checkpoint):
        raise CheckpointError(f"{path} is no checkpoint of nanoGPT: it has no model and model_args")
    state = tensors_of(checkpoint["model"], path)
    renamed = {name.removeprefix(COMPILED): tensor for name, tensor in state.items()}
    if len(renamed) != len(state):
        raise CheckpointError(f"{path} has a tensor with and without {COMPILED}")
    tensors = Held(renamed, path)
    config = _config(Fields(checkpoint["model_args"], f"model_args in {path}"), tensors)
    head, embedding = "lm_head.weight", "transformer.wte.weight"
    if {head, embedding} <= renamed.keys() and not same(tensors, head, embedding):
        raise CheckpointError(f"{path}: {head} is not {embedding}, to which nanoGPT ties it")
    masks = r"transformer\.h\.[0-9]+\.attn\.bias|lm_head\.weight"
    layout = gpt2_layout(config, transposed=False)
    origin = {"format": "nanogpt", "family": "gpt2", "source": path.name}
    return Foreign(config, stacked(tensors, layout, str(path), masks), origin=origin)


def _config(fields: Fields, tensors: Held) -> GPTConfig:
    found, claimed = count_layers(tensors, "h"), fields.integer("n_layer")
    if found != claimed:
        fields.refuse("n_layer", f"is {claimed}, but the weights have {found} layers")
    fields.ignore("dropout")
    try:
        config = GPTConfig(
            vocab_size=fields.integer("vocab_size"),
            block_size=fields.integer("block_size"),
            n_layer=claimed,
            n_head=fields.integer("n_head"),
            d_model=fields.integer("n_embd"),
            position="learned",
            norm="layernorm",
            mlp="gelu-exact",
            bias=fields.flag("bias", True),
            qk_norm=False,
            tie_embeddings=True,
        )
    except ConfigError as error:
        raise CheckpointError(f"{fields.where} describes no model: {error}") from None
    fields.finish()
    return config
