"""The `antiphon` command: finds the subcommand, imports that one alone, and reports mistakes.

Importing torch takes seconds and gRPC half of one, so nothing here imports either: a subcommand's
module is imported when the subcommand is called. Each is a function `main(argv, prog) -> status`
with its own argparse parser.
"""

from __future__ import annotations

import difflib
import importlib
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpt.errors import UserError

USAGE_ERROR = 2  # what argparse exits with
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
BROKEN_PIPE = 141  # 128 + SIGPIPE: the reader (`| head`) has seen enough


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        target: `module:function` that carries it out.
        help: one line for the overview.
        examples: what one would type first, without the leading `antiphon`.
    """

    target: str
    help: str
    examples: tuple[str, ...]


GROUPS: dict[str, dict[str, Command]] = {
    "Start here": {
        "demo": Command(
            "serve.demo:main",
            "train a small model, sample from it, serve it and call it, in a few minutes",
            ("demo",),
        ),
        "doctor": Command(
            "gpt.doctor.command:main",
            "look at this machine: what is there, what is missing, what to do",
            ("doctor",),
        ),
    },
    "Text": {
        "data": Command(
            "gpt.data.command:main",
            "prepare text for training, and look at what is prepared",
            ("data prepare book.txt",),
        ),
        "tokenize": Command(
            "gpt.tokenize:main",
            "show how a tokenizer cuts a text",
            ("tokenize 'The cat sat.' --tokenizer bytes",),
        ),
    },
    "Train": {
        "train": Command(
            "gpt.training.command:main",
            "train a model on text (fit), or measure one (validate, test)",
            ("train fit --config shakespeare-tiny",),
        ),
        "sweep": Command(
            "gpt.training.sweep:main",
            "train one config with several values of its settings, over several seeds",
            ("sweep shakespeare-tiny --set model.optimizer.lr=1e-3,3e-3 --seeds 3",),
        ),
        "size": Command(
            "gpt.dial:main",
            "derive a model, its learning rates, batch and token budget from its depth",
            ("size 4 6 8",),
        ),
        "eval": Command(
            "gpt.evaluate:main",
            "measure how well a model predicts any text",
            ("eval runs/shakespeare-tiny/model",),
        ),
        "inspect": Command(
            "gpt.inspect:main",
            "count a model's parameters, FLOPs and bytes, and the memory to train it",
            ("inspect shakespeare-tiny",),
        ),
        "report": Command(
            "gpt.training.report:main",
            "make a page of a run, or one that compares several",
            ("report runs/shakespeare-tiny",),
        ),
    },
    "Use a trained model": {
        "sample": Command(
            "gpt.sample:main",
            "write text with a model, here in this process",
            ("sample runs/shakespeare-tiny/model --prompt 'ROMEO:'",),
        ),
        "chat": Command(
            "serve.chat:main",
            "talk with a model that was trained to chat",
            ("chat models/smollm2",),
        ),
        "serve": Command(
            "serve.server:main",
            "answer gRPC requests with a model",
            ("serve runs/shakespeare-tiny/model --port 50051",),
        ),
        "generate": Command(
            "serve.generate:main",
            "ask a running server for text and show it as it comes",
            ("generate --target localhost:50051 --prompt 'ROMEO:'",),
        ),
        "ready": Command(
            "serve.probe:main",
            "wait until a server is serving; for scripts and probes",
            ("ready --target localhost:50051 --timeout 60",),
        ),
        "top": Command(
            "serve.top:main",
            "watch a running server in the terminal",
            ("top localhost:9464",),
        ),
    },
    "Models of other programs": {
        "import": Command(
            "gpt.weights.command:main",
            "make a model folder of a Hugging Face, GGUF, nanoGPT or LitGPT model",
            ("import ~/models/SmolLM2-135M models/smollm2",),
        ),
        "export": Command(
            "gpt.weights.export_command:main",
            "write a model for transformers or llama.cpp",
            ("export models/smollm2 smollm2-hf --format hf",),
        ),
    },
    "Around it": {
        "attention": Command(
            "gpt.show:main",
            "draw an attention pattern, and say what it costs",
            ("attention show window:256+sinks:4",),
        ),
        "bench": Command(
            "gpt.bench.command:main",
            "measure attention patterns, what models remember, and a server under load",
            ("bench attention --lengths 512,1024",),
        ),
        "completion": Command(
            "gpt.completion:main",
            "make a shell complete these commands, their options and files",
            ("completion bash",),
        ),
    },
}

COMMANDS: dict[str, Command] = {
    name: command for group in GROUPS.values() for name, command in group.items()
}


def overview() -> str:
    """What `antiphon --help` prints: the commands by group, then how to begin."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: antiphon COMMAND [options]",
        "",
        "Train GPT language models on your own text and serve them over gRPC.",
    ]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:{width}}  {command.help}" for name, command in commands.items()]
    lines += ["", "Examples:"]
    lines += [f"  antiphon {line}" for command in COMMANDS.values() for line in command.examples]
    lines += [
        "",
        "antiphon help COMMAND (or antiphon COMMAND --help) shows the options of one command;",
        "antiphon --version shows which version this is.",
    ]
    return "\n".join(lines)


def version() -> str:
    """The installed version; a checkout that was never installed has none."""
    from importlib import metadata

    try:
        return metadata.version("antiphon")
    except metadata.PackageNotFoundError:
        return "unknown (not installed; pip install -e . in the checkout installs it)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `antiphon argv…` and return its exit status.

    0 is success, 1 a mistake in what was asked for (one line on stderr says which), 2 a command
    line that cannot be read, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, where a closed pipe is still ours to handle
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        # Python flushes stdout once more on exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(arguments: list[str]) -> int:
    if not arguments:
        print(overview(), file=sys.stderr)
        return USAGE_ERROR
    name, *rest = arguments
    if name == "help" and rest:
        name, rest = rest[0], [*rest[1:], "--help"]
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name in ("-V", "--version", "version"):
        print(f"antiphon {version()}")
        return 0
    if name not in COMMANDS:
        return _unknown(name)
    prog = f"antiphon {name}"
    try:
        return _function(COMMANDS[name].target)(rest, prog)
    except UserError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _function(target: str) -> Callable[[list[str], str], int]:
    module, _, function = target.partition(":")
    found: Callable[[list[str], str], int] = getattr(importlib.import_module(module), function)
    return found


def _unknown(name: str) -> int:
    kind = "option" if name.startswith("-") else "command"
    near = difflib.get_close_matches(name, [*COMMANDS, "help", "--help", "--version"], n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
    print(f"antiphon: error: unknown {kind} {name!r}; {hint}", file=sys.stderr)
    print("antiphon --help shows what there is.", file=sys.stderr)
    return USAGE_ERROR


def _reader_is_gone() -> bool:
    """Whether stdout's reader has closed it (not some pipe between processes of our own)."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
