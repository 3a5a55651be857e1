"""`antiphon bench decode` and `prefill`: tokens per second, beside other programs on the same
weights.

Each subject is a process of its own that opens the model once; rounds go around all of them, with
a probe of the memory before each, so that a slow spell of the machine hits all and shows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.bench.output import (
    COLORS,
    at_least,
    machine_facts,
    machine_line,
    names_of,
    table,
    whole_numbers,
    write_plot,
    write_results,
)
from gpt.bench.subjects import (
    OWN,
    PEERS,
    Subject,
    SubjectError,
    interpreters,
    variable,
    write_weights,
)
from gpt.config import PRESETS, GPTConfig
from gpt.errors import ConfigError

if TYPE_CHECKING:
    from gpt.checkpoint import LoadedModel
    from gpt.model import GPT

PROBE_BYTES = 256 * 2**20
CHECKED = 4
"""Texts of each subject that are gone over with our own float32 model."""

MOST_OFF = {"float32": 0.02, "bfloat16": 0.3}
"""How far below the best a token's logit may lie, in standard deviations of the logits, to be
rounding."""


def configure(parser: argparse.ArgumentParser, *, prompt: int = 128, tokens: int = 33) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--preset", default="gpt2-124m", choices=PRESETS,
        help="shape of the model, with random weights (default: %(default)s)",
    )  # fmt: skip
    which.add_argument("--model", metavar="FOLDER", help="or a model of your own")
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
        "--dtypes", type=names_of(*MOST_OFF), default=list(MOST_OFF), metavar="NAME,NAME",
        help=f"of weights and cache, of {', '.join(MOST_OFF)} (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--peers", default="transformers", metavar="NAME,NAME",
        help=f"programs to compare with, of {', '.join(PEERS)}; one that is not there, or cannot "
        "run this, is left out and named; none for none (default: transformers)",
    )  # fmt: skip
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="NAME=PYTHON",
        help="the interpreter of the virtual environment that has a peer, if it is not in this "
        "one: --peer-python llama.cpp=/opt/llama/bin/python; once for each; or from the "
        "environment, as " + ", ".join(map(variable, PEERS)),
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
        decode, prefill: tokens a second, one number a round; no decode where the texts never all
            ran together after their first tokens.
        share: of the memory's speed beside it that reading the weights once a step takes, by round.
        same: texts that are those of the first subject of this precision.
        off: how far the logit of a token made lies below the best one at most, by our own float32
            model, in standard deviations of the logits.
    """

    subject: str
    dtype: str
    batch: int
    version: str
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    same: int = 0
    off: float = 0.0


def run(args: argparse.Namespace, by: str = "decode") -> int:
    """Measure, print, write.

    Args:
        by: which of the two numbers the plot shows.
    """
    at_least(args, 1, "prompt", "rounds", "threads")
    at_least(args, 2 if by == "decode" else 1, "tokens")
    names = [] if args.peers == "none" else args.peers.split(",")
    peers = interpreters(list(dict.fromkeys(names)), args.peer_python)
    config = None
    if args.model is None:
        config = GPTConfig.preset(args.preset)
        config = config.replace(vocab_size=max(config.vocab_size, 257))
        _check_lengths(args, config)
    import torch

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    loaded = _open(args, config)
    _check_lengths(args, loaded.model.config)
    facts = machine_facts()
    print(machine_line(facts), flush=True)
    results: list[Result] = []
    interrupted = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        left_out = _write(loaded, folder, peers, args.dtypes)
        try:
            for dtype in args.dtypes:
                for row in _measure(args, loaded.model, folder, dtype, peers, left_out):
                    results.append(row)
        except KeyboardInterrupt:
            interrupted = True
            print("stopped here")
    for reason in dict.fromkeys(left_out.values()):
        who = "; ".join(each for each in left_out if left_out[each] == reason)
        print(f"left out: {who}: {reason}")
    for line in show(results):
        print(line)
    if args.json:
        found = [vars(result) for result in results]
        write_results(args.json, by, args, facts, found, interrupted=interrupted, left_out=left_out)
    if args.plot:
        _plot(args.plot, results, by)
    wrong = [row for row in results if row.off > MOST_OFF[row.dtype]]
    for row in wrong:
        print(
            f"{row.subject} in {row.dtype} with {row.batch} texts makes tokens that lie "
            f"{row.off:.2f} below the likeliest: it does not compute this model, or not greedily",
            file=sys.stderr,
        )
    return 130 if interrupted else int(bool(wrong))


