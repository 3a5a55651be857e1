"""Open and save models: the model folder, and Lightning checkpoints.

A model folder is self-contained; sampling and serving need nothing else:

    config.json         format, name, architecture, the tokenizer's fingerprint, how it was trained
    model.safetensors   the weights; a tied head is stored once
    tokenizer.json      the vocabulary
    chat_template.jinja how a conversation is laid out as text, if the model was taught one

A Lightning checkpoint carries the same under its key `antiphon`, and the weights under `gpt.*`; the
adapters of a run with LoRA are added to them as it is read.
Both are read as data only: no pickle is ever executed.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError, TokenizerError
from gpt.lora import LoRAConfig, merged
from gpt.model import GPT
from gpt.tokenizer import Tokenizer

FORMAT = "antiphon-model/1"
CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "config.json", "model.safetensors", "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
MAX_CHAT_TEMPLATE = 1 << 20
"""Bytes. The longest in use have some tens of thousands."""
PAYLOAD_KEY = "antiphon"
"""Where a Lightning checkpoint holds `checkpoint_payload`."""
WEIGHTS_PREFIX = "gpt."
"""What the LightningModule calls its GPT."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, in eval mode.

    Attributes:
        name: what it calls itself: the run's name, or the folder's.
        training: how it was trained, as recorded; empty if nothing was.
        chat_template: the Jinja text that lays out a conversation; None: the model has none. It is
            as much a stranger's as the rest of the folder.
    """

    model: GPT
    tokenizer: Tokenizer
    name: str
    path: Path
    training: dict[str, Any]
    chat_template: str | None = None


def load_model(
    path: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = torch.float32,
) -> LoadedModel:
    """Open a model folder, a run folder that holds one under `model/`, or a Lightning checkpoint.

    Args:
        dtype: to convert the weights to; None keeps the saved one (of several, the one that holds
            them all).

    Raises:
        CheckpointError: not there, damaged, or of another kind.
        TokenizerError: the tokenizer in it is not the one the model was trained with.
    """
    path = Path(path)
    try:
        there = path.exists()
    except (OSError, ValueError):  # a name too long, a NUL in it
        there = False
    if not there:
        raise CheckpointError(
            f"no model at {path}: give a model folder (with {CONFIG_FILE}) or a Lightning "
            "checkpoint (.ckpt); `fit` writes both into its run folder"
        )
    name = path.resolve().name
    chat_template = None
    try:
        if path.is_file():
            payload, state = _read_checkpoint(path)
            tokenizer = Tokenizer.from_dict(payload["tokenizer"])
            name = path.stem
            template = payload.get("chat_template")
            chat_template = template if isinstance(template, str) else None
        else:
            folder = path if (path / CONFIG_FILE).exists() else path / "model"
            payload, state = _read_folder(folder, path)
            tokenizer = Tokenizer.load(folder / TOKENIZER_FILE)
            chat_template = _read_chat_template(folder / CHAT_TEMPLATE_FILE)
        dtype = dtype or _common_dtype(state)
        model = _build(GPTConfig.from_dict(payload["model"]), state, payload.get("lora"), dtype)
        check_tokenizer(tokenizer, payload["tokenizer_fingerprint"], model.config)
    except ConfigError as error:
        raise CheckpointError(f"{path} does not describe a model: {error}") from None
    except KeyError as error:
        raise CheckpointError(f"{path} does not describe a model: {error} is missing") from None
    except (TypeError, AttributeError, ValueError):
        raise CheckpointError(
            f"{path} does not describe a model: a part of it is no object"
        ) from None
    return LoadedModel(
        model.to(device=device, dtype=dtype).eval(),
        tokenizer,
        _printable(payload.get("name")) or name,
        path,
        training if isinstance(training := payload.get("training"), dict) else {},
        chat_template,
    )


def save_model(
    folder: Path | str,
    model: GPT,
    tokenizer: Tokenizer,
    *,
    name: str | None = None,
    training: dict[str, Any] | None = None,
    chat_template: str | None = None,
) -> None:
    """Write a model folder; it appears whole or not at all. An earlier one is replaced.

    Args:
        name: what the model calls itself; None: the folder's name.
        training: plain data on how it was trained, for the record.
        chat_template: the Jinja text that lays out a conversation.

    Raises:
        CheckpointError: the folder holds something else, or the disk refuses.
    """
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    if model.config.tie_embeddings:
        del state["head.weight"]
    write_folder(
        folder, model.config, state, tokenizer,
        name=name, training=training, chat_template=chat_template,
    )  # fmt: skip


def write_folder(
    folder: Path | str,
    config: GPTConfig,
    state: dict[str, Tensor],
    tokenizer: Tokenizer,
    *,
    name: str | None = None,
    training: dict[str, Any] | None = None,
    chat_template: str | None = None,
) -> None:
    """`save_model` from weights alone, for those who have no GPT.

    Args:
        state: contiguous CPU tensors by their names in `GPT.state_dict()`, without `head.weight`
            when it is the embedding.

    Raises:
        CheckpointError: as `save_model`.
    """
    folder = Path(folder)
    described = {
        "format": FORMAT,
        "name": name or folder.resolve().name,
        "model": config.to_dict(),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "training": training or {},
    }

    def fill(new: Path) -> None:
        save_file(state, new / WEIGHTS_FILE, metadata={"format": "pt"})
        tokenizer.save(new / TOKENIZER_FILE)
        (new / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        # safetensors lets nobody but the owner read what it writes.
        shutil.copymode(new / CONFIG_FILE, new / WEIGHTS_FILE)
        if chat_template is not None:
            (new / CHAT_TEMPLATE_FILE).write_bytes(chat_template.encode())

    replace_folder(folder, fill)


def check_replaceable(folder: Path) -> None:
    """Raises CheckpointError if the folder holds something else than a model."""
    if folder.exists() and (not folder.is_dir() or _foreign(folder)):
        raise CheckpointError(f"{folder} exists and is no model folder; choose another place")


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Put a new folder, which `fill` writes into, at the place of an earlier model, if there is
    one. It appears whole or not at all.

    Raises:
        CheckpointError: the place holds something else than a model, or the disk refuses.
    """
    check_replaceable(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            new, old = Path(scratch) / "new", Path(scratch) / "old"
            new.mkdir()
            fill(new)
            for file in new.iterdir():
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write {folder}: {reason}") from None


def checkpoint_payload(
    config: GPTConfig,
    tokenizer: Tokenizer,
    *,
    name: str | None = None,
    lora: LoRAConfig | None = None,
    chat_template: str | None = None,
) -> dict[str, Any]:
    """What makes a Lightning checkpoint self-contained: plain data, `weights_only` loads it.

    Args:
        lora: of the adapters among the weights; None: there are none.
        chat_template: that of the model the training began with.
    """
    others = {"lora": None if lora is None else lora.to_dict(), "chat_template": chat_template}
    return {
        "format": FORMAT,
        "name": name,
        "model": config.to_dict(),
        "tokenizer": tokenizer.to_dict(),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        **{key: value for key, value in others.items() if value is not None},
    }


def check_tokenizer(tokenizer: Tokenizer, fingerprint: str, config: GPTConfig) -> None:
    """Raises TokenizerError unless this is the tokenizer that the model was trained with."""
    if tokenizer.fingerprint != fingerprint:
        raise TokenizerError(
            f"the tokenizer is not the model's: its fingerprint is {tokenizer.fingerprint[:12]} "
            f"({tokenizer.kind}, {tokenizer.n_vocab} tokens), the model was trained with "
            f"{fingerprint[:12]}; use the tokenizer.json that was saved with the model"
        )
    if tokenizer.n_vocab > config.vocab_size:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.n_vocab} tokens but the model's vocabulary only "
            f"{config.vocab_size}"
        )


