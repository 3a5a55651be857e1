"""The `antiphon data` command: prepare text for training, and look at what is prepared."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.arguments import CommandParser, examples

if TYPE_CHECKING:
    from gpt.data.shards import PreparedData
    from gpt.data.sources import Source

DEFAULTS: dict[str, Any] = {
    "tokenizer": "bpe",
    "vocab_size": 2048,
    "pattern": "gpt4",
    "special_tokens": (),
    "newlines": "keep",
    "on_error": "stop",
    "workers": None,
    "val_fraction": 0.1,
    "root": "data",
}
"""What `gpt.data.prepare.prepare` and the trainer take where nothing is said."""

NEWLINES = ("keep", "lf")
ON_ERROR = ("stop", "skip", "replace")

TOKENIZER_HELP = "gpt2, cl100k_base, o200k_base, bytes, or the path of a tokenizer"
SOURCE_HELP = (
    "a named corpus (shakespeare, sotu, tinyshakespeare), a file (.txt .md .jsonl .csv .parquet, "
    "each also .gz or .zst), a folder, a quoted glob, or hf:NAME for a Hugging Face dataset"
)

EXAMPLES = examples(
    "antiphon data prepare book.txt",
    "antiphon data prepare 'chats/*.jsonl' --field body --special-token '<|user|>'",
    "antiphon data prepare sotu shakespeare@3 --tokenizer gpt2",
    "antiphon data inspect data/book-0123456789ab --documents 3",
    "antiphon data stats data/book-0123456789ab",
)
PREPARE_EXAMPLES = examples(
    "antiphon data prepare book.txt --vocab-size 4096",
    "antiphon data prepare notes/ 'logs/**/*.md' --newlines lf --on-error replace",
    "antiphon data prepare chats.jsonl.zst --field body --special-token '<|user|>'",
    "antiphon data prepare sotu shakespeare@3 --tokenizer gpt2",
    "antiphon data prepare hf:roneneldan/TinyStories --workers 8",
)
INSPECT_EXAMPLES = examples(
    "antiphon data inspect data/book-0123456789ab",
    "antiphon data inspect data/book-0123456789ab --split val --documents 5",
    "antiphon data inspect data/book-0123456789ab --at 150000",
)
STATS_EXAMPLES = examples(
    "antiphon data stats data/book-0123456789ab",
    "antiphon data stats book.txt --tokenizer gpt2 --json",
)


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Prepare text for training, and look at what is prepared.",
        epilog=EXAMPLES,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_prepare(
        actions.add_parser(
            "prepare",
            help="tokenize a corpus into a folder that training reads",
            description="Tokenize a corpus into a folder, once. A run with the same source and "
            "settings finds it ready.\nSeveral sources are mixed: SOURCE@2 is seen twice as often "
            "for its size as one without a weight.",
            epilog=PREPARE_EXAMPLES,
        )
    )
    _add_inspect(
        actions.add_parser(
            "inspect",
            help="show what a prepared folder holds, and check its files",
            description="Show the settings, sources and documents of a prepared folder, and check "
            "every token in it.",
            epilog=INSPECT_EXAMPLES,
        )
    )
    _add_stats(
        actions.add_parser(
            "stats",
            help="count tokens, documents, duplicates and use of the vocabulary",
            description="Count tokens, lengths of documents, duplicates and use of the vocabulary, "
            "of prepared data or\nof a corpus that is tokenized on the way.",
            epilog=STATS_EXAMPLES,
        )
    )
    return parser


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", nargs="+",
        help=f"{SOURCE_HELP}; @NUMBER at its end is its weight (default: 1)",
    )  # fmt: skip
    text = parser.add_argument_group("text")
    _add_reading(text)
    text.add_argument(
        "--val-fraction", type=float, metavar="SHARE",
        help=f"share of the text held out for evaluation (default: {DEFAULTS['val_fraction']})",
    )  # fmt: skip
    vocabulary = parser.add_argument_group("tokenizer")
    vocabulary.add_argument(
        "--tokenizer", metavar="NAME|PATH",
        help="bpe (learned from the text), chars (its characters), or a ready one: "
        f"{TOKENIZER_HELP} (default: {DEFAULTS['tokenizer']})",
    )  # fmt: skip
    vocabulary.add_argument(
        "--vocab-size", type=int, metavar="N",
        help=f"tokens that bpe has, end-of-text included (default: {DEFAULTS['vocab_size']})",
    )  # fmt: skip
    vocabulary.add_argument(
        "--pattern", metavar="NAME|REGEX",
        help="how bpe splits text before it merges: gpt2, gpt4, o200k or a regular expression "
        f"(default: {DEFAULTS['pattern']})",
    )  # fmt: skip
    vocabulary.add_argument(
        "--special-token", dest="special_tokens", action="append", metavar="TEXT",
        help="text that becomes one token wherever it stands; may be given several times",
    )  # fmt: skip
    work = parser.add_argument_group("work")
    work.add_argument(
        "--root", metavar="FOLDER",
        help=f"folder in which the prepared folder is made (default: {DEFAULTS['root']})",
    )  # fmt: skip
    work.add_argument(
        "--workers", type=int, metavar="N",
        help="processes that tokenize; the result is the same (default: one per core)",
    )  # fmt: skip
    work.add_argument("--quiet", action="store_true", help="show no progress")
    work.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_reading(group: argparse._ActionsContainer) -> None:
    """Flags on how sources are read."""
    group.add_argument(
        "--field", metavar="NAME", default="text",
        help="column or key that holds the text, in sources with rows (default: text)",
    )  # fmt: skip
    group.add_argument(
        "--hf-split", metavar="NAME", default="train",
        help="which split of a Hugging Face dataset (default: train)",
    )  # fmt: skip
    group.add_argument(
        "--newlines", choices=NEWLINES,
        help="keep line ends as they are, or turn CRLF and CR into LF "
        f"(default: {DEFAULTS['newlines']})",
    )  # fmt: skip
    group.add_argument(
        "--on-error", choices=ON_ERROR,
        help="bytes that are not UTF-8, rows that cannot be read: stop and say where, skip them, "
        f"or replace the bytes with U+FFFD (default: {DEFAULTS['on_error']})",
    )  # fmt: skip


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="a prepared folder, as prepare names it")
    parser.add_argument(
        "--split", choices=("train", "val"), default="train",
        help="whose documents to show (default: train)",
    )  # fmt: skip
    parser.add_argument(
        "--documents", type=int, default=2, metavar="N",
        help="show the beginning of the first N documents (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--at", type=int, metavar="TOKEN",
        help="show the tokens around this one, counted from 0 within the split",
    )  # fmt: skip
    parser.add_argument(
        "--no-check", action="store_true",
        help="do not read all tokens; only sizes and fingerprints are checked",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _add_stats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="FOLDER|SOURCE",
        help=f"a prepared folder; or what prepare takes: {SOURCE_HELP}",
    )  # fmt: skip
    parser.add_argument(
        "--split", choices=("train", "val"),
        help="of a prepared folder: one split alone (default: both)",
    )  # fmt: skip
    text = parser.add_argument_group("if it is not prepared")
    text.add_argument("--tokenizer", metavar="NAME|PATH", help=f"{TOKENIZER_HELP} (default: bytes)")
    _add_reading(text)
    parser.add_argument(
        "--top", type=int, default=10, metavar="N",
        help="how many of the most and least frequent tokens to show (default: 10)",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def main(argv: list[str], prog: str = "antiphon data") -> int:
    """Returns the exit status: 1 if the data is not as its description says.

    Raises:
        UserError: a source, a folder or settings that cannot be used.
    """
    parser = build_parser(prog)
    args = parser.parse_args(argv)
    _check(parser, args)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks a sign gets its code
        sys.stdout.reconfigure(errors="backslashreplace")
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "prepare": _prepare,
        "inspect": _inspect,
        "stats": _stats,
    }
    return actions[args.action](args)


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with status 2 for flags that would do nothing, or that cannot be right."""
    if args.action == "prepare" and (args.tokenizer or "bpe") != "bpe":
        for flag, value in (("--vocab-size", args.vocab_size), ("--pattern", args.pattern)):
            if value is not None:
                parser.error(
                    f"{flag} is for --tokenizer bpe, which is learned; {args.tokenizer} has its own"
                )
    for flag in ("documents", "at", "top"):
        if (value := getattr(args, flag, None)) is not None and value < 0:
            parser.error(f"--{flag} is {value}, but must be 0 or more")


