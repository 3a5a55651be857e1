"""`antiphon attention maps`: what the heads of a model look at in a text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.errors import ConfigError, PromptError
from gpt.pictures import FUTURE, terminal_shades, write_grey
from gpt.terminal import padded

if TYPE_CHECKING:
    from torch import Tensor

    from gpt.tokenizer import Tokenizer

MAX_TOKENS = 1024
"""A map has the square of that many numbers."""
MAX_PRINTED = 128
"""Tokens of a map that is printed as numbers."""
CELLS = 40
"""A map on the terminal has this many cells a side, two characters each."""
LABEL = 14
"""Columns for the token beside a row."""
PIXELS, SMALL_PIXELS = 1024, 64
"""Side of a map in a PNG at most: of one alone, and of one among many."""
PLAIN = 0.25
"""A head that gives one place less than this, on average, has no name for what it does."""

EXAMPLES = (
    "antiphon attention maps runs/shakespeare-tiny/model --prompt 'To be, or not to be'",
    "antiphon attention maps runs/shakespeare-tiny/model --prompt 'To be' --layer 0 --head 1",
    "antiphon attention maps runs/shakespeare-tiny/model --prompt 'To be' --png maps.png",
)

LEGEND = """\
f the first token, p the one before, s the token itself; the digit says how many tenths of a head's
weight go there, on average; · a head that looks elsewhere, or everywhere.
--layer N [--head N] draws the maps of a layer, --png FILE all of them."""


def add_parser(actions: Any) -> None:
    """Add `maps` to the actions of `antiphon attention`."""
    parser = actions.add_parser(
        "maps",
        help="show what the heads of a model look at in a text",
        description="Show how much weight each token gives to each, head by head.\nWithout --layer:"
        " a line for each layer, with a sign for what each head mostly does.",
        epilog="\n".join(["examples:", *(f"  {line}" for line in EXAMPLES)]),
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder, run folder or .ckpt file")
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="the text; - reads it from standard input"
    )
    parser.add_argument("--layer", type=int, metavar="N", help="this layer alone, from 0")
    parser.add_argument("--head", type=int, metavar="N", help="this head of it alone, from 0")
    parser.add_argument(
        "--png",
        metavar="FILE",
        help="write the maps into a picture: a row for each layer, a column for each head",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the tokens and the weights of the maps"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the maps. Returns the exit status.

    Raises:
        UserError: a model or prompt that cannot be used, a layer or head that is not there.
    """
    if args.head is not None and args.layer is None:
        raise ConfigError("--head says which head of a layer; give the layer, too: --layer N")

    import torch

    from gpt.checkpoint import load_model
    from gpt.maps import see_maps
    from gpt.sample import read_prompt

    loaded = load_model(args.model)
    config = loaded.model.config
    _check("layer", args.layer, config.n_layer)
    _check("head", args.head, config.n_head)
    tokenizer = loaded.tokenizer
    ids = tokenizer.prompt(read_prompt(args.prompt))
    most = min(config.block_size, MAX_PRINTED if args.json else MAX_TOKENS)
    if not 1 <= len(ids) <= most:
        raise PromptError(f"the prompt has {len(ids)} tokens, but maps are shown for 1 to {most}")
    maps: dict[int, Tensor] = {}
    lines: list[str] = []

    def see(layer: int, found: Tensor) -> None:
        chosen = found if args.head is None else found[args.head : args.head + 1]
        if args.layer is None:
            lines.append(f"{layer:5}  " + " ".join(map(_sign, found)))
        if args.png is not None and args.layer is None:
            chosen = smaller(chosen, SMALL_PIXELS)
        if args.png is not None or args.json or args.layer is not None:
            maps[layer] = chosen

    see_maps(loaded.model, torch.tensor(ids), see, None if args.layer is None else [args.layer])
    if args.json:
        print(json.dumps(_record(ids, tokenizer, maps, args.head or 0), ensure_ascii=False))
    elif args.layer is None:
        print("layer  " + " ".join(f"{head:<2}" for head in range(config.n_head)))
        print("\n".join(lines))
        print(LEGEND)
    else:
        for head, found in enumerate(maps[args.layer], args.head or 0):
            print(f"layer {args.layer}, head {head}: from each token (rows) to those before it")
            print("\n".join(drawing(found, labels(ids, tokenizer))))
    if args.png is not None:
        write_grey(Path(args.png), mosaic([*maps.values()]))
    return 0


