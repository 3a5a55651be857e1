"""`antiphon inspect MODEL|CONFIG`: how large a model is, what it computes, and what it needs.

Everything is counted from the configuration: nothing is built, so that a model too large for this
machine can be looked at on it.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from gpt.amounts import number, size
from gpt.arguments import CommandParser, examples
from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.flops import flops_per_token
from gpt.footprint import CPU_SLACK, GPU_SLACK, LIBRARIES, Footprint, Training, footprint
from gpt.machine import Memory, gpu_memory, host_memory
from gpt.size import BYTES, kv_bytes_per_token, parameter_count, parts, state_bytes
from gpt.subject import Subject, find

PRECISIONS = ["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true"]


# --- Saying it ----------------------------------------------------------------------------------


def describe(subject: Subject, memory: Memory, gpu: bool) -> dict[str, Any]:
    """Everything as plain data: counts, FLOPs and bytes."""
    config, training = subject.config, subject.training
    if gpu:
        training = dataclasses.replace(training, device="cuda")
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
            "full_context": {name: b * config.block_size for name, b in per_token.items()},
            "convolutions": {name: state_bytes(config, name) for name in per_token},
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
    if gpu:
        training = dataclasses.replace(training, device="cuda")
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
        ("KV, full context", kv_bytes_per_token(config, "bfloat16") // 2 * config.block_size),
    ):
        lines.append(f"  {label:16} {size(4 * count):>9}   {size(2 * count):>9}")
    if config.conv_width:
        both = (size(state_bytes(config, name)) for name in ("float32", "bfloat16"))
        lines.append("  {:16} {:>9}   {:>9}".format("convolutions", *both))
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
