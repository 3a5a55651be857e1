"""`antiphon inspect MODEL|CONFIG`: how large a model is, what it computes, and what it needs.

Everything is counted from the configuration: nothing is built, so that a model too large for this
machine can be looked at on it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gpt.arguments import CommandParser, examples, hint
from gpt.config import PRESETS, GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.flops import flops_per_token
from gpt.footprint import CPU_SLACK, GPU_SLACK, LIBRARIES, Footprint, Training, footprint
from gpt.machine import Memory, gpu_memory, host_memory
from gpt.size import BYTES, kv_bytes, kv_bytes_per_token, parameter_count, parts
from gpt.training.run import shipped_configs

PRECISIONS = ["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true"]
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


# --- Finding it ---------------------------------------------------------------------------------


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
        name.replace("_", " "): _shown(value)
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
    )
    if data.get("source"):
        facts["text"] = _shown(data["source"])
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


# --- Saying it ----------------------------------------------------------------------------------


def describe(subject: Subject, memory: Memory, gpu: bool) -> dict[str, Any]:
    """Everything as plain data: counts, FLOPs and bytes."""
    config, training = subject.config, subject.training
    flops = flops_per_token(config)
    need = footprint(config, training, slack=GPU_SLACK if gpu else CPU_SLACK)
    n = parameter_count(config)
    per_token = {name: kv_bytes_per_token(config, name) for name in ("float32", "bfloat16")}
    return {
        "name": subject.name,
        "kind": subject.kind,
        "config": config.to_dict(),
        "facts": subject.facts,
        "notes": list(subject.notes),
        "parameters": {
            "total": n,
            "parts": [{**dataclasses.asdict(part), "count": part.count} for part in parts(config)],
        },
        "flops_per_token": {
            "forward": flops.forward,
            "blocks": flops.blocks,
            "attention": flops.attention,
            "head": flops.head,
            "training": flops.training if training.adapters is None else flops.adapting,
        },
        "kv_bytes": {
            "per_token": per_token,
            "full_context": {name: kv_bytes(config, name, config.block_size) for name in per_token},
        },
        "weight_bytes": {name: n * BYTES[name] for name in ("float32", "bfloat16")},
        "training": {
            **dataclasses.asdict(training),
            "memory": dataclasses.asdict(need),
            "libraries": LIBRARIES,
            "needed": need.peak + LIBRARIES,
            "free": memory.free,
            "where": memory.name,
            "fits": need.peak + LIBRARIES <= memory.free,
        },
    }


def text(subject: Subject, memory: Memory, gpu: bool) -> str:
    """The same as a page for people."""
    config, training = subject.config, subject.training
    flops = flops_per_token(config)
    heads = f"{config.n_head} heads of {config.head_width}"
    if config.kv_heads != config.n_head:
        heads += f" over {config.kv_heads} key heads"
    shape = (
        f"{config.n_layer} layers, {heads}, {config.d_model} wide, context {config.block_size}, "
        f"vocabulary {config.vocab_size:,}, {config.position}, {config.norm}, {config.mlp}, "
        f"{config.pattern}"
    )
    forward = (
        f"{number(flops.forward)}: layers {number(flops.blocks)}, attention "
        f"{number(flops.attention)}, head {number(flops.head)}"
    )
    backward = f"{number(flops.training)}: forward, and twice that backward"
    if training.adapters is not None:
        backward = f"{number(flops.adapting)}: the same, the frozen matrices' gradients left out"
    lines = [
        f"{subject.name} ({subject.kind})",
        shape,
        *(f"note: {note}" for note in subject.notes),
        *(f"{name}: {value}" for name, value in subject.facts.items()),
        "",
        *_parameter_table(config),
        "",
        "FLOPs per token of a full context (of matrix products; multiply and add are two)",
        f"  forward   {forward}",
        f"  training  {backward}",
        "",
        "bytes                float32    bfloat16",
    ]
    for label, count in (
        ("weights", parameter_count(config)),
        ("KV, a token", kv_bytes_per_token(config, "bfloat16") // 2),
        ("KV, full context", kv_bytes(config, "bfloat16", config.block_size) // 2),
    ):
        lines.append(f"  {label:16} {size(4 * count):>9}   {size(2 * count):>9}")
    return "\n".join([*lines, "", *_memory_table(config, training, memory, gpu)])


def _parameter_table(config: GPTConfig) -> list[str]:
    total = parameter_count(config)
    rows = [
        (
            part.name,
            " × ".join(f"{n:,}" for n in part.shape) + (f"  × {part.times}" * (part.times > 1)),
            "the embedding's" if part.shared else f"{part.count:,}",
            "" if part.shared else f"{part.count / total:.1%}",
        )
        for part in parts(config)
    ]
    wide = max(len(row[1]) for row in rows)
    lines = [f"{'parameters':22} {'shape':{wide}} {'count':>15}"]
    lines += [f"  {a:20} {b:{wide}} {c:>15}  {d:>6}" for a, b, c, d in rows]
    return [*lines, f"  {'total':20} {'':{wide}} {total:>15,}"]


def _memory_table(config: GPTConfig, training: Training, memory: Memory, gpu: bool) -> list[str]:
    slack = GPU_SLACK if gpu else CPU_SLACK
    need = footprint(config, training, slack=slack)
    length = training.block_size or config.block_size
    blocks = f"{training.batch_size} blocks of {length} tokens"
    if training.accumulate > 1:
        blocks += f", {training.accumulate} times a step"
    how = ", activation checkpointing" if training.checkpointing else ""
    named = [(each.name, getattr(need, each.name)) for each in dataclasses.fields(Footprint)]
    lines = [f"memory of a training step ({blocks}, {training.precision}{how})"]
    lines += [f"  {name:16} {size(count):>9}" for name, count in named if count]
    lines += [
        f"  {'libraries':16} {size(LIBRARIES):>9}",
        f"  {'together about':16} {size(need.peak + LIBRARIES):>9}",
        verdict(config, training, memory, slack=slack),
    ]
    return lines


def verdict(
    config: GPTConfig, training: Training, memory: Memory, *, slack: float, base: int = LIBRARIES
) -> str:
    """Whether the memory is enough, and what to do if it is not.

    Args:
        base: bytes that are needed besides and are not taken yet.
    """
    need = footprint(config, training, slack=slack)
    total = "" if memory.total is None else f" of {size(memory.total)}"
    has = f"{memory.name} has {size(memory.free)}{total} free"
    if need.peak + base <= memory.free:
        return f"fits: {has}"
    room = memory.free - base
    gradients = need.optimizer // 2
    if need.weights + gradients + need.optimizer + need.average > room:
        smaller = "a smaller model.config"
        if training.weight_bytes > 2:
            smaller += ", or trainer.precision bf16-true"
        return (
            f"does not fit: {has}; weights, gradients and optimizer alone are too many: {smaller}"
        )

    def fitting(checkpointing: bool) -> Training | None:
        """The same steps in as few parts as fit."""
        tried = dataclasses.replace(training, checkpointing=checkpointing)
        while footprint(config, tried, slack=slack).peak > room:
            if tried.batch_size == 1:
                return None
            half = -(-tried.batch_size // 2)
            tried = dataclasses.replace(
                tried, batch_size=half, eval_batch_size=half, accumulate=2 * tried.accumulate
            )
        return tried

    ways = dict.fromkeys([training.checkpointing, True])
    found = [tried for way in ways if (tried := fitting(way)) is not None]
    options = [_changes(training, tried) for tried in found]
    advice = ", or ".join(options) or "a smaller model.config.block_size or model"
    return f"does not fit: {has}; use {advice}"


def _changes(now: Training, then: Training) -> str:
    """The settings that lead from one to the other."""
    said = []
    if then.checkpointing != now.checkpointing:
        said.append(f"model.activation_checkpointing {str(then.checkpointing).lower()}")
    if then.batch_size != now.batch_size:
        said.append(f"data.batch_size and data.eval_batch_size {then.batch_size}")
        said.append(f"trainer.accumulate_grad_batches {then.accumulate}")
    return " with ".join(said)


def size(count: float) -> str:
    """Bytes for people."""
    for unit, each in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= each:
            return (
                f"{count / each:.3g} {unit}"
                if count < 999.5 * each
                else f"{count / each:.0f} {unit}"
            )
    return f"{count:.0f} B"


def number(count: float) -> str:
    """FLOPs for people."""
    for unit, each in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= each:
            return f"{count / each:.3g} {unit}FLOP"
    return f"{count:.0f} FLOP"


def _shown(value: Any) -> str:
    """A value as a person would write it, without braces and quotes."""
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_shown(each)}" for name, each in value.items())
    if isinstance(value, list):
        return (
            "; ".join(map(_shown, value))
            if any(isinstance(each, dict) for each in value)
            else (", ".join(map(_shown, value)) or "none")
        )
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


# --- Command ------------------------------------------------------------------------------------


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Count a model's parameters, FLOPs and bytes, and estimate the memory that "
        "training it takes,\nbefore anything is built.",
        epilog=examples(
            f"{prog} shakespeare-tiny",
            f"{prog} runs/shakespeare-tiny/model --json",
            f"{prog} gpt2-355m --batch-size 8 --precision bf16-mixed",
        ),
    )
    parser.add_argument(
        "subject",
        metavar="MODEL|CONFIG",
        help="a model or run folder, a .ckpt file, a training config (YAML, or the name of a "
        "shipped one), or a preset",
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="size of the vocabulary")
    parser.add_argument("--block-size", type=int, metavar="N", help="context length in tokens")
    parser.add_argument("--batch-size", type=int, metavar="N", help="blocks per forward")
    parser.add_argument("--precision", choices=PRECISIONS, help="of the training")
    parser.add_argument(
        "--activation-checkpointing",
        action="store_true",
        help="estimate the memory with blocks computed again for the gradients",
    )
    parser.add_argument("--json", action="store_true", help="print plain data")
    return parser


def main(argv: list[str], prog: str = "antiphon inspect") -> int:
    """Print what there is to know of a model.

    Raises:
        ConfigError: nothing of that name, or an architecture that cannot be.
        CheckpointError: a model that cannot be read.
    """
    given = build_parser(prog).parse_args(argv)
    for name in ("vocab_size", "block_size", "batch_size"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, but must be at least 1")
    subject = find(given.subject)
    changes = {
        name: value
        for name in ("vocab_size", "block_size")
        if (value := getattr(given, name)) is not None
    }
    training = subject.training
    if given.batch_size is not None:
        training = dataclasses.replace(
            training, batch_size=given.batch_size, eval_batch_size=given.batch_size
        )
    if given.precision is not None:
        training = dataclasses.replace(training, precision=given.precision)
    if given.activation_checkpointing:
        training = dataclasses.replace(training, checkpointing=True)
    subject = dataclasses.replace(
        subject,
        config=subject.config.replace(**changes),
        training=training,
        notes=() if "vocab_size" in changes else subject.notes,
    )
    gpu = gpu_memory()
    memory = gpu or host_memory()
    if given.json:
        print(json.dumps(describe(subject, memory, gpu is not None), indent=2))
    else:
        print(text(subject, memory, gpu is not None))
    return 0
