"""`antiphon bench decode` and `prefill`: tokens per second, beside other programs on the same
weights.

Each subject is a process of its own that opens the model once; rounds go around all of them, with
a probe of the memory before each, so that a slow spell of the machine hits all and shows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpt.bench.output import (
    COLORS,
    at_least,
    machine_facts,
    machine_line,
    table,
    whole_numbers,
    write_plot,
    write_results,
)
from gpt.config import PRESETS, GPTConfig
from gpt.errors import ConfigError

PEERS = {"transformers": "hf_transformers.py", "llama.cpp": "llama_cpp_python.py"}
OWN = "antiphon"
PROBE_BYTES = 256 * 2**20


def configure(parser: argparse.ArgumentParser, *, prompt: int = 128, tokens: int = 33) -> None:
    parser.add_argument(
        "--preset", default="gpt2-124m", choices=PRESETS,
        help="shape of the model, with random weights (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=whole_numbers, default=[1, 32], metavar="N,N",
        help="texts made together (default: 1,32)",
    )  # fmt: skip
    parser.add_argument(
        "--prompt", type=int, default=prompt, metavar="N",
        help="tokens of a prompt; of several from half as many to half as many again "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, default=tokens, metavar="N",
        help="tokens to make of each (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"],
        help="of weights and cache (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--peers", default="transformers", metavar="NAME,NAME",
        help=f"programs to compare with, of {', '.join(PEERS)}; what is not there is left out and "
        "named; none for none (default: transformers)",
    )  # fmt: skip
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="NAME=PYTHON",
        help="the interpreter that has a peer, if it is not this one; also from the environment, "
        "as ANTIPHON_PEER_LLAMA_CPP",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of the CPU (default: as many as torch takes)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--json", metavar="FILE", help="write settings, machine and all numbers into a file"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw them")


@dataclass
class Result:
    """One subject at one number of texts.

    Attributes:
        decode, prefill: tokens a second, one number a round.
        share: of the memory's speed beside it that reading the weights once a step takes, by round.
        same: texts that are those of the first subject of this precision.
    """

    subject: str
    dtype: str
    batch: int
    version: str
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    same: int = 0


class SubjectError(Exception):
    """Why a subject has no numbers."""


class Subject:
    """A process that opens a model and makes texts on demand. Raises SubjectError."""

    def __init__(self, name: str, command: list[str], folder: Path, dtype: str, threads: int):
        self.name, self.dtype = name, dtype
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "0"}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, env=environment,
            )  # fmt: skip
        except OSError as error:
            raise SubjectError(f"{command[0]} does not run: {error.strerror or error}") from None
        try:
            said = self.ask(model=str(folder), dtype=dtype, threads=threads)
        except SubjectError:
            self.close()
            raise
        self.version: str = said["version"]

    def ask(self, **said: Any) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(said) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            assert process.stderr is not None
            lines = process.stderr.read().strip().splitlines() or ["no message"]
            raise SubjectError(f"it ended: {lines[-1][:200]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SubjectError(answer["error"])
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def run(args: argparse.Namespace, by: str = "decode") -> int:
    """Measure, print, write.

    Args:
        by: which of the two numbers the plot shows.
    """
    at_least(args, 1, "prompt", "rounds", "threads")
    at_least(args, 2, "tokens")
    peers = _peers(args)
    import torch

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    config = GPTConfig.preset(args.preset)
    config = config.replace(vocab_size=max(config.vocab_size, 257))
    longest = args.prompt + args.prompt // 2 + args.tokens
    if longest > config.block_size:
        raise ConfigError(
            f"prompts of up to {longest - args.tokens} tokens and {args.tokens} more do not fit "
            f"into the context of {config.block_size}; lower --prompt or --tokens"
        )
    facts = machine_facts()
    print(machine_line(facts))
    results: list[Result] = []
    interrupted = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        left_out = _write_weights(config, folder, args, peers)
        try:
            for dtype in args.dtypes:
                results += _measure(args, config, folder, dtype, peers, left_out)
        except KeyboardInterrupt:
            interrupted = True
            print("stopped here")
    for subject, reason in left_out.items():
        print(f"left out: {subject}: {reason}")
    for line in show(results):
        print(line)
    if args.json:
        found = [vars(result) for result in results]
        write_results(args.json, by, args, facts, found, interrupted=interrupted)
    if args.plot:
        _plot(args.plot, results, by)
    return 130 if interrupted else 0


def _peers(args: argparse.Namespace) -> dict[str, str]:
    """The interpreter of each peer that is asked for. Raises ConfigError."""
    names = [] if args.peers == "none" else args.peers.split(",")
    given = dict(each.split("=", 1) for each in args.peer_python if "=" in each)
    for name in [*names, *given]:
        if name not in PEERS:
            raise ConfigError(f"unknown peer {name!r}; there are {', '.join(PEERS)}, and none")
    if len(given) != len(args.peer_python):
        raise ConfigError("--peer-python must be NAME=PYTHON, once for each name")
    variable = {n: "ANTIPHON_PEER_" + n.upper().replace(".", "_") for n in names}
    return {n: given.get(n) or os.environ.get(variable[n]) or sys.executable for n in names}


def _write_weights(
    config: GPTConfig, folder: Path, args: argparse.Namespace, peers: dict[str, str]
) -> dict[str, str]:
    """The same random weights for all, through our own exporters; returns who has none, and why."""
    import torch

    from gpt.checkpoint import LoadedModel, save_model
    from gpt.errors import UserError
    from gpt.model import GPT
    from gpt.tokenizer import Tokenizer
    from gpt.weights.gguf_export import export_gguf
    from gpt.weights.hf_export import export_folder

    torch.manual_seed(args.seed)
    model = GPT(config).eval()
    # A word for every number that the model can make, as the peers choose among all of them. Those
    # need no words at all.
    letters = map(chr, range(ord(" "), ord(" ") + config.vocab_size - 1))
    save_model(folder / OWN, model, Tokenizer.chars(letters))
    loaded = LoadedModel(model, Tokenizer.bytes(), args.preset, folder, {})
    left_out = {}
    for peer in peers:
        try:
            if peer == "transformers":
                export_folder(loaded, folder / peer)
            else:
                (folder / peer).mkdir()
                for dtype in args.dtypes:
                    kind: Literal["F32", "BF16"] = "F32" if dtype == "float32" else "BF16"
                    export_gguf(loaded, folder / peer / f"model-{kind}.gguf", kind=kind)
        except UserError as error:
            left_out[peer] = str(error)
    return left_out


def _measure(
    args: argparse.Namespace,
    config: GPTConfig,
    folder: Path,
    dtype: str,
    peers: dict[str, str],
    left_out: dict[str, str],
) -> list[Result]:
    import torch

    threads = torch.get_num_threads()
    probe = torch.zeros(PROBE_BYTES // 4)
    # Each step reads all but the vectors that are looked up.
    item = 4 if dtype == "float32" else 2
    weight_bytes = item * _read_once(config)
    results = []
    with contextlib.ExitStack() as stack:
        subjects = []
        for name in [OWN, *(peer for peer in peers if peer not in left_out)]:
            try:
                subject = Subject(name, _command(name, peers), folder / name, dtype, threads)
            except SubjectError as error:
                left_out[f"{name} {dtype}"] = str(error)
                continue
            stack.callback(subject.close)
            subjects.append(subject)
        for batch in args.batch:
            prompts = _prompts(args, batch)
            first: list[list[int]] | None = None
            rows = [Result(s.name, dtype, batch, s.version) for s in subjects]
            for round_ in range(args.rounds + 1):  # the first warms up
                for subject, row in zip(subjects, rows, strict=True):
                    speed = _read_speed(probe)
                    try:
                        said = subject.ask(prompts=prompts, tokens=args.tokens)
                    except SubjectError as error:
                        left_out[f"{subject.name} {dtype}, {batch} texts"] = str(error)
                        row.decode.clear()
                        break
                    times = said["times"]
                    first = first or said["texts"]
                    row.same = sum(a == b for a, b in zip(first, said["texts"], strict=True))
                    if round_:
                        step = (times[-1] - times[1]) / (len(times) - 2)
                        row.decode.append(batch / step)
                        row.prefill.append(sum(map(len, prompts)) / (times[1] - times[0]))
                        row.share.append(weight_bytes / step / speed)
            results += [row for row in rows if row.decode]
    return results


def _command(name: str, peers: dict[str, str]) -> list[str]:
    if name == OWN:
        return [sys.executable, "-m", "serve.decoding"]
    return [peers[name], str(Path(__file__).parent / "peers" / PEERS[name])]


def _prompts(args: argparse.Namespace, batch: int) -> list[list[int]]:
    """Random ones, of lengths from half to one and a half times `--prompt`."""
    draw = random.Random(args.seed)
    half, n = args.prompt // 2, max(1, batch - 1)
    lengths = [args.prompt - half + 2 * half * i // n for i in range(batch)]
    lengths = [args.prompt] if batch == 1 else lengths
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


def _read_once(config: GPTConfig) -> int:
    """Numbers that a decode step reads, whatever the number of texts."""
    from gpt.size import parameter_count

    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    if config.position == "learned":
        looked_up += config.block_size * config.d_model
    return parameter_count(config) - looked_up


def _read_speed(probe: Any) -> float:
    """Bytes a second that all threads read, the best of three."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        probe.sum()
        best = min(best, time.perf_counter() - began)
    return PROBE_BYTES / best


