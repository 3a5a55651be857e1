"""What `antiphon inspect` is asked about: a model, a checkpoint, a config or a preset."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gpt.amounts import shown, size
from gpt.arguments import hint
from gpt.config import PRESETS, GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.footprint import Training
from gpt.size import parameter_count
from gpt.training.run import shipped_configs

DEFAULT_BATCH, DEFAULT_BPE = 32, 2048
"""Those of the trainer's data settings, which would cost an import of Lightning."""
UNKNOWN_VOCABULARY = 256


@dataclass(frozen=True)
class Subject:
    """What was asked about.

    Attributes:
        kind: `model`, `checkpoint`, `config` or `preset`.
        training: how it is, or would be, trained.
        facts: what else there is to tell, by name.
        notes: what had to be assumed.
    """

    name: str
    kind: str
    config: GPTConfig
    training: Training
    facts: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def find(given: str) -> Subject:
    """The subject meant by a path, the name of a shipped config, or a preset.

    Raises:
        ConfigError: there is no such thing, or it holds no architecture.
        CheckpointError: a model that cannot be read.
    """
    path = Path(given)
    try:
        if path.is_dir() or path.suffix == ".ckpt":
            return _model(path)
        if path.is_file():
            return _config_file(path)
    except OSError as error:
        raise ConfigError(f"{given[:80]} cannot be read: {error.strerror}") from None
    shipped = shipped_configs()
    name = path.name.removesuffix(".yaml")
    if path.parent == Path() and name in shipped:
        return _config_file(shipped[name])
    if given in PRESETS:
        notes = () if "vocab_size" in PRESETS[given] else (_assumed("a preset", DEFAULT_BPE),)
        config = GPTConfig.preset(given)
        if not config.vocab_size:
            config = config.replace(vocab_size=DEFAULT_BPE)
        return Subject(given, "preset", config, Training(DEFAULT_BATCH), notes=notes)
    names = list(dict.fromkeys([*shipped, *PRESETS]))
    near = hint(given, names) or f"; configs and presets are: {', '.join(names)}"
    raise ConfigError(
        f"there is no model, config or preset {given[:80]!r}: give a model folder, a .ckpt file, a "
        f"YAML file or a name{near}"
    )


def _model(path: Path) -> Subject:
    from gpt.checkpoint import load_model

    loaded = load_model(path, dtype=None)
    tokenizer = loaded.tokenizer
    facts = {"tokenizer": f"{tokenizer.kind}, {tokenizer.n_vocab:,} tokens"}
    facts |= {
        name.replace("_", " "): shown(value)
        for name, value in loaded.training.items()
        if not isinstance(value, dict)
    }
    folder = path / "model" if (path / "model").is_dir() else path
    files = [path] if path.is_file() else sorted(file for file in folder.iterdir())
    for file in files:
        if file.is_file():
            facts[file.name] = size(file.stat().st_size)
    facts["weights are"] = str(loaded.model.dtype).removeprefix("torch.")
    kind = "checkpoint" if path.is_file() else "model"
    return Subject(loaded.name, kind, loaded.model.config, Training(DEFAULT_BATCH), facts)


def _config_file(path: Path) -> Subject:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no settings: it must have model.config, as for training")
    data, trainer, model = (_part(found, name) for name in ("data", "trainer", "model"))
    fields = {each.name for each in dataclasses.fields(GPTConfig)}
    # A training config, the config.json of a model, or an architecture alone.
    init_from = model.get("init_from")
    architecture = _part(model, "config") or (model if fields & set(model) else {})
    if not model and fields & set(found):
        architecture = found
    preset = model.get("preset")
    if init_from is not None:
        architecture = {**_architecture_of(path, str(init_from)), **architecture}
    if not (architecture or preset):
        raise ConfigError(f"{path} describes no model: it has neither model.config nor a preset")
    base = dict(PRESETS[str(preset)]) if preset in PRESETS else {}
    if preset is not None and not base:
        GPTConfig.preset(str(preset))  # which says what there is
    config = GPTConfig.from_dict({**base, **architecture})
    notes: list[str] = []
    if not config.vocab_size:
        config = config.replace(vocab_size=_vocabulary(data, notes))
    optimizer, facts = _part(model, "optimizer"), {}
    if init_from is not None:
        facts["begins with"] = str(init_from)
    adapters = _adapters(config, _part(model, "lora"))
    if adapters is not None:
        facts["trained by LoRA"] = f"{adapters:,} numbers beside {parameter_count(config):,} frozen"
    training = Training(
        batch_size=_number(data, "batch_size", DEFAULT_BATCH),
        eval_batch_size=_number(data, "eval_batch_size", DEFAULT_BATCH),
        precision=str(trainer.get("precision") or "32-true"),
        accumulate=_number(trainer, "accumulate_grad_batches", 1),
        checkpointing=bool(model.get("activation_checkpointing")),
        average=bool(optimizer.get("ema_decay")),
        block_size=_number(data, "block_size", 0) or None,
        adapters=adapters,
        muon=optimizer.get("kind") == "muon" and adapters is None,
    )
    if data.get("source"):
        facts["text"] = shown(data["source"])
    return Subject(
        str(found.get("name") or path.stem), "config", config, training, facts, tuple(notes)
    )


def _architecture_of(path: Path, init_from: str) -> dict[str, Any]:
    """That of the model which a config begins with."""
    from gpt.training.base import open_base

    try:
        return open_base(init_from).model.config.to_dict()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _adapters(config: GPTConfig, settings: dict[str, Any]) -> int | None:
    """Numbers that LoRA trains; None where all of the model is trained."""
    if not settings:
        return None
    from gpt.lora import LoRAConfig, adapter_count  # which needs torch

    known = {each.name for each in dataclasses.fields(LoRAConfig)}
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ConfigError(f"there is no setting lora.{unknown[0]}{hint(str(unknown[0]), known)}")
    lora = LoRAConfig(**settings)
    return adapter_count(config, lora) if lora.on else None


def _part(found: dict[str, Any], name: str) -> dict[str, Any]:
    value = found.get(name)
    return value if isinstance(value, dict) else {}


def _number(found: dict[str, Any], name: str, default: int) -> int:
    value = found.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {str(value)[:40]}, but must be a whole number of at least 1")
    return value


def _vocabulary(data: dict[str, Any], notes: list[str]) -> int:
    """Tokens of the tokenizer that the text will get, so far as that is known before reading it."""
    from gpt.encodings import ENCODINGS

    kind = str(data.get("tokenizer") or "bpe")
    if kind == "bpe":
        return _number(data, "vocab_size", DEFAULT_BPE)
    if kind == "bytes":
        return 257
    if kind in ENCODINGS:
        return ENCODINGS[kind].n_vocab
    notes.append(_assumed(f"the tokenizer {kind}", UNKNOWN_VOCABULARY))
    return UNKNOWN_VOCABULARY


def _assumed(why: str, size: int) -> str:
    return (
        f"the vocabulary of {why} is known once there is text; {size:,} tokens are assumed "
        "(--vocab-size sets it)"
    )
