"""What a resumed run must have in common with the run that it goes on with to give its numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import torch

from gpt.native import kernels as native
from gpt.training.module import GPTModule

SETTINGS_KEY = "settings"
"""Where a checkpoint holds `run_settings`."""

ORDER = "the batches are others"
DROPOUT = "the random numbers of dropout are others"
RATE = "the learning rate is another"
DECAY = "the weight decay is another"
STEP = "the steps are others"
ROUNDING = "results may round otherwise"

EFFECTS = {
    "the text's fingerprint": ORDER,
    "the sources' weights": ORDER,
    "data.document_borders": STEP,
    "seed_everything": ORDER,
    "data.block_size": ORDER,
    "blocks per step": ORDER,
    "data.batch_size": ROUNDING,
    "trainer.accumulate_grad_batches": ROUNDING,
    "processes": ROUNDING,
    "model.config.dropout": DROPOUT,
    "model.config.attn_dropout": DROPOUT,
    "model.lora.dropout": DROPOUT,
    "model.optimizer.lr": RATE,
    "model.optimizer.warmup_steps": RATE,
    "model.optimizer.schedule": RATE,
    "model.optimizer.cooldown": RATE,
    "model.optimizer.cooldown_shape": RATE,
    "model.optimizer.min_lr_ratio": RATE,
    "model.optimizer.muon_lr": RATE,
    "model.optimizer.weight_decay_schedule": DECAY,
    "model.optimizer.ema_decay": "the averaged weights are others",
    "trainer.max_steps": RATE,
    "trainer.gradient_clip_val": STEP,
    "trainer.gradient_clip_algorithm": STEP,
    "trainer.precision": ROUNDING,
    "model.compile": ROUNDING,
    "device": ROUNDING,
    "torch": ROUNDING,
    "threads": ROUNDING,
    "kernels": ROUNDING,
}
"""What a change of each setting breaks. Other optimizer settings change the steps."""


def run_settings(trainer: L.Trainer, module: GPTModule) -> dict[str, Any]:
    """All that the numbers of a run depend on beside its state, as plain data."""
    data, config = module.data, module.config
    parts: int = trainer.accumulate_grad_batches
    settings: dict[str, Any] = {
        "the text's fingerprint": str(data.prepared.meta.get("fingerprint"))[:12],
        "the sources' weights": [source.weight for source in data.sources],
        "data.document_borders": data.document_borders,
        "seed_everything": data.seed,
        "data.block_size": data.block_size,
        "blocks per step": data.batch_size * parts * trainer.world_size,
        "data.batch_size": data.batch_size,
        "trainer.accumulate_grad_batches": parts,
        "processes": trainer.world_size,
        "model.config.dropout": config.dropout,
        "model.config.attn_dropout": config.attn_dropout,
        "model.lora.dropout": module.lora.dropout,
        "trainer.max_steps": trainer.max_steps,
        "trainer.gradient_clip_val": trainer.gradient_clip_val,
        "trainer.gradient_clip_algorithm": _plain(trainer.gradient_clip_algorithm),
        "trainer.precision": str(trainer.precision),
        "model.compile": module.compile_model,
        "device": module.device.type,
        "torch": str(torch.__version__),
    }
    for name, value in dataclasses.asdict(module.optimizer_config).items():
        settings[f"model.optimizer.{name}"] = list(value) if isinstance(value, tuple) else value
    if module.device.type == "cpu":
        settings["threads"] = torch.get_num_threads()
        settings["kernels"] = native.instructions()
    return settings


def _plain(setting: Any) -> Any:
    """Lightning makes an enumeration of a name, and a checkpoint is read as plain data only."""
    return getattr(setting, "value", setting)


def broken_exactness(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each setting whose change makes the resumed run another one.

    Args:
        before: `run_settings` of the checkpoint's run.
        now: those of the run that goes on with it.
    """
    lines = []
    # What a run from before there was such a thing did without.
    if "threads" in before:
        before = {"kernels": "none", **before}
    if "model.optimizer.muon_lr" in before:
        before = {"model.optimizer.muon_beta2": 0.0, **before}
    for name in now:
        if name not in before or before[name] == now[name] or _harmless(name, before, now):
            continue
        lines.append(
            f"not exact: {_effect(name, before, now)}, because {name} was {before[name]} and is "
            f"{now[name]}"
        )
    return lines


def _effect(name: str, before: dict[str, Any], now: dict[str, Any]) -> str:
    rates = {settings.get("model.optimizer.schedule") for settings in (before, now)}
    if name == "trainer.max_steps" and rates == {"constant"}:
        return DECAY
    if name == "kernels" and now.get("model.config.dropout"):
        return DROPOUT  # one number is drawn instead of many
    return EFFECTS.get(name, STEP)


def _harmless(name: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    if name == "trainer.max_steps":
        of_length = ("model.optimizer.schedule", "model.optimizer.weight_decay_schedule")
        schedules = {s.get(name, "constant") for s in (before, now) for name in of_length}
        return schedules == {"constant"}
    if name.startswith("model.optimizer.muon_"):
        return "muon" not in (settings.get("model.optimizer.kind") for settings in (before, now))
    if name == "trainer.gradient_clip_algorithm":
        # None and "norm" are the same.
        return {before[name], now[name]} <= {None, "norm"}
    return False
