"""The `antiphon sample` command: text from a model on this machine.

Three ways to use it: one prompt, printed as its text is made or as JSON (here); many prompts from a
file (`gpt.sample_file`); and one after another at a terminal (`gpt.interactive`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gpt.arguments import CommandParser, add_machine_arguments, examples
from gpt.errors import PromptError
from gpt.settings import add_sampling_arguments, sampling_params
from gpt.stream import FinishReason
from gpt.terminal import dim, printable, shows_colour
from gpt.transcript import Transcript, table

if TYPE_CHECKING:
    import torch

    from gpt.checkpoint import LoadedModel
    from gpt.generate import Piece

__all__ = ["add_sampling_arguments", "build_parser", "main", "read_prompt", "sampling_params"]

MAX_SAMPLES = 100_000
MAX_BATCH_SIZE = 4096

EXAMPLES = examples(
    'antiphon sample runs/shakespeare-tiny/model --prompt "ROMEO:"',
    "antiphon sample runs/shakespeare-tiny/model --temperature 0.8 --min-p 0.05 --seed 1",
    "antiphon sample runs/shakespeare-tiny/checkpoints/last.ckpt --num-samples 3 --max-tokens 100",
    'echo "Once more" | antiphon sample runs/shakespeare-tiny/model --prompt - --json',
    "antiphon sample runs/shakespeare-tiny/model --interactive",
    "antiphon sample runs/shakespeare-tiny/model --input prompts.jsonl --output texts.jsonl",
)

INPUT_HELP = """\
A line of a JSONL input is an object with "prompt" (text) or "token_ids", and perhaps sampling
settings of its own ("temperature": 0.5, "max_tokens": 20, ...). Other keys, such as "id", come
back with the result. A run that was cut off goes on when the same command is given again.
"""


def read_prompt(given: str | None) -> str:
    """The --prompt flag: text, `-` for standard input, or nothing.

    Raises:
        PromptError: standard input is not text.
    """
    if given != "-":
        return given or ""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(
            f"standard input is not {error.encoding} text (byte 0x{error.object[error.start]:02x} "
            f"at {error.start}: {error.reason}); convert it first, for example with iconv"
        ) from None


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Continue a prompt with a trained model, printing the text as it is made. On a "
        "terminal and without\na prompt it asks for one after another.",
        epilog=INPUT_HELP + "\n" + EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder, run folder or .ckpt file")
    parser.add_argument(
        "--prompt", metavar="TEXT",
        help="text to continue; - reads it from standard input (default: start a new document)",
    )  # fmt: skip
    parser.add_argument(
        "--special", action="store_true",
        help="take special tokens' names in --prompt, such as <|user|>, as those tokens",
    )  # fmt: skip
    parser.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="texts to make (default: 1)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print each text as a line of JSON: prompt, text, token_ids, finish_reason, seed, ...",
    )
    parser.add_argument(
        "-i", "--interactive", action="store_true",
        help="ask for prompts (default on a terminal if there is no prompt and no input)",
    )  # fmt: skip
    add_sampling_arguments(parser)
    group = parser.add_argument_group("many prompts")
    group.add_argument(
        "--input", metavar="FILE",
        help="prompts: .jsonl, or any other file with a prompt on each line; - is standard input",
    )  # fmt: skip
    group.add_argument(
        "--input-format", choices=["jsonl", "txt"],
        help="what the input is (default: by the file's name; standard input is jsonl)",
    )  # fmt: skip
    group.add_argument(
        "--output", metavar="FILE",
        help="add the results to this JSONL file, and go on where an earlier run was cut off "
        "(default: print them)",
    )  # fmt: skip
    group.add_argument(
        "--overwrite", action="store_true", help="begin the output again, whatever is in it"
    )
    group.add_argument(
        "--batch-size", type=int, default=32, metavar="N",
        help="texts made side by side (default: 32)",
    )  # fmt: skip
    add_machine_arguments(parser, measures=True)
    return parser


def check(parser: CommandParser, args: argparse.Namespace) -> None:
    """Exit with status 2 if the flags do not fit together."""
    for flag, value, most in [
        ("--num-samples", args.num_samples, MAX_SAMPLES),
        ("--batch-size", args.batch_size, MAX_BATCH_SIZE),
    ]:
        if value is not None and not 1 <= value <= most:
            parser.error(f"{flag} is {value}, but must be 1 to {most}")
    ways = {"--prompt": args.prompt is not None, "--input": args.input is not None}
    ways["--interactive"] = args.interactive
    given = [flag for flag, on in ways.items() if on]
    if len(given) > 1:
        parser.error(f"{given[0]} and {given[1]} exclude each other; leave one of them out")
    if args.special and args.prompt is None:
        parser.error("--special is for the text of --prompt, which is missing")
    if args.interactive and args.json:
        parser.error("--interactive prints no JSON; leave --json out")
    if args.output is None and args.overwrite:
        parser.error("--overwrite says what to do with --output FILE, which is missing")
    if args.input is None:
        for flag, value in [("--output", args.output), ("--input-format", args.input_format)]:
            if value is not None:
                parser.error(f"{flag} needs the prompts in a file: --input FILE")


def wants_interaction(args: argparse.Namespace) -> bool:
    if args.interactive:
        return True
    asked = args.prompt is not None or args.input is not None or args.json
    return not asked and sys.stdin.isatty() and sys.stdout.isatty()


def main(argv: list[str], prog: str = "antiphon sample") -> int:
    """Returns the exit status: 1 if a prompt of a file could not be continued.

    Raises:
        UserError: settings out of range, a prompt or a model that cannot be used.
    """
    parser = build_parser(prog)
    args = parser.parse_args(argv)
    check(parser, args)
    params = sampling_params(args)
    if args.input is not None:
        from gpt.sample_file import run_file

        return run_file(args, params, lambda: open_model(args))
    if wants_interaction(args):
        from gpt.interactive import Continuation

        # Without --seed every text gets a new one, so the one drawn here is not kept.
        loaded, dtype, device = open_model(args)
        return Continuation(loaded, params, args.seed, args.num_samples, dtype, device).run()
    return print_samples(args, params, read_prompt(args.prompt))


def open_model(args: argparse.Namespace) -> tuple[LoadedModel, torch.dtype, torch.device]:
    """Only after the arguments are known to be good: importing torch takes seconds."""
    import torch

    from gpt.device import check_device
    from gpt.native.precision import open_model as open_for_decoding

    device = check_device(args.device)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    loaded, dtype, why = open_for_decoding(args.model, args.dtype, device)
    if args.dtype == "auto" and dtype != torch.float32:
        print(f"note: {str(dtype).removeprefix('torch.')} weights ({why})", file=sys.stderr)
    return loaded, dtype, device


def print_samples(args: argparse.Namespace, params: Any, prompt: str) -> int:
    loaded, dtype, device = open_model(args)

    from gpt.generate import generate

    ids = loaded.tokenizer.prompt(prompt, special=args.special)
    pieces = generate(
        loaded.model,
        loaded.tokenizer,
        ids,
        params,
        num_samples=args.num_samples,
        dtype=dtype,
        device=device,
    )
    samples = [
        Transcript(prompt, params, max(1, len(ids)), choice) for choice in range(args.num_samples)
    ]
    if args.json:
        for sample in in_order(pieces, samples):
            _write(as_json(sample.record(loaded.tokenizer)) + "\n")
    else:
        colour = shows_colour(sys.stdout)

        def after(sample: Transcript) -> str:
            if params.logprobs is None:
                return ""
            return table(sample.made, loaded.tokenizer, colour=colour)

        clean = printable if sys.stdout.isatty() else str
        show(pieces, samples, _write, after=after, colour=colour, clean=clean)
    full = [len(s.made) for s in samples if s.finish_reason is FinishReason.LENGTH]
    if params.max_tokens is not None and min(full, default=params.max_tokens) < params.max_tokens:
        print(
            f"note: the context of {loaded.model.config.block_size} tokens was full before "
            f"--max-tokens {params.max_tokens} was reached",
            file=sys.stderr,
        )
    return 0


def in_order(pieces: Iterable[Piece], samples: list[Transcript]) -> Iterable[Transcript]:
    """Fill the samples; each comes out when it and all before it are over."""
    ready = 0
    for piece in pieces:
        samples[piece.choice].add(piece)
        while ready < len(samples) and samples[ready].finish_reason is not None:
            yield samples[ready]
            ready += 1


def show(
    pieces: Iterable[Piece],
    samples: list[Transcript],
    write: Callable[[str], None],
    *,
    after: Callable[[Transcript], str] = lambda sample: "",
    colour: bool = False,
    clean: Callable[[str], str] = str,
) -> None:
    """Print samples one after another, although they are made side by side: the first that is not
    finished streams, the others wait their turn.

    Args:
        after: what to print below a sample that is over.
        clean: applied to prompt and text; for a terminal, `gpt.terminal.printable`.
    """
    shown = -1

    def headline(index: int) -> None:
        if len(samples) > 1:
            write(dim(f"--- {index + 1} of {len(samples)} ---", colour) + "\n")
        prompt = samples[index].prompt
        write(dim(clean(prompt), colour) if isinstance(prompt, str) else "")

    for piece in pieces:
        if shown < 0:  # not before the first piece: a prompt that is refused should print nothing
            shown = 0
            headline(0)
        samples[piece.choice].add(piece)
        if piece.choice == shown:
            write(clean(piece.text))
        while shown < len(samples) and samples[shown].finish_reason is not None:
            write("\n" + after(samples[shown]))
            shown += 1
            if shown < len(samples):
                headline(shown)
                write(clean(samples[shown].text))


def as_json(record: dict[str, Any]) -> str:
    """One line. Other alphabets stay readable where the terminal or file can hold them."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    ascii_only = encoding.lower().replace("-", "") != "utf8"
    return json.dumps(record, ensure_ascii=ascii_only, allow_nan=False)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