def _printable(name: Any) -> str:
    """A name as it can stand on a line of a log; empty if there is none."""
    text = name if isinstance(name, str) else ""
    return "".join(char if char.isprintable() else "?" for char in text[:200])


def _foreign(folder: Path) -> bool:
    """Whether a folder has something in it and is no model of ours. (Other programs' model folders
    have a file of that name, too.)"""
    if not any(folder.iterdir()):
        return False
    try:
        values = json.loads((folder / CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return True
    found = values.get("format") if isinstance(values, dict) else None
    return not (isinstance(found, str) and found.startswith(FORMAT.partition("/")[0]))


def _read_folder(folder: Path, given: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{given} is no model folder: it has no {CONFIG_FILE}")
    for file in (WEIGHTS_FILE, TOKENIZER_FILE):
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder} is incomplete: it has no {file}")
    try:
        payload = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / CONFIG_FILE}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:200]
        raise CheckpointError(f"{folder / CONFIG_FILE} is not JSON: {reason}") from None
    payload = _check_format(payload, folder / CONFIG_FILE)
    try:
        return payload, load_file(folder / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / WEIGHTS_FILE} cannot be read: {error}") from None


def _read_chat_template(file: Path) -> str | None:
    try:
        if not file.exists():
            return None
        if file.stat().st_size > MAX_CHAT_TEMPLATE:
            raise CheckpointError(f"{file} has over {MAX_CHAT_TEMPLATE >> 20} MiB")
        return file.read_bytes().decode()  # line ends as they are
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def _common_dtype(state: dict[str, Tensor]) -> torch.dtype | None:
    """The one dtype that can hold all weights: folders of other formats may mix them."""
    found = {value.dtype for value in state.values() if value.is_floating_point()}
    return functools.reduce(torch.promote_types, found) if len(found) > 1 else None


