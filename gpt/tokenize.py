"""The `antiphon tokenize` command: what a tokenizer makes of a text, and of ids."""

from __future__ import annotations

import argparse
import codecs
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from gpt.arguments import CommandParser, examples
from gpt.data.decoding import Reading, decode_utf8
from gpt.errors import DataError, TokenizerError
from gpt.terminal import dim, shows_colour

if TYPE_CHECKING:
    from gpt.tokenizer import Tokenizer

SHOWN_TOKENS = 1000
"""Tokens that are drawn unless --limit says otherwise."""

_BLOCK = 1 << 16
_AS_IT_IS = Reading(choice=False)

DESCRIPTION = """\
Show how a tokenizer cuts a text, or what text some ids stand for.

Tokens have backgrounds of changing colour on a terminal, and a line between them elsewhere. A space
is drawn as ·, and a byte that is only part of a character as \\xNN."""

EXAMPLES = examples(
    'antiphon tokenize "The cat sat." --tokenizer gpt2',
    "antiphon tokenize --file book.txt --tokenizer runs/shakespeare-tiny/model --limit 200",
    'echo "To be" | antiphon tokenize - --tokenizer bytes --ids',
    'antiphon tokenize "<|user|>Hi" --tokenizer data/chats-0123456789ab --special --json',
    "antiphon tokenize --tokenizer gpt2 --decode 464 3797 3332 13",
)


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "text", metavar="TEXT", nargs="?",
        help="text to tokenize; - (or nothing, in a pipe) reads it from standard input",
    )  # fmt: skip
    parser.add_argument("-f", "--file", metavar="FILE", help="a UTF-8 file to tokenize")
    parser.add_argument(
        "-t", "--tokenizer", required=True, metavar="NAME|PATH",
        help="gpt2, cl100k_base, o200k_base or bytes; or a model folder, a run folder, a folder of "
        "prepared data, or a tokenizer.json",
    )  # fmt: skip
    parser.add_argument(
        "--decode", metavar="ID", nargs="+",
        help="the other way round: print the text of these ids; - reads them from standard input",
    )  # fmt: skip
    parser.add_argument(
        "--special",
        action="store_true",
        help="take the names of special tokens in the text as those tokens (otherwise they are "
        "ordinary text); with --decode, print the name of end-of-text too",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N",
        help="show the first N tokens, 0 for all; the counts are of the whole text in any case "
        f"(default: {SHOWN_TOKENS}, but all with --ids and --json)",
    )  # fmt: skip
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--ids", action="store_true", help="print the ids alone")
    how.add_argument(
        "--json", action="store_true", help="print all as one JSON object, bytes and ids exactly"
    )
    return parser


