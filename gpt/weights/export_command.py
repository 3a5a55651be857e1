"""The `antiphon export` command: a model folder for other programs to read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpt.arguments import CommandParser, examples

FORMATS = ("hf", "gguf")
DTYPES = ("float32", "bfloat16", "float16")

DESCRIPTION = """\
Write a model for other programs.

hf    a folder that Hugging Face's transformers loads, as the class that computes the same: GPT-2,
      Llama, Mistral, Qwen2 or Qwen3
gguf  a file that llama.cpp runs

Not every architecture has a counterpart there; if it has none, the error says which of its settings
are in the way."""

EXAMPLES = examples(
    "antiphon export models/smollm2 smollm2-hf --format hf",
    "antiphon export models/smollm2 smollm2.gguf --format gguf --dtype float16",
)


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument(
        "model", metavar="MODEL", help="a model folder, a run folder or a checkpoint (.ckpt)"
    )
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="the folder (hf) or file (gguf) to write"
    )
    parser.add_argument("--format", choices=FORMATS, required=True, help="for which programs")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="convert the weights (default: as they are in MODEL)"
    )
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "antiphon export") -> int:
    """Returns the exit status.

    Raises:
        UserError: no such model, one that the format cannot hold, or a place that is taken.
    """
    args = build_parser(prog).parse_args(argv)

    import torch

    from gpt.checkpoint import load_model

    loaded = load_model(args.model, dtype=getattr(torch, args.dtype) if args.dtype else None)
    if args.format == "hf":
        from gpt.weights.hf_export import export_folder

        print(f"{args.out}: transformers loads it as {export_folder(loaded, args.out)}")
    else:
        from gpt.weights.gguf_export import export_gguf

        export_gguf(loaded, args.out)
        print(f"{args.out}: {args.out.stat().st_size / 1e6:,.1f} MB")
    return 0