def parse_source(word: str, field: str = "text", split: str = "train") -> Source:
    """SOURCE or SOURCE@WEIGHT; what exists under the whole name is that."""
    from gpt.data.sources import Source

    found = re.fullmatch(r"(.+)@([0-9]+\.?[0-9]*|\.[0-9]+)", word, re.DOTALL)
    if found is None or os.path.exists(os.path.expanduser(word)):
        return Source(word, field=field, split=split)
    return Source(found[1], field=field, weight=float(found[2]), split=split)


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of `prepare()` that were given on the command line."""
    return {name: value for name in DEFAULTS if (value := getattr(args, name)) is not None}


def train_command(sources: Sequence[Source], settings: dict[str, Any]) -> str:
    """The command that trains on what these sources and settings prepare."""
    flags: dict[str, Any] = {}
    entries = [_entry(one) for one in sources]
    flags["source"] = entries[0] if len(entries) == 1 else entries
    if sources[0].field != "text":
        flags["field"] = sources[0].field
    flags |= {name: value for name, value in settings.items() if value != DEFAULTS[name]}
    words = ["antiphon", "train", "fit"]
    for name, value in flags.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        flag = f"--data.{name}"
        # Where it begins with a dash it would be taken for a flag by itself.
        words += [f"{flag}={quoted(text)}"] if text[:1] == "-" else [flag, quoted(text)]
    return " ".join(words)


def quoted(text: str) -> str:
    """A word for a shell, a file name that is not UTF-8 too."""
    try:
        text.encode()
        return shlex.quote(text)
    except UnicodeEncodeError:
        codes = os.fsencode(text)
    return "$'" + "".join(chr(b) if b in _PLAIN else f"\\x{b:02x}" for b in codes) + "'"


_PLAIN = frozenset(range(32, 127)) - frozenset(b"'\\")


def _entry(source: Source) -> str | dict[str, Any]:
    """A source as the trainer takes it; its field is given for all of them together."""
    unusual: dict[str, Any] = {}
    if source.weight != 1:
        unusual["weight"] = int(source.weight) if source.weight.is_integer() else source.weight
    if source.split != "train":
        unusual["split"] = source.split
    return {"source": source.source, **unusual} if unusual else source.source


def _prepare(args: argparse.Namespace) -> int:
    from gpt.data.prepare import prepare
    from gpt.signals import ended_by_signals

    sources = [parse_source(word, args.field, args.hf_split) for word in args.source]
    settings = given_settings(args)
    with ended_by_signals():
        data = prepare(sources, progress=not args.quiet, **settings)
    settings.pop("workers", None)  # how it was made, not what
    command = train_command(sources, settings)
    if args.json:
        from gpt.data.inspection import summary

        print(json.dumps({**summary(data), "train_command": command}, ensure_ascii=False, indent=2))
    else:
        _print_prepared(data, command)
    return 0


def _print_prepared(data: PreparedData, command: str) -> None:
    from gpt.data.inspection import print_summary

    print_summary(data)
    print(f"\nTrain on it:\n  {command}")
    print(f"Look at it:\n  antiphon data inspect {_inspected(data.folder)}")


def _inspected(folder: Path) -> str:
    text = str(folder)
    return quoted(f"./{text}" if text.startswith("-") else text)


def _inspect(args: argparse.Namespace) -> int:
    from gpt.data.inspection import inspect

    return inspect(args)


def _stats(args: argparse.Namespace) -> int:
    from gpt.data.statistics import of_prepared, of_sources, print_statistics
    from gpt.errors import ConfigError

    prepared = Path(args.source).expanduser()
    if (prepared / "meta.json").is_file():
        reading = ("--tokenizer", "--newlines", "--on-error")
        for flag in reading:
            if getattr(args, flag[2:].replace("-", "_")) is not None:
                raise ConfigError(f"{prepared} is prepared already, so {flag} changes nothing")
        found = of_prepared(prepared, args.split, show=not args.quiet)
    else:
        if args.split is not None:
            raise ConfigError(
                f"--split is for a prepared folder, which {args.source} is not; leave it out"
            )
        found = of_sources(
            [parse_source(args.source, args.field, args.hf_split)],
            args.tokenizer or "bytes",
            newlines=args.newlines or DEFAULTS["newlines"],
            on_error=args.on_error or DEFAULTS["on_error"],
            show=not args.quiet,
        )
    if args.json:
        print(json.dumps(found.record(args.top), ensure_ascii=False, indent=2))
    else:
        print_statistics(found, args.top)
    return 0