def main(argv: list[str], prog: str = "antiphon tokenize") -> int:
    """Returns the exit status.

    Raises:
        UserError: a tokenizer, a text or ids that cannot be used.
    """
    parser = build_parser(prog)
    args = parser.parse_args(argv)
    check(parser, args)

    from gpt.encodings import named_tokenizer

    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks a sign gets its code
        sys.stdout.reconfigure(errors="backslashreplace")
    tokenizer = named_tokenizer(args.tokenizer)
    if args.decode is not None:
        print_text(tokenizer, args)
        return 0
    counts = Counts()
    limit = args.limit if args.limit is not None else SHOWN_TOKENS * (not (args.ids or args.json))
    tokens = Tokens(tokenizer, counts.chunks(read_text(args)), args.special, counts)
    show = print_ids if args.ids else print_json if args.json else print_pieces
    show(tokens, limit or None)
    return 0


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with status 2 if the flags do not fit together."""
    ways = {"TEXT": args.text, "--file": args.file, "--decode": args.decode}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        parser.error(f"{given[0]} and {given[1]} exclude each other; leave one of them out")
    if not given and sys.stdin.isatty():
        parser.error("there is no text: give TEXT, --file FILE, or text on standard input")
    if args.limit is not None and args.limit < 0:
        parser.error(f"--limit is {args.limit}, but must be 0 (all) or more")
    if args.decode is not None and (args.ids or args.limit is not None):
        parser.error("--decode prints a text; leave --ids and --limit out")


def read_text(args: argparse.Namespace) -> Iterator[str]:
    """The text in chunks. Raises DataError for a file that cannot be read, or is no UTF-8."""
    if args.text not in (None, "-"):
        yield args.text
        return
    if args.file in (None, "-"):
        yield from decode_utf8(sys.stdin.buffer, "standard input", _AS_IT_IS)
        return
    try:
        with open(os.path.expanduser(args.file), "rb") as stream:
            yield from decode_utf8(stream, args.file, _AS_IT_IS)
    except OSError as error:
        raise DataError(f"cannot read {args.file}: {error.strerror or error}") from None


@dataclass
class Counts:
    """Of a whole text: characters, UTF-8 bytes and tokens."""

    tokens: int = 0
    characters: int = 0
    bytes_: int = 0

    def chunks(self, chunks: Iterable[str]) -> Iterator[str]:
        """The same, counted as they pass."""
        for chunk in chunks:
            self.characters += len(chunk)
            # Half of a surrogate pair is refused by who gets the chunk.
            self.bytes_ += len(chunk.encode(errors="surrogatepass"))
            yield chunk

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_ / self.tokens if self.tokens else 0.0

    def line(self) -> str:
        return (
            f"{_of(self.tokens, 'token')}, {_of(self.characters, 'character')}, "
            f"{_of(self.bytes_, 'byte')}, {self.bytes_per_token:.2f} bytes per token"
        )


def _of(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


class Tokens:
    """The tokens of a text, as they come.

    Args:
        special: whether names of special tokens in the text are those tokens.
        counts: what the chunks are counted in; here the tokens are.
    """

    def __init__(
        self, tokenizer: Tokenizer, chunks: Iterator[str], special: bool, counts: Counts
    ) -> None:
        self.tokenizer = tokenizer
        self.counts = counts
        self.names = {token: name.encode() for name, token in tokenizer.special.items()}
        wanted: bool | Collection[str] = tokenizer.special if special else False
        self._ids = itertools.chain.from_iterable(
            self._counted(tokenizer.encode_stream(chunks, special=wanted))
        )

    def _counted(self, lists: Iterator[list[int]]) -> Iterator[list[int]]:
        for ids in lists:
            self.counts.tokens += len(ids)
            yield ids

    def first(self, limit: int | None) -> Iterator[int]:
        return itertools.islice(self._ids, limit)

    def rest(self) -> int:
        """Reads on to the end; returns how many tokens were left."""
        return sum(1 for _ in self._ids)

    def bytes_of(self, token: int) -> bytes:
        """Bytes of a token; a special one has those of its name."""
        return self.names.get(token) or self.tokenizer.token_bytes(token)


def print_pieces(tokens: Tokens, limit: int | None, out: TextIO | None = None) -> None:
    from gpt.pieces import PieceWriter

    out = out or sys.stdout
    colour = shows_colour(out)
    writer = PieceWriter(out, colour)
    for token in tokens.first(limit):
        writer.write(tokens.bytes_of(token), special=token in tokens.names)
    writer.end()
    if left := tokens.rest():
        print(dim(f"… {_of(left, 'more token')} (--limit 0 shows all)", colour), file=out)
    made = tokens.tokenizer
    print(dim(f"{tokens.counts.line()} ({made.kind}, {made.n_vocab:,} ids)", colour), file=out)


def print_ids(tokens: Tokens, limit: int | None) -> None:
    """The ids on standard output, for other programs; the counts beside it."""
    ids = tokens.first(limit)
    between = ""
    while block := list(itertools.islice(ids, _BLOCK)):
        sys.stdout.write(between + " ".join(map(str, block)))
        between = " "
    sys.stdout.write("\n")
    tokens.rest()
    sys.stdout.flush()
    print(tokens.counts.line(), file=sys.stderr)


def print_json(tokens: Tokens, limit: int | None) -> None:
    """One object, written as the tokens come; its counts are at the end."""
    made = tokens.tokenizer
    about = {"kind": made.kind, "n_vocab": made.n_vocab, "fingerprint": made.fingerprint}
    sys.stdout.write(f'{{"tokenizer": {json.dumps(about)}, "pieces": [')
    between = "\n"
    written: dict[int, str] = {}  # the same few tokens make up most of a text
    for token in tokens.first(limit):
        if (piece := written.get(token)) is None:
            piece = written[token] = _piece(tokens, token)
        sys.stdout.write(between + piece)
        between = ",\n"
    left = tokens.rest()
    counts = tokens.counts
    totals = {
        "not_shown": left,
        "tokens": counts.tokens,
        "characters": counts.characters,
        "bytes": counts.bytes_,
        "bytes_per_token": round(counts.bytes_per_token, 4),
    }
    sys.stdout.write(f"],\n{json.dumps(totals)[1:]}\n")


def _piece(tokens: Tokens, token: int) -> str:
    data = tokens.bytes_of(token)
    piece: dict[str, Any] = {
        "token_id": token,
        "text": data.decode(errors="replace"),
        "bytes": list(data),
    }
    if token in tokens.names:
        piece["special"] = True
    return json.dumps(piece, ensure_ascii=False)


def print_text(tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """The text of the ids that --decode names."""
    names = {token: name.encode() for name, token in tokenizer.special.items()}
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    kept: list[str] = []
    tokens = 0
    # All ids are looked at before anything is written: a wrong one must not come after half a text.
    ids = list(read_ids(args.decode))
    for token in ids:
        tokenizer.token_bytes(token)
    for token in ids:
        data = tokenizer.token_bytes(token)
        if args.special:
            data = names.get(token, data)
        tokens += 1
        if text := decoder.decode(data):
            (kept.append if args.json else sys.stdout.write)(text)
    tail = decoder.decode(b"", final=True)
    if args.json:
        text = "".join(kept) + tail
        print(json.dumps({"text": text, "tokens": tokens}, ensure_ascii=False))
    else:  # exactly the text, but a terminal's prompt needs a line of its own
        sys.stdout.write(tail + "\n" * sys.stdout.isatty())


def read_ids(words: list[str]) -> Iterator[int]:
    """Ids from words, in which they are separated by commas or brackets; `-` is standard input."""
    for word in words:
        for text in _blocks(sys.stdin) if word == "-" else [word]:
            for part in re.split(r"[\s,\[\]]+", text):
                if not part:
                    continue
                if not re.fullmatch(r"[0-9]{1,18}", part):
                    raise TokenizerError(
                        f"{part[:40]!r} is no token id; ids are whole numbers from 0 up, with "
                        "blanks or commas between them"
                    )
                yield int(part)


def _blocks(stream: TextIO) -> Iterator[str]:
    """The text of a stream in blocks that end between two words."""
    held = ""
    while block := stream.read(_BLOCK):
        *whole, held = re.split(r"(?<=[\s,])(?=\S*\Z)", held + block, maxsplit=1)
        yield from whole
    yield held
