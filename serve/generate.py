"""The `antiphon generate` command: text from a running server, printed as it is made."""

from __future__ import annotations

import re
import sys

from gpt.arguments import CommandParser
from gpt.sample import add_sampling_arguments, read_prompt, sampling_params
from serve.client import DEFAULT_TARGET, DEFAULT_TIMEOUT, Client

EXAMPLES = """\
examples:
  antiphon generate --prompt "ROMEO:"
  antiphon generate --target 10.0.0.7:50051 --prompt "ROMEO:" --temperature 0.8 --seed 1
  antiphon generate --prompt "To be" --stop "." --max-tokens 100 --no-stream
  echo "Once more" | antiphon generate --prompt -
"""


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Ask a running server (`antiphon serve`) for text and print it as it is made.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="HOST:PORT",
        help=f"the server (default: {DEFAULT_TARGET})",
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help="text to continue; - reads it from standard input (default: start a new document)",
    )
    add_sampling_arguments(parser)
    parser.add_argument(
        "--no-stream", action="store_true", help="print the text when it is complete"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        metavar="S",
        help=f"seconds that it may take (default: {DEFAULT_TIMEOUT:g})",
    )
    return parser


def main(argv: list[str], prog: str = "antiphon generate") -> int:
    """Ask a server for text and print it as it comes, after its prompt, like `antiphon sample`.

    Raises:
        UserError: settings out of range, the server refused or cannot be reached.
    """
    parser = build_parser(prog)
    args = parser.parse_args(argv)
    if not args.timeout > 0:
        parser.error(f"--timeout is {args.timeout:g}, but must be above 0")
    if not re.fullmatch(r"[^/]+:\d{1,5}", args.target):  # gRPC would try port 443 at once
        parser.error(f"--target is {args.target!r}, but must be HOST:PORT, as localhost:50051")
    params = sampling_params(args)
    prompt = read_prompt(args.prompt)
    with Client(args.target, timeout=args.timeout) as client:
        from serve.wire import settings_of_params

        with client.stream(prompt, **settings_of_params(params)) as stream:
            pieces = (delta.text for delta in stream)
            first = next(pieces, "")  # an error comes before anything is printed
            sys.stdout.write(prompt)
            if args.no_stream:
                sys.stdout.write(first + "".join(pieces))
            else:
                sys.stdout.write(first)
                sys.stdout.flush()
                for text in pieces:
                    sys.stdout.write(text)
                    sys.stdout.flush()
            sys.stdout.write("\n")
            sys.stdout.flush()
            end = stream.finish
    if end and end.reason == "length" and end.completion_tokens < (params.max_tokens or 0):
        print(
            f"note: the model's context was full before --max-tokens {params.max_tokens} was "
            "reached",
            file=sys.stderr,
        )
    return 0
