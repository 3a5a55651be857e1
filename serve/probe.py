"""The `antiphon ready` command: does a server answer? For scripts, and probes that speak TLS."""

from __future__ import annotations

from gpt.arguments import CommandParser, examples, number
from serve.reaching import add_security_arguments, add_target_argument, client, connection

EXAMPLES = examples(
    "antiphon ready",
    "antiphon ready --target localhost:50051 --timeout 300",
    "antiphon ready --tls-ca /etc/antiphon/tls/ca.crt --tls-server-name antiphon",
)


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Wait until a server says that it is serving, and exit with 0, or with 1 if it "
        "does not\nwithin the time. It asks grpc.health.v1, which wants no API key, so it can be a "
        "probe where\nthose that a platform has of its own cannot speak TLS.",
        epilog=EXAMPLES,
    )
    add_target_argument(parser)
    parser.add_argument(
        "--timeout",
        type=number(float, 0.001, 86_400),
        default=5.0,
        metavar="S",
        help="seconds that it may take (default: 5)",
    )
    add_security_arguments(parser)
    return parser


def main(argv: list[str], prog: str = "antiphon ready") -> int:
    """Wait for a server; returns the exit status.

    Raises:
        UserError: it is not serving within the time, with what it said last, or cannot be reached.
    """
    args = build_parser(prog).parse_args(argv)
    with client(connection(args, args.target), None) as asking:
        asking.await_ready(args.timeout)
    print(f"{args.target} is serving")
    return 0
