"""The `antiphon attention` command: look at an attention pattern, and at what it costs.

What the heads of a model look at is shown by `gpt.show_maps`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gpt import show_maps
from gpt.arguments import CommandParser, examples
from gpt.errors import ConfigError
from gpt.patterns import Pattern, parse_pattern, trust
from gpt.patterns.text import FORMS
from gpt.pictures import FUTURE, terminal_shades, write_grey

CELLS = 28
"""The terminal's picture has this many cells a side, two characters each: with the facts beside
it, it fits 100 columns."""
PIXELS = 1024
"""And a PNG's at most this many pixels."""
SAMPLED = 32
"""Queries of one cell that are looked at; a coarse picture needs no more."""
BLOCK = 64
"""Side of the blocks that are counted: what a kernel touches as a whole (`gpt.blocks.SIZE`)."""
MAX_LENGTH = 2**20

Grid = list[list[float]]

EXAMPLES = examples(
    "antiphon attention show window:256+sinks:4",
    "antiphon attention show dilated:8:4 --length 40",
    "antiphon attention show bigbird:192:64:2:0 --length 4096 --png bigbird.png",
    *show_maps.EXAMPLES,
)


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Look at attention: who may look at whom, and what a model's heads look at.",
        epilog=EXAMPLES,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="draw a pattern, and say what it costs",
        description="Draw who may look at whom: queries from top to bottom, keys from left to "
        "right.\nBeside it stands what the pattern computes and what a cache must remember.",
        epilog=EXAMPLES,
    )
    show.add_argument(
        "pattern", metavar="PATTERN", help=f"as model.config.pattern has it: {', '.join(FORMS)}"
    )
    show.add_argument(
        "--length", type=int, default=1024, metavar="N", help="tokens (default: %(default)s)"
    )
    show.add_argument("--png", metavar="FILE", help="write the picture into a file, too")
    show.set_defaults(run=run)
    show_maps.add_parser(actions)
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "antiphon attention") -> int:
    args = build_parser(prog).parse_args(argv)
    carry_out: Callable[[argparse.Namespace], int] = args.run
    return carry_out(args)


def run(args: argparse.Namespace) -> int:
    """Draw a pattern.

    Raises:
        ConfigError: no such pattern, or too long.
    """
    if not 1 <= args.length <= MAX_LENGTH:
        raise ConfigError(f"--length is {args.length}, but must be in 1 to {MAX_LENGTH}")
    trust(args.pattern)  # whoever types a class's name means it
    pattern = parse_pattern(args.pattern)
    for line in beside(picture(pattern, args.length), facts(args.pattern, pattern, args.length)):
        print(line)
    if args.png is not None:
        write_png(Path(args.png), shares(pattern, args.length, min(PIXELS, args.length)))
    return 0


def shares(pattern: Pattern, length: int, cells: int) -> Grid:
    """Of each cell of a square, the share of its (query, key) pairs that may be seen.

    Pairs of a later key do not count, so the diagonal of a causal pattern is 1. NaN: none counts.
    """
    side = -(-length // cells)
    cells = -(-length // side)
    grid = []
    for row in range(cells):
        queries = range(row * side, min((row + 1) * side, length))
        queries = queries[:: -(-len(queries) // SAMPLED)]
        seen, possible = [0] * cells, [0] * cells
        for q in queries:
            for cell in range(row + 1):
                possible[cell] += min(side, q + 1 - cell * side)
            for keys in pattern.spans(q, q):
                _count(keys, side, seen)
        grid.append([s / p if p > 0 else float("nan") for s, p in zip(seen, possible, strict=True)])
    return grid


def _count(keys: range, side: int, into: list[int]) -> None:
    """Add how many of the keys fall into each cell."""
    if keys.step > 1:
        for key in keys:
            into[key // side] += 1
        return
    for cell in range(keys.start // side, (keys.stop - 1) // side + 1):
        into[cell] += min(keys.stop, (cell + 1) * side) - max(keys.start, cell * side)


def picture(pattern: Pattern, length: int, shades: str | None = None) -> list[str]:
    """Lines of characters, the darker the more of a cell may be seen."""
    shades = terminal_shades() if shades is None else shades
    lines = []
    for row in shares(pattern, length, min(CELLS, length)):
        # The lightest shade is for cells that hold a single pair, too.
        steps = [-(-share * (len(shades) - 1) // 1) if share == share else 0 for share in row]
        lines.append("".join(2 * shades[int(step)] for step in steps))
    return lines


def facts(text: str, pattern: Pattern, length: int) -> list[str]:
    pairs, causal = pattern.pairs(length), length * (length + 1) // 2
    rows = -(-length // BLOCK)
    blocks = sum(len(pattern.key_blocks(row, BLOCK)) for row in range(rows))
    all_blocks = rows * (rows + 1) // 2
    memory = pattern.memory
    if memory.window is None:
        remembered = "every position"
    else:
        remembered = f"the last {memory.window:,} positions"
        if memory.sinks:
            remembered += f" and the first {memory.sinks:,}"
    return [
        text,
        f"{length:,} tokens",
        "",
        "pairs seen",
        f"  {pairs:,}, {pairs / length:,.1f} keys a query",
        f"  {pairs / causal:.1%} of causal",
        f"blocks of {BLOCK} touched",
        f"  {blocks:,} of {all_blocks:,} ({blocks / all_blocks:.1%})",
        "cache must remember",
        f"  {remembered}",
        f"  {memory.positions(length):,} of {length:,}",
    ]


def beside(drawing: Sequence[str], text: Iterable[str]) -> list[str]:
    """The text to the right of the drawing; the longer of both goes on alone."""
    width = max(map(len, drawing))
    notes = list(text)
    lines = []
    for i in range(max(len(drawing), len(notes))):
        left = drawing[i] if i < len(drawing) else ""
        right = notes[i] if i < len(notes) else ""
        lines.append(f"{left:{width}}   {right}".rstrip())
    return lines


def write_png(path: Path, grid: Grid) -> None:
    """One pixel a cell: black may be seen, white may not, grey is the future."""
    write_grey(path, [[_grey(share) for share in row] for row in grid])


def _grey(share: float) -> float:
    return 1.0 - share if share == share else FUTURE