def show(results: list[Result]) -> Iterator[str]:
    """A table; `x` is against the peer's median in the same rounds."""
    head = ["", "texts", "decode tok/s", "(min, max)", "limit", "x", "prefill tok/s", "x", "same"]
    rows = []
    for row in results:
        own = next(
            (r for r in results if (r.subject, r.dtype, r.batch) == (OWN, row.dtype, row.batch)),
            None,
        )
        decode, prefill = statistics.median(row.decode), statistics.median(row.prefill)

        def ratio(of: str, value: float, own: Result | None = own, row: Result = row) -> str:
            if own is None or own is row:
                return ""
            return f"{statistics.median(getattr(own, of)) / value:.2f}"

        rows.append(
            [
                f"{row.subject} {row.version} {row.dtype}",
                str(row.batch),
                f"{decode:.1f}",
                f"({min(row.decode):.1f}, {max(row.decode):.1f})",
                f"{statistics.median(row.share):.0%}",
                ratio("decode", decode),
                f"{prefill:.0f}",
                ratio("prefill", prefill),
                f"{row.same}/{row.batch}",
            ]
        )
    yield from table(head, rows)
    yield "limit: of the memory's speed, to read the weights once a step; x: ours over theirs"


def _plot(path: str, results: list[Result], by: str) -> None:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(f"{row.subject} {row.dtype}" for row in results))
    batches = sorted({row.batch for row in results})
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        own = [row for row in results if f"{row.subject} {row.dtype}" == name]
        at = [batches.index(row.batch) + i * width for row in own]
        heights = [statistics.median(getattr(row, by)) for row in own]
        axes.bar(at, heights, width, label=name, color=COLORS[i % len(COLORS)])
    centre = 0.4 - width / 2
    axes.set_xticks([i + centre for i in range(len(batches))], [str(b) for b in batches])
    axes.set_xlabel("texts made together")
    axes.set_ylabel(f"{by}, tokens per second")
    axes.legend()
    write_plot(path, figure)
