"""The `antiphon eval` command: how well a model predicts a text.

The same blocks, model and sums as in training's validation: for the text of the run the two agree
to the last digit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.arguments import CommandParser, add_machine_arguments, examples
from gpt.errors import CheckpointError, ConfigError, DataError, TokenizerError

if TYPE_CHECKING:
    from gpt.checkpoint import LoadedModel
    from gpt.data.shards import PreparedData
    from gpt.evaluation import Evaluation

DESCRIPTION = """\
Measure how well a model predicts a text: loss, perplexity, bits per byte and per character. The
whole text is read once, in blocks of the model's context that do not overlap, and each token is
predicted exactly once; the result does not depend on --batch-size.
"""

EXAMPLES = examples(
    "antiphon eval runs/shakespeare-tiny/model",
    "antiphon eval runs/shakespeare-tiny/model --data letters.txt --split all",
    "antiphon eval runs/shakespeare-tiny/model --stride 32 --json",
)


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help="a model folder, run folder or .ckpt file")
    group = parser.add_argument_group("text")
    group.add_argument(
        "--data", action="append", metavar="SOURCE",
        help="a named corpus, file, folder, glob or hf:NAME, as for training, or a folder that "
        "`antiphon data prepare` made; may be given several times (default: what the model was "
        "trained on)",
    )  # fmt: skip
    group.add_argument(
        "--split", choices=["val", "train", "all"], default="val",
        help="val is the part that training holds out of a text, train the rest (default: val)",
    )  # fmt: skip
    group.add_argument(
        "--val-fraction", type=float, metavar="X",
        help="share of the text that is held out (default: the model's run, or 0.1)",
    )  # fmt: skip
    group.add_argument(
        "--field", default="text", metavar="NAME",
        help="column or key that holds the text, where a source has rows (default: text)",
    )  # fmt: skip
    group.add_argument(
        "--newlines", choices=["keep", "lf"], default="keep",
        help="keep line ends, or turn CRLF and CR into lf (default: keep)",
    )  # fmt: skip
    group.add_argument(
        "--on-error", choices=["stop", "skip", "replace"], default="stop",
        help="what to do at bytes that are not UTF-8 (default: stop)",
    )  # fmt: skip
    group.add_argument(
        "--root", default="data", metavar="DIR", help="folder of tokenized text (default: data)"
    )
    group = parser.add_argument_group("evaluation")
    group.add_argument(
        "--stride", type=int, metavar="N",
        help="let blocks overlap: each begins N tokens after the last one and counts N targets. "
        "Lower, slower, and not comparable with the default",
    )  # fmt: skip
    group.add_argument(
        "--document-borders", action=argparse.BooleanOptionalAction, default=None,
        help="let no token see past the border of its document (default: as it was trained)",
    )  # fmt: skip
    group.add_argument(
        "--batch-size", type=int, default=32, metavar="N",
        help="blocks at once; does not change the result (default: 32)",
    )  # fmt: skip
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_machine_arguments(parser, precision_of="the weights")
    return parser


def main(argv: list[str], prog: str = "antiphon eval") -> int:
    parser = build_parser(prog)
    args = parser.parse_args(argv)
    if args.batch_size < 1:
        parser.error(f"--batch-size is {args.batch_size}, but must be at least 1")

    import torch  # after the arguments are known to be good: this takes seconds

    from gpt.checkpoint import load_model
    from gpt.device import check_device

    device = check_device(args.device)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    loaded = load_model(args.model, device=device, dtype=getattr(torch, args.dtype))
    block_size = loaded.model.config.block_size
    if args.stride is not None and not 1 <= args.stride <= block_size:
        raise ConfigError(
            f"--stride is {args.stride}, but must be 1 to the model's context of {block_size}"
        )
    prepared = find_text(loaded, args)
    if args.document_borders is None:
        args.document_borders = bool(_recorded(loaded).get("document_borders", False))
    found = evaluate(
        loaded, prepared, split=args.split, batch_size=args.batch_size, stride=args.stride,
        document_borders=args.document_borders,
    )  # fmt: skip
    report(found, loaded, prepared, args)
    return 0


def _recorded(loaded: LoadedModel) -> dict[str, Any]:
    """The text that the model was trained on, as its run has recorded it."""
    data = loaded.training.get("data")
    return data if isinstance(data, dict) else {}


def find_text(loaded: LoadedModel, args: argparse.Namespace) -> PreparedData:
    """The text in the model's own tokens, prepared now or found ready.

    Raises:
        DataError: no such text, or it is prepared with another tokenizer.
    """
    from gpt.data.prepare import prepare
    from gpt.data.shards import PreparedData
    from gpt.data.sources import Source

    recorded = _recorded(loaded)
    if args.data is None:
        if not recorded:
            raise CheckpointError(
                f"{args.model} does not say what text it was trained on; name one with --data"
            )
        folder = Path(str(recorded.get("folder", "")))
        if args.val_fraction is None and (folder / "meta.json").is_file():
            prepared = PreparedData.open(folder)
            if prepared.tokenizer.fingerprint == loaded.tokenizer.fingerprint:
                return prepared
        try:
            sources = [Source(**one) for one in recorded["sources"]]
            settings = {name: recorded[name] for name in ("newlines", "on_error", "val_fraction")}
        except (KeyError, TypeError):
            raise CheckpointError(
                f"{args.model} has a damaged record of its text; name the text with --data"
            ) from None
    else:
        if len(args.data) == 1 and (Path(args.data[0]) / "meta.json").is_file():
            prepared = PreparedData.open(args.data[0])
            if prepared.tokenizer.fingerprint != loaded.tokenizer.fingerprint:
                raise TokenizerError(
                    f"{args.data[0]} is prepared with {prepared.tokenizer}, but the model has "
                    f"{loaded.tokenizer}; give the text itself instead of the prepared folder"
                )
            return prepared
        sources = [Source(one, field=args.field) for one in args.data]
        settings = {"newlines": args.newlines, "on_error": args.on_error, "val_fraction": 0.1}
    if args.val_fraction is not None:
        settings["val_fraction"] = args.val_fraction
    return prepare(sources, tokenizer=loaded.tokenizer, root=args.root, **settings)


def evaluate(
    loaded: LoadedModel,
    prepared: PreparedData,
    *,
    split: str = "val",
    batch_size: int = 32,
    stride: int | None = None,
    document_borders: bool = False,
    progress: bool = True,
) -> Evaluation:
    """One pass over a split of a prepared text.

    Args:
        split: `val`, `train`, or `all` for both.
        batch_size: blocks a forward.
        stride: see `EvalBlocks`.
        document_borders: let no token see past the border of its document.
        progress: show a bar on a terminal.

    Raises:
        DataError: the split is empty.
    """
    import torch
    from tqdm import tqdm

    from gpt.data.batches import EvalBlocks
    from gpt.evaluation import Evaluation, Tally
    from gpt.plan import AttentionPlan

    model, eot = loaded.model, loaded.tokenizer.eot
    splits = {"all": ["train", "val"]}.get(split, [split])
    tally = Tally()
    loaders = [
        EvalBlocks(
            getattr(prepared, name), eot=loaded.tokenizer.start, block_size=model.config.block_size,
            batch_size=batch_size, stride=stride,
        )
        for name in splits
        if len(getattr(prepared, name))
    ]  # fmt: skip
    if not loaders:
        raise DataError(f"the {split} part of {prepared.folder} is empty; try --split all")
    bar = tqdm(
        total=sum(map(len, loaders)), desc="evaluating", unit="batch", leave=False,
        disable=not (progress and sys.stderr.isatty()),
    )  # fmt: skip
    with bar, torch.inference_mode():
        for loader in loaders:
            for ids, targets, _ in loader:
                ids, targets = ids.to(model.device), targets.to(model.device)
                plan = None
                if document_borders:
                    plan = AttentionPlan.packed(ids, eot=eot, pattern=model.pattern)
                tally.add(model(ids, plan, targets=targets, each=True), targets)
                bar.update()
    counts = [prepared.meta["splits"][name] for name in splits]
    return Evaluation(
        tally.nats,
        tally.targets,
        sum(int(count["bytes"]) for count in counts),
        sum(int(count["chars"]) for count in counts),
    )


WHICH = {"val": "held-out text", "train": "training text", "all": "whole text"}


def report(
    found: Evaluation, loaded: LoadedModel, prepared: PreparedData, args: argparse.Namespace
) -> None:
    from gpt.evaluation import describe

    if args.json:
        values = {
            "model": str(loaded.path),
            "data": str(prepared.folder),
            "split": args.split,
            "stride": args.stride,
            "document_borders": args.document_borders,
            **dataclasses.asdict(found),
            "loss": found.loss,
            "perplexity": found.perplexity,
            "bits_per_byte": found.bits_per_byte,
            "bits_per_char": found.bits_per_char,
        }
        print(json.dumps(values))
        return
    print(describe(found, text=WHICH[args.split], checkpoint=loaded.path))
    if args.stride is not None and args.stride < loaded.model.config.block_size:
        print(f"               (stride {args.stride}: not comparable with non-overlapping blocks)")
    if args.data is not None and args.split == "val" and args.val_fraction is None:
        print(
            "note: only the part of the text that training would hold out was read; "
            "--split all reads all of it",
            file=sys.stderr,
        )
