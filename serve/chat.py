"""The `antiphon chat` command: talk with a model, here or on a server.

The template and the tokenizer are those of the model folder at hand, so that a server needs to know
nothing of chats: it is sent token ids.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from gpt.arguments import CommandParser
from gpt.chat import command
from gpt.chat.command import find_template, talk, talk_here
from gpt.chat.session import Bit
from gpt.errors import UserError
from gpt.params import Made, SamplingParams, TokenLogprob
from gpt.settings import sampling_params
from gpt.stream import FinishReason
from serve.client import DEFAULT_TIMEOUT, Client, Delta
from serve.reaching import (
    add_security_arguments,
    add_target_argument,
    client,
    connection,
    refuse_without_target,
)


def build_parser(prog: str) -> CommandParser:
    """That of `gpt.chat.command`, and how a server is reached."""
    parser = command.build_parser(prog)
    add_target_argument(
        parser,
        default=None,
        help="let this server answer (`antiphon serve`); MODEL then gives the chat template and "
        "the tokenizer alone, and must be the model that is served",
    )
    add_security_arguments(parser)
    assert parser.epilog is not None
    parser.epilog += (
        "\n  antiphon chat models/smollm2 --target localhost:50051"
        "\n  antiphon chat models/smollm2 --target models.example.org:50051 --tls"
    )
    return parser


def main(argv: list[str], prog: str = "antiphon chat") -> int:
    """Returns the exit status.

    Raises:
        UserError: settings out of range, a model, template or server that cannot be used.
    """
    parser = build_parser(prog)
    args = parser.parse_args(argv)
    if args.save is not None and Path(args.save).expanduser().exists():
        parser.error(f"--save is {args.save}, which exists; give the name of a new file")
    params = sampling_params(args)
    if args.target is None:
        refuse_without_target(parser, args)
        return talk_here(args, params)
    reached = connection(args, args.target)
    from gpt.encodings import named_tokenizer

    source = find_template(Path(args.model), args.template)
    tokenizer = named_tokenizer(args.model)
    with client(reached, DEFAULT_TIMEOUT) as asking:
        remote = Remote(asking)
        if remote.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{args.target} serves {remote.name}, whose tokenizer is not that of {args.model}; "
                "give the folder of the model that is served"
            )
        return talk(args, params, source, remote, tokenizer)


class Remote:
    """A model on a server.

    Raises:
        RequestError: the server cannot be reached.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        model = client.model()
        self.name = model.name
        self.block_size = model.block_size
        self.fingerprint = model.tokenizer_fingerprint

    def answer(self, ids: Sequence[int], params: SamplingParams) -> Generator[Bit, None, None]:
        """Raises RequestError, as the client's methods do."""
        from serve.wire import settings_of_params

        with self._client.stream(ids, **settings_of_params(params)) as stream:
            for delta in stream:
                yield Bit(delta.text, tuple(_made(delta)))
            if (end := stream.finish) is not None:
                yield Bit("", (), FinishReason(end.reason), end.matched_stop)


def _made(delta: Delta) -> Iterator[Made]:
    if not delta.scores:
        yield from map(Made, delta.token_ids)
    for score in delta.scores:
        top = tuple(TokenLogprob(other.token, other.logprob) for other in score.top)
        yield Made(score.token, score.logprob, top)
