"""A run small enough for a test: a one-layer model on a few kilobytes of text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from gpt.config import GPTConfig
from gpt.training.data import TextDataModule
from gpt.training.module import GPTModule
from gpt.training.optim import OptimizerConfig
from gpt.training.train_cli import TRAINER_DEFAULTS

TEXT = "the king shall speak and my lord will hear what noble thing we say of love and war"


def write_corpus(path: Path, lines: int = 60, seed: int = 0) -> Path:
    pick = random.Random(seed)
    path.write_text("".join(" ".join(pick.choices(TEXT.split(), k=8)) + "\n" for _ in range(lines)))
    return path


def make_module(dropout: float = 0.0, **options: Any) -> GPTModule:
    architecture = {
        "block_size": 16, "n_layer": 1, "n_head": 2, "d_model": 16, "dropout": dropout,
        **options.pop("config", {}),
    }  # fmt: skip
    settings = {"warmup_steps": 2, **options.pop("optimizer", {})}
    return GPTModule(GPTConfig(**architecture), OptimizerConfig(**settings), **options)


def make_data(corpus: Path, **options: Any) -> TextDataModule:
    settings: dict[str, Any] = {
        "tokenizer": "bytes", "batch_size": 4, "root": str(corpus.parent / "data"),
        "block_size": 16, "eval_batch_size": 8, **options,
    }  # fmt: skip
    return TextDataModule(str(corpus), **settings)


def make_trainer(folder: Path, steps: int, callbacks: Any = (), **options: Any) -> L.Trainer:
    saving = any(isinstance(callback, Checkpoint) for callback in callbacks)
    settings: dict[str, Any] = {
        **TRAINER_DEFAULTS, "accelerator": "cpu", "logger": False, "max_steps": steps,
        "enable_progress_bar": False, "default_root_dir": str(folder), "log_every_n_steps": 1,
        "enable_checkpointing": saving,
        "callbacks": list(callbacks), **options,
    }  # fmt: skip
    return L.Trainer(**settings)


def fit(
    folder: Path,
    corpus: Path,
    steps: int,
    callbacks: Any = (),
    *,
    module: GPTModule | None = None,
    data: TextDataModule | None = None,
    ckpt_path: Path | None = None,
    seed: int = 0,
    **options: Any,
) -> GPTModule:
    """Train from the same random numbers each time; the module, with its trainer, comes back."""
    torch.manual_seed(seed)
    module = make_module() if module is None else module
    data = make_data(corpus) if data is None else data
    trainer = make_trainer(folder, steps, callbacks, **options)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module
