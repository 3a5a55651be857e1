"""The `antiphon size` command: depth is the one dial, and all else follows from it.

Width grows with depth, as in nanochat; how much text a model is worth, how large a step should be
and how fast it may learn follow from the width by published rules, each named where it is used.
They are places to begin: what was measured here is in docs/guide/recipes.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpt.amounts import number
from gpt.arguments import CommandParser, examples
from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.files import write_atomically
from gpt.flops import flops_per_token
from gpt.size import matrix_count, parameter_count

ASPECT, HEAD = 64, 64
"""Width of the stream per layer, and of a head."""

TOKENS_PER_PARAMETER = 20
"""Of a budget that spends FLOPs best (Hoffmann et al., arXiv 2203.15556), over the matrices that
tokens are multiplied with."""

REFERENCE_WIDTH, REFERENCE_RATE, MUON_RATE = 128, 6e-3, 0.01
"""Where the rates were found. Muon's steps have the same effect at any width (their size follows
the shape of the matrix; Yang et al., arXiv 2310.17813), so its rate stays; AdamW's falls with the
root of the width, as in nanochat."""

BATCH_SCALE, BATCH_POWER = 0.292, 0.3271
"""Tokens of a step for C FLOPs of training: 0.292 C^0.3271 (DeepSeek LLM, arXiv 2401.02954)."""

WARM_SHARE, LARGEST_PART = 0.02, 32


@dataclass(frozen=True)
class Dial:
    """A model and its training, by depth.

    Attributes:
        tokens: the budget, what `steps` come to.
        blocks: of block_size tokens in a step.
    """

    config: GPTConfig
    tokens: int
    blocks: int
    steps: int
    lr: float
    muon_lr: float

    @property
    def batch_tokens(self) -> int:
        return self.blocks * self.config.block_size

    @property
    def flops(self) -> float:
        return flops_per_token(self.config).training * self.tokens

    @property
    def name(self) -> str:
        return f"depth-{self.config.n_layer}"

    def to_training(self, source: str, tokenizer: str) -> dict[str, Any]:
        """The settings as `fit --config` takes them."""
        config = self.config
        parts = max(1, self.blocks // LARGEST_PART)
        every = max(1, self.steps // 10) * parts
        data: dict[str, Any] = {"source": source, "tokenizer": tokenizer}
        if tokenizer == "bpe":
            data["vocab_size"] = config.vocab_size
        return {
            "name": self.name,
            "data": {**data, "batch_size": self.blocks // parts},
            "model": {
                "config": {
                    "n_layer": config.n_layer, "n_head": config.n_head, "d_model": config.d_model,
                    "block_size": config.block_size, "tie_embeddings": config.tie_embeddings,
                },
                "optimizer": {
                    "kind": "muon", "lr": self.lr, "muon_lr": self.muon_lr,
                    "warmup_steps": max(1, round(WARM_SHARE * self.steps)),
                },
            },
            "trainer": {
                "max_steps": self.steps,
                "accumulate_grad_batches": parts,
                "val_check_interval": every,
            },
        }  # fmt: skip


def dial(
    depth: int,
    vocab_size: int,
    block_size: int = 256,
    tokens: int | None = None,
    aspect: int = ASPECT,
) -> Dial:
    """All that follows from a depth.

    Args:
        depth: layers.
        tokens: the budget; None: 20 for each number in a matrix.
        aspect: width per layer; the width is that times depth, up to whole heads.

    Raises:
        ConfigError: names what is out of range.
    """
    for name, value in (
        ("depth", depth), ("vocab-size", vocab_size), ("block-size", block_size),
        ("tokens", tokens), ("aspect", aspect),
    ):  # fmt: skip
        if value is not None and not 1 <= value <= 10**15:
            raise ConfigError(f"{name} is {value}, but must be at least 1 (and at most 10^15)")
    head = HEAD if depth * aspect >= 4 * HEAD else HEAD // 2
    heads = max(1, math.ceil(depth * aspect / head))
    width = heads * head
    config = GPTConfig(
        vocab_size=vocab_size, block_size=block_size, n_layer=depth, n_head=heads, d_model=width,
        tie_embeddings=False,
    )  # fmt: skip
    budget = TOKENS_PER_PARAMETER * matrix_count(config) if tokens is None else tokens
    wanted = BATCH_SCALE * (flops_per_token(config).training * budget) ** BATCH_POWER
    # A power of two, which machines like; a step is never more than the budget.
    blocks = 2 ** max(0, round(math.log2(max(1.0, min(wanted, budget) / block_size))))
    steps = max(1, round(budget / (blocks * block_size)))
    rate = REFERENCE_RATE * math.sqrt(REFERENCE_WIDTH / width)
    return Dial(config, steps * blocks * block_size, blocks, steps, float(f"{rate:.2g}"), MUON_RATE)


# --- The command --------------------------------------------------------------------------------


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog,
        description="Derive a model, its learning rates, its batch and its token budget from its "
        "depth: one dial.",
        epilog=examples(
            f"{prog} 4 6 8",
            f"{prog} 6 --aspect 32 --tokens 20000000",
            f"{prog} 6 --source 'texts/*.txt' --write mine.yaml",
        ),
    )
    parser.add_argument("depth", nargs="+", metavar="DEPTH", help="layers")
    parser.add_argument(
        "--aspect", type=int, default=ASPECT, metavar="N",
        help=f"width per layer (default: {ASPECT}; small models on a CPU do well with 32)",
    )  # fmt: skip
    parser.add_argument(
        "--vocab-size", type=int, default=2048, metavar="N", help="of the tokenizer (default: 2048)"
    )
    parser.add_argument(
        "--block-size", type=int, default=256, metavar="N", help="context in tokens (default: 256)"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="budget (default: 20 for each number in a matrix)"
    )
    parser.add_argument(
        "--source", default="shakespeare", metavar="SOURCE", help="text (default: shakespeare)"
    )
    parser.add_argument(
        "--tokenizer", default="bpe", metavar="NAME", help="bpe, bytes, chars, … (default: bpe)"
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="YAML",
        help="write the config of one depth, to be given to fit",
    )
    return parser


def main(argv: Sequence[str], prog: str) -> int:
    """Print what follows from each depth; write the config if asked.

    Raises:
        ConfigError: a number out of range, or a file that is there already.
    """
    args = build_parser(prog).parse_args(argv)
    found = [
        dial(_depth(given), args.vocab_size, args.block_size, args.tokens, args.aspect)
        for given in args.depth
    ]
    header = ("depth", "width", "heads", "parameters", "tokens", "tokens/step", "steps", "lr",
              "muon_lr", "compute")  # fmt: skip
    rows = [header, *(_row(each) for each in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    if args.write is not None:
        if len(found) > 1:
            raise ConfigError(f"--write takes one depth, but there are {len(found)}; give one")
        _write(args.write, found[0].to_training(args.source, args.tokenizer))
        print(f"wrote {args.write}; train it: antiphon train fit --config {args.write}")
    return 0


def _depth(given: str) -> int:
    try:
        return int(given)
    except ValueError:
        raise ConfigError(f"depth is {given!r}, but must be a whole number of layers") from None


def _row(each: Dial) -> tuple[str, ...]:
    config = each.config
    return (
        str(config.n_layer), str(config.d_model), str(config.n_head),
        f"{parameter_count(config):,}", f"{each.tokens:,}", f"{each.batch_tokens:,}",
        f"{each.steps:,}", f"{each.lr:g}", f"{each.muon_lr:g}", number(each.flops),
    )  # fmt: skip


def _write(path: Path, settings: dict[str, Any]) -> None:
    if path.exists():
        raise ConfigError(f"{path} is there already; give another name to --write")
    try:
        write_atomically(path, yaml.safe_dump(settings, sort_keys=False).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
