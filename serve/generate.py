"""The `antiphon generate` command: text from a running server, printed as it is made."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpt.arguments import CommandParser, examples
from gpt.params import Made, TokenLogprob
from gpt.sample import as_json, read_prompt
from gpt.settings import add_sampling_arguments, sampling_params
from gpt.stream import FinishReason
from gpt.terminal import dim, printable, shows_colour
from gpt.transcript import Transcript, table
from serve.client import DEFAULT_TIMEOUT, CompletionStream, TokenScore
from serve.reaching import add_security_arguments, add_target_argument, client, connection

EXAMPLES = examples(
    'antiphon generate --prompt "ROMEO:"',
    'antiphon generate --target 10.0.0.7:50051 --prompt "ROMEO:" --temperature 0.8 --seed 1',
    'antiphon generate --prompt "To be" --stop "." --max-tokens 100 --no-stream',
    'antiphon generate --prompt "To be" --max-tokens 10 --logprobs 3',
    "antiphon generate --target models.example.org:50051 --tls-ca ca.pem --api-key-file key",
    'echo "Once more" | antiphon generate --prompt - --json',
)


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Ask a running server (`antiphon serve`) for text and print it as it is made.",
        epilog=EXAMPLES,
    )
    add_target_argument(parser)
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help="text to continue; - reads it from standard input (default: start a new document)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the text as a line of JSON: prompt, text, token_ids, finish_reason, seed, ...",
    )
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
    add_sampling_arguments(parser)
    add_security_arguments(parser)
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
    params = sampling_params(args)
    reached = connection(args, args.target)
    prompt = read_prompt(args.prompt)
    with client(reached, args.timeout) as asking:
        from serve.wire import settings_of_params

        # Needed to write end-of-text by its name; asked for first, so that no error comes later.
        special = asking.model().special_tokens if params.logprobs is not None else {}
        with asking.stream(prompt, **settings_of_params(params)) as stream:
            received = Received(stream, Transcript(prompt, params, 0), Seen(special))
            if args.json:
                print_json(received)
            else:
                print_text(received, stream_it=not args.no_stream)
            end = stream.finish
    if end and end.reason == "length" and end.completion_tokens < (params.max_tokens or 0):
        print(
            f"note: the model's context was full before --max-tokens {params.max_tokens} was "
            "reached",
            file=sys.stderr,
        )
    return 0


@dataclass
class Seen:
    """What of the server's vocabulary has been told: all of a text's if it comes with
    log-probabilities."""

    special: Mapping[str, int]
    pieces: dict[int, bytes] = field(default_factory=dict)

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


@dataclass
class Received:
    """A text that comes over the wire, kept as the local sampler keeps its own."""

    stream: CompletionStream
    transcript: Transcript
    seen: Seen

    def texts(self) -> Iterator[str]:
        """The pieces of text as they come."""
        for delta in self.stream:
            self.transcript.text += delta.text
            if delta.scores:
                self.transcript.made += map(self._made, delta.scores)
            else:
                self.transcript.made += map(Made, delta.token_ids)
            yield delta.text
        self.transcript.prompt_tokens = self.stream.prompt_tokens
        if (end := self.stream.finish) is not None:
            self.transcript.finish_reason = FinishReason(end.reason)
            self.transcript.matched_stop = end.matched_stop

    def _made(self, score: TokenScore) -> Made:
        for each in (score, *score.top):
            self.seen.pieces[each.token] = each.piece
        top = tuple(TokenLogprob(each.token, each.logprob) for each in score.top)
        return Made(score.token, score.logprob, top)


def print_json(received: Received) -> None:
    """One line that has what `antiphon sample --json` has, and what only a server knows."""
    for _ in received.texts():
        pass
    stream = received.stream
    record = received.transcript.record(received.seen)
    record |= {
        "model": stream.model,
        "model_version": stream.model_version,
        "request_id": stream.request_id,
    }
    if (end := stream.finish) is not None:
        record["timing"] = {
            "queue_seconds": end.queue_seconds,
            "prefill_seconds": end.prefill_seconds,
            "decode_seconds": end.decode_seconds,
        }
    _write(as_json(record) + "\n")


def print_text(received: Received, *, stream_it: bool) -> None:
    """Prompt and text, and below them a table of log-probabilities if they were asked for."""
    colour = shows_colour(sys.stdout)
    clean = printable if sys.stdout.isatty() else str
    texts = received.texts()
    first = next(texts, "")  # an error comes before anything is printed
    transcript = received.transcript
    _write(dim(clean(str(transcript.prompt)), colour))
    if stream_it:
        _write(clean(first))
        for text in texts:
            _write(clean(text))
    else:
        _write(clean(first + "".join(texts)))
    _write("\n")
    if transcript.params.logprobs is not None:
        _write(table(transcript.made, received.seen, colour=colour))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