def _check_lengths(args: argparse.Namespace, config: GPTConfig) -> None:
    longest = args.prompt + (args.prompt // 2 if max(args.batch) > 1 else 0)
    if longest + args.tokens > config.block_size:
        raise ConfigError(
            f"prompts of up to {longest} tokens and {args.tokens} more do not fit "
            f"into the context of {config.block_size}; lower --prompt or --tokens"
        )


def _open(args: argparse.Namespace, config: GPTConfig | None) -> LoadedModel:
    """The model in float32; one of random weights if there is a config. Its words do not matter, as
    prompts and texts are numbers."""
    import torch

    from gpt.checkpoint import LoadedModel, load_model
    from gpt.model import GPT
    from gpt.tokenizer import Tokenizer

    if config is None:
        given = load_model(args.model)
        return LoadedModel(given.model, Tokenizer.bytes(), given.name, given.path, {})
    torch.manual_seed(args.seed)
    return LoadedModel(GPT(config).eval(), Tokenizer.bytes(), args.preset, Path(), {})


def _write(
    loaded: LoadedModel, folder: Path, peers: dict[str, str], dtypes: list[str]
) -> dict[str, str]:
    """The weights for all; returns who cannot have them, and why."""
    from gpt.checkpoint import save_model
    from gpt.tokenizer import Tokenizer

    # A word for every number that the model can make, as the peers choose among all of them; those
    # need no words at all.
    usable = (code for code in range(ord(" "), 0x110000) if not 0xD800 <= code < 0xE000)
    letters = map(chr, itertools.islice(usable, loaded.model.config.vocab_size - 1))
    save_model(folder / OWN, loaded.model, Tokenizer.chars(letters))
    return write_weights(loaded, folder, peers, dtypes)


def _measure(
    args: argparse.Namespace,
    model: GPT,
    folder: Path,
    dtype: str,
    peers: dict[str, str],
    left_out: dict[str, str],
) -> Iterator[Result]:
    import torch

    threads = torch.get_num_threads()
    probe = torch.zeros(PROBE_BYTES // 4)
    # Each step reads all but the vectors that are looked up.
    item = 4 if dtype == "float32" else 2
    weight_bytes = item * _read_once(model.config)
    with contextlib.ExitStack() as stack:
        subjects = []
        for name in [OWN, *(peer for peer in peers if peer not in left_out)]:
            try:
                subject = Subject(name, peers, folder, dtype, threads)
            except SubjectError as error:
                left_out[f"{name} {dtype}"] = str(error)
                continue
            stack.callback(subject.close)
            subjects.append(subject)
        for batch in args.batch:
            prompts = _prompts(args, batch, min(256, model.config.vocab_size))
            texts: dict[str, list[list[int]]] = {}
            rows = [Result(s.name, dtype, batch, s.version) for s in subjects]
            for round_ in range(args.rounds + 1):  # the first warms up
                for subject, row in zip(subjects, rows, strict=True):
                    if f"{row.subject} {dtype}, {batch} texts" in left_out:
                        continue
                    speed = _read_speed(probe)
                    try:
                        said = subject.ask(prompts=prompts, tokens=args.tokens)
                    except SubjectError as error:
                        left_out[f"{subject.name} {dtype}, {batch} texts"] = str(error)
                        row.prefill.clear()
                        continue
                    times = said["times"]
                    texts[subject.name] = said["texts"]
                    if round_:
                        row.prefill.append(sum(map(len, prompts)) / (times[1] - times[0]))
                    if round_ and len(times) > 2 and times[-1] > times[1]:
                        step = (times[-1] - times[1]) / (len(times) - 2)
                        row.decode.append(batch / step)
                        row.share.append(weight_bytes / step / speed)
            for row in rows:
                if row.prefill:
                    _compare(row, model, prompts, texts)
                    yield row


def _compare(
    row: Result, model: GPT, prompts: list[list[int]], texts: dict[str, list[list[int]]]
) -> None:
    """Note how many texts are those of the first subject, and whether the others are as good."""
    first, own = next(iter(texts.values())), texts[row.subject]
    unlike = [a != b for a, b in zip(first, own, strict=True)]
    row.same = unlike.count(False)
    checked = sorted(range(len(own)), key=lambda i: not unlike[i])[:CHECKED]
    row.off = max(shortfall(model, prompts[i], own[i]) for i in checked)


def shortfall(model: GPT, prompt: list[int], text: list[int]) -> float:
    """How far the logit of one of the text's tokens lies below the best in its place at most, in
    standard deviations of the logits: 0 for a greedy text."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([prompt + text[:-1]]))[0, len(prompt) - 1 :]
        made = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        return float(((logits.amax(-1) - made) / logits.std(-1)).max())


def _prompts(args: argparse.Namespace, batch: int, words: int) -> list[list[int]]:
    """Random ones, of lengths from half to one and a half times `--prompt`."""
    draw = random.Random(args.seed)
    half, n = args.prompt // 2, max(1, batch - 1)
    lengths = [args.prompt - half + 2 * half * i // n for i in range(batch)]
    lengths = [args.prompt] if batch == 1 else lengths
    return [[draw.randrange(words) for _ in range(length)] for length in lengths]


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
    head = [
        "", "texts", "decode tok/s", "(min, max)", "limit", "x", "prefill tok/s", "(min, max)", "x",
        "same", "off",
    ]  # fmt: skip
    rows = []
    for row in results:
        own = next(
            (r for r in results if (r.subject, r.dtype, r.batch) == (OWN, row.dtype, row.batch)),
            None,
        )

        def middle(of: str, row: Result = row) -> float | None:
            found: list[float] = getattr(row, of)
            return statistics.median(found) if found else None

        def ratio(of: str, own: Result | None = own, row: Result = row) -> str:
            if own is None or own is row:
                return ""
            ours, theirs = middle(of, own), middle(of, row)
            return "" if ours is None or theirs is None else f"{ours / theirs:.2f}"

        decode, share = middle("decode"), middle("share")
        rows.append(
            [
                f"{row.subject} {row.version} {row.dtype}",
                str(row.batch),
                "" if decode is None else f"{decode:.1f}",
                "" if decode is None else f"({min(row.decode):.1f}, {max(row.decode):.1f})",
                "" if share is None else f"{share:.0%}",
                ratio("decode"),
                f"{statistics.median(row.prefill):.0f}",
                f"({min(row.prefill):.0f}, {max(row.prefill):.0f})",
                ratio("prefill"),
                f"{row.same}/{row.batch}",
                f"{row.off:.3f}",
            ]
        )
    yield from table(head, rows)
    yield "limit: of the memory's speed, to read the weights once a step; x: ours over theirs"
    yield "off: how far a token's logit lies below the best at most, in standard deviations"


def _plot(path: str, results: list[Result], by: str) -> None:
    from matplotlib.figure import Figure

    results = [row for row in results if getattr(row, by)]
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