def _check(what: str, given: int | None, count: int) -> None:
    if given is not None and not 0 <= given < count:
        raise ConfigError(f"--{what} is {given}, but the model has 0 to {count - 1}")


def _sign(weights: Tensor) -> str:
    """What a head does, of its map (T, T): a letter and a digit, or a dot."""
    queries = weights[2:]  # the first two have hardly a choice
    if not len(queries):
        return "· "
    shares = {
        "f": queries[:, 0].mean().item(),
        "p": weights.diagonal(-1)[1:].mean().item(),
        "s": weights.diagonal()[2:].mean().item(),
    }
    name = max(shares, key=lambda each: shares[each])
    return "· " if shares[name] < PLAIN else f"{name}{min(9, int(10 * shares[name]))}"


def smaller(weights: Tensor, cells: int) -> Tensor:
    """(..., T, T) with at most so many cells a side, each the largest weight in it."""
    from torch.nn.functional import max_pool2d

    T = weights.shape[-1]
    return weights if cells >= T else max_pool2d(weights, -(-T // cells), ceil_mode=True)


def labels(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    from gpt.pieces import visible

    names = {token: name for name, token in tokenizer.special.items()}
    shown = [names.get(token) or visible(tokenizer.token_bytes(token)) for token in ids]
    return [text.replace("\n", "") for text in shown]


def drawing(weights: Tensor, names: Sequence[str], shades: str | None = None) -> list[str]:
    """Lines of characters for a map (T, T), the darker the more weight, each with its token.

    Weights are drawn by their root, since most are small. Of a long text several tokens share a
    line, which has the name of the first.
    """
    shades = terminal_shades() if shades is None else shades
    cells = smaller(weights[None], CELLS)[0]
    side = -(-len(names) // len(cells))
    lines = []
    for row, name in zip(cells.sqrt().tolist(), names[::side], strict=True):
        label = name if len(name) <= LABEL else f"{name[: LABEL - 1]}…"
        drawn = "".join(2 * shades[round(value * (len(shades) - 1))] for value in row)
        lines.append(f"{padded(label, LABEL)} {drawn}".rstrip())
    return lines


def mosaic(maps: Sequence[Tensor]) -> Any:
    """Grey values of a picture with a row of maps for each layer."""
    import torch

    H, T, _ = maps[0].shape
    alone = len(maps) * H == 1
    maps = [smaller(each, PIXELS if alone else SMALL_PIXELS) for each in maps]
    T = maps[0].shape[-1]
    scale = max(1, (PIXELS if alone else SMALL_PIXELS) // T)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    rows = []
    for each in maps:
        grey = (1 - each.sqrt().cpu()).masked_fill(future, FUTURE)
        tiles = grey.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
        edged = torch.nn.functional.pad(tiles, (1, 1, 1, 1), value=1.0)  # (H, side, side)
        rows.append(torch.cat([*edged], 1))
    return torch.cat(rows).numpy()


def _record(
    ids: Sequence[int], tokenizer: Tokenizer, maps: dict[int, Tensor], first_head: int
) -> dict[str, Any]:
    """As plain data; weights to six digits."""
    texts = [tokenizer.token_bytes(token).decode("utf-8", errors="replace") for token in ids]
    return {
        "token_ids": list(ids),
        "tokens": texts,
        "maps": [
            {
                "layer": layer,
                "head": head,
                "weights": [[round(value, 6) for value in row] for row in found.tolist()],
            }
            for layer, heads in maps.items()
            for head, found in enumerate(heads, first_head)
        ],
    }
