"""`antiphon demo`: the whole way once. Train, measure, sample, serve, call, and compare.

Training and the server are the real commands in processes of their own, so what works here works
when typed by hand; the commands are shown as they are run.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.arguments import CommandParser, examples
from gpt.errors import UserError
from gpt.params import SamplingParams
from gpt.signals import ended_by_signals
from serve.child import child, serving, stop

if TYPE_CHECKING:
    from gpt.checkpoint import LoadedModel

NAME = "demo"
STEPS = 4
SEED = 7
INDENT = "      "


class DemoError(UserError):
    """A step of the demo did not do what it promises."""


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Train a small model, compare it with a baseline, sample from it, serve it,\n"
        "call it over gRPC, and check that the server writes what the local sampler writes.",
        epilog=examples(
            "antiphon demo",
            "antiphon demo --max-steps 50 --no-baseline-check",
            "antiphon demo --source 'notes/*.txt' --prompt 'Dear diary'",
        ),
    )
    add = parser.add_argument
    add("--config", default="shakespeare-tiny", help="config to train (default: %(default)s)")
    add("--source", help="text to train on instead of the config's: a corpus, file, folder or glob")
    add("--max-steps", type=int, help="train for this many steps instead of the config's")
    add("--prompt", default="ROMEO:", help="what the samples go on from (default: %(default)r)")
    add("--tokens", type=int, default=120, help="length of each sample (default: %(default)s)")
    add("--runs-dir", type=Path, default=Path("runs"), help="where the run goes (default: runs)")
    add("--data-root", type=Path, help="where prepared text goes (default: the config's)")
    add(
        "--no-baseline-check",
        action="store_true",
        help="do not fail if the model is no better than the baseline; a short run is not",
    )
    return parser


def main(argv: list[str], prog: str = "antiphon demo") -> int:
    """Run the demo. Returns 0 only if every step did what it promises."""
    args = build_parser(prog).parse_args(argv)
    params = {
        "sampled": SamplingParams(temperature=0.8, max_tokens=args.tokens, seed=SEED),
        "greedy": SamplingParams(temperature=0.0, max_tokens=args.tokens, seed=SEED),
    }
    run = args.runs_dir / NAME
    with ended_by_signals():
        with _step(1, "Train a small model"):
            _train(args)
        with _step(2, "Measure it on text that it has not seen"):
            compare_with_baseline(run, check=not args.no_baseline_check)
        with _step(3, "Sample from it in this process"):
            loaded, greedy = _sample(run / "model", args.prompt, params)
        with _step(4, "Serve it, and call it over gRPC"):
            serve_and_call(loaded, args.prompt, params, greedy)
    _suggest(run / "model", args.prompt)
    return 0


# --- What is shown --------------------------------------------------------------------------------


@contextlib.contextmanager
def _step(number: int, title: str) -> Iterator[None]:
    _say(f"\n[{number}/{STEPS}] {title}", indent="")
    start = time.monotonic()
    yield
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    _say(f"({f'{minutes} min ' if minutes else ''}{seconds} s)")


def _say(text: str, indent: str = INDENT) -> None:
    print(f"{indent}{text}", flush=True)


def _show_text(prompt: str, pieces: Iterable[str]) -> str:
    """Write a prompt and what follows as it comes, set off from our own lines.

    Returns:
        What follows.
    """
    margin = f"{INDENT}| "

    def write(text: str) -> None:
        sys.stdout.write(text.replace("\n", f"\n{margin}"))
        sys.stdout.flush()

    write(f"\n{prompt}")
    made = []
    for piece in pieces:
        made.append(piece)
        write(piece)
    print(flush=True)
    return "".join(made)


def _command(*arguments: str) -> str:
    """How the reader would type an `antiphon` command from here."""
    script = Path(sys.executable).parent / "antiphon"
    on_path = shutil.which("antiphon")
    if on_path is not None and Path(on_path) == script:
        words = ["antiphon"]
    elif script.exists():
        near = os.path.relpath(script)
        words = [str(script) if near.startswith("..") else near]
    else:
        words = [sys.executable, "-m", "gpt"]
    return shlex.join([*words, *arguments])


def _suggest(model: Path, prompt: str) -> None:
    lines = (
        ("more text, here", ("sample", str(model), "--prompt", prompt)),
        ("a server", ("serve", str(model), "--port", "50051")),
        ("and a client", ("generate", "--target", "localhost:50051", "--prompt", prompt)),
        (
            "your own text",
            ("train", "fit", "--config", "shakespeare-tiny", "--data.source", "notes/*.txt",
             "--name", "notes"),
        ),
    )  # fmt: skip
    _say("\nAll of it works. Try next:\n", indent="")
    for what, arguments in lines:
        _say(f"{what + ':':<17} {_command(*arguments)}", indent="  ")


# --- Processes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """An `antiphon` command, which is shown first."""
    _say(f"$ {_command(*arguments)}")
    with child(*arguments) as process:
        yield process


@contextlib.contextmanager
def served(model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port of this machine; gives the process and its address."""
    _say(f"$ {_command('serve', str(model), '--port', '0')}")
    with serving(str(model)) as found:
        yield found


