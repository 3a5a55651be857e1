"""`antiphon train` and `python train.py` up to the point where Lightning is needed.

Importing Lightning takes seconds. What needs none of it is answered here: the overview, a misspelt
subcommand, and the short help of each subcommand, which shows the flags that people use most.
`--help-all` lists every flag; the trainer's own parser writes that.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from gpt.arguments import CommandParser, examples

DESCRIPTION = """\
Train a GPT on text (fit), or measure one on the held-out part of it (validate, test).

Everything a run makes is in runs/NAME/. Settings come from a YAML file or the name of a shipped
one (--config shakespeare-tiny), and flags win over it."""

SUBCOMMANDS = {
    "fit": (
        "Train a model on text; --resume goes on with a run that was cut.",
        (
            "--config shakespeare-tiny",
            "--config shakespeare-tiny --data.source 'texts/*.txt' --name mine",
            "--model.init_from models/smollm2 --model.lora.rank 8 --data.source a.txt",
            "--config runs/mine/config.yaml --resume",
        ),
    ),
    "validate": (
        "Measure a run's best checkpoint on the held-out text.",
        ("--config runs/mine/config.yaml", "--config runs/mine/config.yaml --ckpt_path last"),
    ),
    "test": (
        "The same as validate: there is one held-out text, measured whole.",
        ("--config runs/mine/config.yaml", "--config runs/mine/config.yaml --ckpt_path last"),
    ),
    "lr-find": (
        "Look for a learning rate: train a little at rates that grow, and plot the loss.",
        (
            "--config shakespeare-tiny",
            "--config runs/mine/config.yaml --min_lr 1e-5 --max_lr 0.3 --steps 100",
        ),
    ),
}

FULL_HELP = "--help-all"


@dataclass(frozen=True)
class Flag:
    """A flag as the short help shows it.

    Attributes:
        name: with the dashes.
        metavar: what follows it; empty: nothing does.
        help: what it means, with the unit.
        default: as the trainer's parser has it, which a test compares; None if it has none.
        fit_only: of no use in measuring.
    """

    name: str
    metavar: str
    help: str
    default: object = None
    fit_only: bool = True


COMMON: dict[str, tuple[Flag, ...]] = {
    "the run": (
        Flag("--config", "YAML", "a file, or the name of a shipped config", fit_only=False),
        Flag("--name", "NAME", "the run's name and folder; else the config's name", fit_only=False),
        Flag("--runs_dir", "DIR", "folder of all runs", "runs", fit_only=False),
        Flag(
            "--ckpt_path",
            "CKPT",
            "best, last or a file: what fit goes on with, or what is measured",
            fit_only=False,
        ),
        Flag(
            "--resume",
            "",
            "go on with the last good checkpoint, or begin if there is none; the same command can "
            "be given again after a crash",
        ),
        Flag("--seed_everything", "N", "seed of weights, data order and dropout", 1337),
        Flag("--wandb", "{auto,on,off}", "record the run with Weights & Biases", "auto"),
    ),
    "text": (
        Flag(
            "--data.source",
            "TEXT",
            "a named corpus (shakespeare, sotu, tinyshakespeare), a file, a folder or a glob",
            "shakespeare",
            fit_only=False,
        ),
        Flag(
            "--data.tokenizer",
            "NAME",
            "bpe (learned from the text), bytes, chars or a named encoding",
            "bpe",
            fit_only=False,
        ),
        Flag("--data.vocab_size", "N", "ids of a bpe vocabulary", 2048, fit_only=False),
    ),
    "model": (
        Flag("--model.preset", "NAME", "a named size, as nano or gpt2-124m"),
        Flag(
            "--model.init_from", "MODEL", "begin with this model: its folder, a run's, or a .ckpt"
        ),
        Flag(
            "--model.lora.rank", "N", "with it: train narrow matrices beside it, not all of it", 0
        ),
        Flag("--model.config.n_layer", "N", "number of blocks", 4),
        Flag("--model.config.n_head", "N", "query heads", 4),
        Flag("--model.config.d_model", "N", "width", 128),
        Flag("--model.config.block_size", "N", "context length in tokens", 256),
        Flag("--model.config.dropout", "X", "share of activations dropped in training", 0.0),
    ),
    "training": (
        Flag("--trainer.max_steps", "N", "optimizer steps; -1: until Ctrl-C", -1),
        Flag("--data.batch_size", "N", "sequences a step and process", 32, fit_only=False),
        Flag("--trainer.accumulate_grad_batches", "N", "batches a step", 1),
        Flag("--model.optimizer.kind", "{adamw,muon}", "who moves the matrices", "adamw"),
        Flag("--model.optimizer.lr", "X", "peak learning rate of AdamW", 0.003),
        Flag("--model.optimizer.muon_lr", "X", "peak learning rate of Muon", 0.01),
        Flag("--model.optimizer.warmup_steps", "N", "steps to reach it", 100),
        Flag("--trainer.val_check_interval", "N", "batches between two validations", 250),
        Flag(
            "--trainer.precision",
            "P",
            "32-true, bf16-mixed, …; `antiphon doctor` measures which one is fast here",
            fit_only=False,
        ),
        Flag("--trainer.devices", "N", "GPUs, or processes on a CPU", "auto", fit_only=False),
    ),
}


SEARCH = (
    Flag("--min_lr", "X", "rate of the first step", 1e-06),
    Flag("--max_lr", "X", "rate of the last step", 1.0),
    Flag("--steps", "N", "steps from one to the other", 150),
)
NOT_IN_SEARCH = {
    "--ckpt_path",
    "--resume",
    "--wandb",
    "--model.optimizer.lr",
    "--model.optimizer.warmup_steps",
    "--trainer.max_steps",
    "--trainer.val_check_interval",
}


def flags_of(subcommand: str) -> dict[str, tuple[Flag, ...]]:
    """What the short help of a subcommand shows, by group."""
    searches = subcommand == "lr-find"
    shown = {
        title: tuple(
            flag
            for flag in flags
            if (subcommand == "fit" or searches or not flag.fit_only)
            and not (searches and flag.name in NOT_IN_SEARCH)
        )
        for title, flags in COMMON.items()
    }
    if searches:
        shown = {"the range": SEARCH} | shown
    return {title: flags for title, flags in shown.items() if flags}


def command_of(prog: str) -> str:
    """How the program is called: a script needs its interpreter."""
    return f"python {prog}" if prog.endswith(".py") else prog


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The overview with the short help of each subcommand. It is shown and never parsed with."""
    command = command_of(prog)
    parser = CommandParser(
        prog=prog,
        usage=f"{command} {{{','.join(SUBCOMMANDS)}}} [options]",
        description=DESCRIPTION,
        epilog=examples(
            *(f"{command} {name} {lines[0]}" for name, (_, lines) in SUBCOMMANDS.items())
        )
        + f"\n\n{command} fit --help shows the flags used most, {command} fit {FULL_HELP} all.",
    )
    subparsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", prog=command)
    for name, (description, lines) in SUBCOMMANDS.items():
        below = subparsers.add_parser(
            name,
            help=description,
            usage=f"{command} {name} [--config YAML] [options]",
            description=description,
            epilog=examples(*(f"{command} {name} {line}" for line in lines)),
        )
        for title, flags in flags_of(name).items():
            group = below.add_argument_group(title)
            for flag in flags:
                default = "" if flag.default is None else f" (default: {flag.default})"
                shape: dict[str, Any] = {"metavar": flag.metavar}
                if not flag.metavar:
                    shape = {"action": "store_true"}
                group.add_argument(flag.name, help=flag.help + default, **shape)
        group = below.add_argument_group("more")
        group.add_argument("--print_config", action="store_true", help="show all settings and end")
        group.add_argument(
            FULL_HELP, action="store_true", help="list every flag (takes some seconds)"
        )
    return parser


def main(argv: list[str] | None = None, prog: str = "train.py") -> int:
    """Answer what can be answered at once, and leave the rest to `gpt.training.cli`.

    Returns:
        See `gpt.training.cli.main`; 2 as well if there is no subcommand.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if not given:
        build_parser(prog).print_help(sys.stderr)
        return 2
    name = given[0]
    if name in SUBCOMMANDS and FULL_HELP in given:
        given = [name, "--help"]
    elif name in ("-h", "--help") or (name in SUBCOMMANDS and {"-h", "--help"} & set(given)):
        build_parser(prog).parse_args([name] if name.startswith("-") else [name, "--help"])
    elif name not in SUBCOMMANDS and not name.startswith("-"):
        build_parser(prog).parse_args([name])  # says what it is near to, and exits

    from gpt.training import cli

    return cli.main(given, prog)
