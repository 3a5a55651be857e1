"""The `antiphon sample` command: text from a model on this machine, printed as it is made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gpt.params import SamplingParams, random_seed

if TYPE_CHECKING:
    from gpt.generate import Piece

MAX_SAMPLES = 100_000
MAX_THREADS = 1024

EXAMPLES = """\
examples:
  antiphon sample runs/shakespeare-tiny/model --prompt "ROMEO:"
  antiphon sample runs/shakespeare-tiny/model --temperature 0.8 --top-k 50 --seed 1
  antiphon sample runs/shakespeare-tiny/checkpoints/last.ckpt --num-samples 3 --max-tokens 100
  echo "Once more" | antiphon sample runs/shakespeare-tiny/model --prompt -
"""


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `SamplingParams`, for every command that makes text."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="most tokens to make (default: fill the context)",
    )
    group.add_argument(
        "--temperature", type=float, default=1.0, metavar="X",
        help="below 1 is bolder about what is likely, above 1 more random, 0 always takes the most "
        "likely token (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--top-k", type=int, default=0, metavar="N",
        help="choose among the N most likely tokens only (default: 0, all)",
    )  # fmt: skip
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="X",
        help="choose among the most likely tokens that together have probability X (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help="end the text before TEXT; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, metavar="N", help="the same seed makes the same text (default: random)"
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises SamplingError that lists every value out of range."""
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        seed=random_seed() if args.seed is None else args.seed,
    )


def read_prompt(given: str | None) -> str:
    """The --prompt flag: text, `-` for standard input, or nothing."""
    return sys.stdin.read() if given == "-" else given or ""


def build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Continue a prompt with a trained model, printing the text as it is made.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder, run folder or .ckpt file")
    parser.add_argument(
        "--prompt", metavar="TEXT",
        help="text to continue; - reads it from standard input (default: start a new document)",
    )  # fmt: skip
    parser.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="texts to make (default: 1)"
    )
    add_sampling_arguments(parser)
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--device", default="cpu", help="where to run: cpu, cuda, mps (default: cpu)"
    )
    group.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16", "float64"],
        help="precision of weights and cache (default: float32)",
    )  # fmt: skip
    group.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads (default: torch's own)"
    )
    return parser


def main(argv: list[str], prog: str = "antiphon sample") -> int:
    parser = build_parser(prog)
    args = parser.parse_args(argv)
    for flag, value, most in [
        ("--num-samples", args.num_samples, MAX_SAMPLES),
        ("--threads", args.threads, MAX_THREADS),
    ]:
        if value is not None and not 1 <= value <= most:
            parser.error(f"{flag} is {value}, but must be 1 to {most}")
    params = sampling_params(args)
    prompt = read_prompt(args.prompt)

    import torch  # after the arguments are known to be good: this takes seconds

    from gpt.checkpoint import load_model
    from gpt.device import check_device

    device = check_device(args.device)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    loaded = load_model(args.model, device=device, dtype=dtype)

    from gpt.generate import generate

    pieces = generate(
        loaded.model,
        loaded.tokenizer,
        prompt,
        params,
        num_samples=args.num_samples,
        dtype=dtype,
        device=device,
    )
    made = show(pieces, args.num_samples, prompt, _write)
    if params.max_tokens is not None and made.get("length", params.max_tokens) < params.max_tokens:
        print(
            f"note: the context of {loaded.model.config.block_size} tokens was full before "
            f"--max-tokens {params.max_tokens} was reached",
            file=sys.stderr,
        )
    return 0


def show(
    pieces: Iterable[Piece], count: int, prompt: str, write: Callable[[str], None]
) -> dict[str, int]:
    """Print samples one after another, although they are made side by side: the first that is not
    finished streams, the others wait their turn.

    Returns:
        For each reason to finish that occurred, the fewest tokens a sample had then.
    """
    texts = [""] * count
    tokens = [0] * count
    finished: set[int] = set()
    shortest: dict[str, int] = {}
    shown = -1

    def headline(index: int) -> None:
        if count > 1:
            write(f"--- {index + 1} of {count} ---\n")
        write(prompt)

    for piece in pieces:
        if shown < 0:  # not before the first piece: a prompt that is refused should print nothing
            shown = 0
            headline(0)
        if piece.choice == shown:
            write(piece.text)
        texts[piece.choice] += piece.text
        tokens[piece.choice] += 1
        if piece.finish_reason is not None:
            finished.add(piece.choice)
            reason, n = piece.finish_reason.value, tokens[piece.choice]
            shortest[reason] = min(n, shortest.get(reason, n))
        while shown in finished:
            write("\n")
            shown += 1
            if shown < count:
                headline(shown)
                write(texts[shown])
    return shortest


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