def _read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is no checkpoint: give a model folder, or a .ckpt file that `fit` wrote"
        )
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # torch.load fails in as many ways as there are files that are no checkpoint; all mean the same.
    except Exception as error:  # noqa: BLE001
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path} is no readable checkpoint: {reason[0]}") from None
    found = checkpoint.get(PAYLOAD_KEY) if isinstance(checkpoint, dict) else None
    payload = _check_format(found, path)
    state = {
        key.removeprefix(WEIGHTS_PREFIX): value
        for key, value in checkpoint["state_dict"].items()
        if key.startswith(WEIGHTS_PREFIX)
    }
    return payload, state


def _check_format(payload: Any, path: Path) -> dict[str, Any]:
    found = payload.get("format") if isinstance(payload, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"{path} was not written by Antiphon, or by another version: its format is "
            f"{repr(found)[:60]}, "
            f"this version reads {FORMAT!r}"
        )
    return dict(payload)


class _NoInit(TorchFunctionMode):
    """Leaves out `normal_`: on the meta device there is nothing to fill, and the call alone makes
    torch load 800 modules, which doubled the time to open a small model."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ == "normal_":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _build(
    config: GPTConfig,
    state: dict[str, Tensor],
    lora: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> GPT:
    """A GPT with these weights. Built without memory first: random weights would be thrown away.

    Args:
        lora: settings of the adapters among the weights, which are merged.
        dtype: of what is merged.
    """
    for key, value in state.items():
        # Sparse, meta and expanded tensors can claim any size without having it.
        dense = value.layout is torch.strided and not value.is_meta and value.is_contiguous()
        if not (dense and value.is_floating_point()):
            raise CheckpointError(
                f"the weights are damaged: {key[:80]} is no plain array of floats"
            )
    if lora is not None:
        state = merged(state, LoRAConfig.from_dict(lora), dtype)
    layers = {key.split(".")[1] for key in state if key.startswith("blocks.")}
    if len(layers) != config.n_layer:  # before building: a damaged number could be any size
        raise CheckpointError(
            f"the configuration has {config.n_layer} layers, the weights have {len(layers)}"
        )
    try:
        with torch.device("meta"), _NoInit():
            model = GPT(config)
    except (RuntimeError, OverflowError):  # not even a meta tensor may have that many elements
        raise CheckpointError(
            "the configuration asks for larger matrices than there can be"
        ) from None
    if config.tie_embeddings and "embed.weight" in state:
        state.setdefault("head.weight", state["embed.weight"])
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        # The first line only says that there are errors; the second names the first.
        lines = [line.strip()[:200] for line in str(error).splitlines()]
        raise CheckpointError(
            f"the weights do not fit the architecture: {lines[1] if len(lines) > 1 else lines[0]}"
        ) from None
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    return model
