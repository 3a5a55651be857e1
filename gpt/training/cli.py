"""`python train.py fit | validate | test` and `antiphon train …`, from command line to status."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser

from gpt.errors import UserError
from gpt.training.complaints import naming_the_file
from gpt.training.data import TextDataModule
from gpt.training.lr_find import RangeTrainer
from gpt.training.module import GPTModule
from gpt.training.parser import (
    Parser,
    UsageError,
    parser_kwargs,
    with_config_paths,
)
from gpt.training.train_cli import TRAINER_DEFAULTS, SaveRunConfig, TrainCLI

INTERRUPTED = 130


class _Built(Exception):  # noqa: N818 - carries the parser out of LightningCLI's constructor
    def __init__(self, parser: Parser) -> None:
        self.parser = parser


class _ParserAlone(TrainCLI):
    """Stops when the parser is complete, before anything is parsed."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        assert isinstance(parser, Parser)
        raise _Built(parser)


def build_parser(prog: str) -> Parser:
    """The parser with those of its subcommands, for completion and for the tests of the help."""
    try:
        _start(_ParserAlone, [], prog)
    except _Built as built:
        return built.parser
    raise AssertionError("LightningCLI was made without parsing its arguments")


def _start(
    kind: type[TrainCLI], argv: list[str], prog: str, callbacks: Sequence[Callback] = ()
) -> None:
    kind(
        GPTModule,
        TextDataModule,
        args=argv,
        trainer_class=RangeTrainer,
        parser_class=Parser,
        parser_kwargs=parser_kwargs(prog),
        trainer_defaults={**TRAINER_DEFAULTS, "callbacks": list(callbacks)},
        save_config_callback=SaveRunConfig,
        save_config_kwargs={"save_to_log_dir": False},
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
    )


def _quiet() -> None:
    """Leave on the terminal what concerns the user: Lightning's hints and reminders do not."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*exists and is not empty.*",
        ".*isinstance.treespec, LeafSpec.*",
        ".*is smaller than the logging interval.*",
        ".*GPU available but not used.*",
        ".*callbacks used to create the checkpoint need to be provided.*",  # test, validate
    ):
        warnings.filterwarnings("ignore", message=message)


def main(
    argv: list[str] | None = None, prog: str = "train.py", callbacks: Sequence[Callback] = ()
) -> int:
    """Run the trainer's command line and return its exit status.

    Args:
        callbacks: of the trainer, beside those that the settings name.

    Returns:
        0 is success, 1 a mistake in what was asked for, 2 a command line or config that cannot be
        read (one line on stderr says which), 130 after Ctrl-C.
    """
    _quiet()
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        _start(TrainCLI, with_config_paths(given), prog, callbacks)
    except UserError as error:
        return _fail(prog, str(error), 1)
    except UsageError as error:
        return _fail(prog, naming_the_file(str(error), given), 2)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _fail(prog: str, message: str, status: int) -> int:
    print(f"{prog}: error: {' '.join(message.split())}", file=sys.stderr)
    return status