# --- The steps ------------------------------------------------------------------------------------


def _train(args: argparse.Namespace) -> None:
    arguments = ["train", "fit", "--config", args.config, "--name", NAME, "--wandb", "off"]
    arguments += ["--runs_dir", str(args.runs_dir)]
    if args.source is not None:
        arguments += ["--data.source", args.source]
    if args.data_root is not None:
        arguments += ["--data.root", str(args.data_root)]
    if args.max_steps is not None:
        arguments += ["--trainer.max_steps", str(args.max_steps)]
    with _child(*arguments) as process:
        status = process.wait()
    if status:
        raise DemoError(f"training ended with status {status}; its message stands above")


def compare_with_baseline(run: Path, *, check: bool) -> None:
    """Print bits per byte beside those of a byte-level 5-gram model (Kneser-Ney) of the same text.

    Raises:
        DemoError: the model is no better, and that is checked.
    """
    import yaml

    from gpt.data.ngram import ngram_bits_per_byte
    from gpt.data.prepare import prepare

    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["data"]
    data = prepare(
        config["source"],
        tokenizer=config["tokenizer"],
        vocab_size=config["vocab_size"],
        root=config["root"],
        val_fraction=config["val_fraction"],
        progress=False,
    )
    model, baseline = _best_bits_per_byte(run / "metrics.csv"), ngram_bits_per_byte(data)
    _say(f"held-out text: {data.val_bytes:,} bytes; bits needed for each of them:")
    _say(f"{'this model':<30} {model:.3f}")
    _say(f"{'byte-level 5-gram (baseline)':<30} {baseline:.3f}")
    if model < baseline:
        _say(f"the model needs {1 - model / baseline:.0%} less")
    elif check:
        raise DemoError(
            f"the model needs {model:.3f} bits per byte, no fewer than the baseline's "
            f"{baseline:.3f}; train for longer, or pass --no-baseline-check"
        )
    else:
        _say("the model is not better; after so short a training it need not be")


def _best_bits_per_byte(metrics: Path) -> float:
    """That of the validation with the lowest loss, which is the model that was exported."""
    with open(metrics, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/bpb")]
    if not rows:
        raise DemoError(
            f"{metrics} holds no validation (no val/bpb); give the run a few steps more"
        )
    return min(float(row["val/bpb"]) for row in rows)


def _sample(model: Path, prompt: str, params: dict[str, SamplingParams]) -> tuple[LoadedModel, str]:
    """Show a sampled text; returns the model and the greedy text, which is not shown yet."""
    from gpt.checkpoint import load_model
    from gpt.generate import generate

    loaded = load_model(model)
    _say(f"{loaded.name}: {loaded.model.num_params():,} parameters, temperature 0.8, seed {SEED}")

    def pieces(kind: str) -> Iterator[str]:
        for piece in generate(loaded.model, loaded.tokenizer, prompt, params[kind]):
            yield piece.text

    _show_text(prompt, pieces("sampled"))
    return loaded, "".join(pieces("greedy"))


def serve_and_call(
    loaded: LoadedModel, prompt: str, params: dict[str, SamplingParams], greedy: str
) -> None:
    """Stream both texts from a real server and compare the greedy one with the local one.

    Raises:
        DemoError: the texts differ, or the server did not stop cleanly.
    """
    from serve.client import Client

    with served(loaded.path) as (process, address), Client(address) as client:
        _say(f"ready on {address}; what it streams, as it comes:")

        texts = {}
        for kind in ("sampled", "greedy"):
            wanted = params[kind]
            stream = client.stream(
                prompt,
                temperature=wanted.temperature,
                max_tokens=wanted.max_tokens,
                seed=wanted.seed,
            )
            texts[kind] = _show_text(prompt, (delta.text for delta in stream))
            if (end := stream.finish) is None:
                raise DemoError("the stream ended without saying why")
            _say(
                f"\n{INDENT}{kind}: {end.completion_tokens} tokens, "
                f"the first after {1000 * (end.queue_seconds + end.prefill_seconds):.0f} ms, "
                f"the others in {end.decode_seconds:.2f} s",
                indent="",
            )
        streamed = texts["greedy"]
        if streamed != greedy:
            raise DemoError(
                "the server's greedy text is not the local sampler's: "
                f"{json.dumps(streamed)} over gRPC, {json.dumps(greedy)} here"
            )
        _say("the greedy text is, to the letter, what the local sampler writes (float32)")
        client.close()
        if status := stop(process):
            raise DemoError(f"the server ended with status {status} after SIGTERM; it should be 0")
        _say("the server has let go of its port and ended with status 0")
