"""The `antiphon import` command: a model of another program as a model folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.arguments import CommandParser, examples
from gpt.errors import CheckpointError, TokenizerError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gpt.tokenizer import Tokenizer
    from gpt.weights.source import Foreign

DTYPES = ("float32", "bfloat16", "float16")

DESCRIPTION = """\
Make a model folder of a model that another program has written.

SOURCE is a Hugging Face folder (config.json, weights as safetensors or .bin, vocabulary), a .gguf
file, a checkpoint of nanoGPT (ckpt.pt) or a LitGPT folder (lit_model.pth, model_config.yaml). Which
it is, is seen from the files. A setting or tensor that is not supported is an error that names it;
nothing in SOURCE is run."""

EXAMPLES = examples(
    "antiphon import ~/models/SmolLM2-135M models/smollm2",
    "antiphon import llama-3.2-1b.Q8_0.gguf models/llama --dtype bfloat16",
    "antiphon import out/ckpt.pt models/mine --tokenizer gpt2",
)


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the other program's model")
    parser.add_argument(
        "out", metavar="OUT", type=Path,
        help="the model folder to write; an earlier model there is replaced",
    )  # fmt: skip
    parser.add_argument(
        "-t", "--tokenizer", metavar="NAME|PATH",
        help="the vocabulary, if it is not in SOURCE: gpt2, cl100k_base, o200k_base or bytes; a "
        "tokenizer.json, or a folder that has one, of Antiphon or Hugging Face",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=DTYPES, help="convert the weights (default: as they are in SOURCE)"
    )
    parser.add_argument(
        "--name", metavar="NAME", help="what the model calls itself (default: OUT's last part)"
    )
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "antiphon import") -> int:
    """Returns the exit status.

    Raises:
        UserError: a source that cannot be imported, or a place that cannot be written to.
    """
    args = build_parser(prog).parse_args(argv)

    import torch

    from gpt.checkpoint import check_replaceable, write_folder
    from gpt.size import parameter_count

    check_replaceable(args.out)
    foreign = open_source(args.source, vocabulary=args.tokenizer is None)
    tokenizer = foreign.tokenizer
    if args.tokenizer is not None:
        tokenizer = find_tokenizer(args.tokenizer)
    if tokenizer is None:
        raise TokenizerError(
            f"{args.source} holds no vocabulary; give the one that the model was trained with: "
            "--tokenizer NAME|PATH, as gpt2 or the path of a tokenizer.json"
        )
    if tokenizer.n_vocab > foreign.config.vocab_size:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.n_vocab} tokens, but the model's vocabulary only "
            f"{foreign.config.vocab_size}: it is not the model's"
        )
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    state = read_weights(foreign, dtype)
    write_folder(
        args.out, foreign.config, state, tokenizer,
        name=args.name, training={"imported": foreign.origin}, chat_template=foreign.chat_template,
    )  # fmt: skip
    kinds = sorted({str(value.dtype).removeprefix("torch.") for value in state.values()})
    print(
        f"{args.out}: {parameter_count(foreign.config):,} parameters in {' and '.join(kinds)}, "
        f"{foreign.config.n_layer} layers, context of {foreign.config.block_size:,} tokens, "
        f"{tokenizer.n_vocab:,} tokens in the vocabulary"
    )
    print(f"Try it: antiphon sample {args.out}", file=sys.stderr)
    return 0


def open_source(path: Path, *, vocabulary: bool = True) -> Foreign:
    """The model at a path, whatever wrote it. Reads no weights yet.

    Args:
        vocabulary: False leaves the tokenizer out: whoever asks has another.

    Raises:
        UserError: nothing is there, nothing known, or it cannot be imported.
    """
    try:
        there, folder = path.exists(), path.is_dir()
    except (OSError, ValueError):  # a name too long, a NUL in it
        there = folder = False
    if not there:
        raise CheckpointError(f"there is nothing at {str(path)[:500]}")
    return _open_folder(path, vocabulary) if folder else _open_file(path, vocabulary)


def _open_file(path: Path, vocabulary: bool) -> Foreign:
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if magic == b"GGUF":
        from gpt.weights.gguf_model import open_gguf

        return open_gguf(path, vocabulary=vocabulary)
    if magic[:2] == b"PK":
        from gpt.weights.nanogpt import open_checkpoint

        return open_checkpoint(path)
    raise CheckpointError(
        f"{path} is neither a .gguf file nor a checkpoint of nanoGPT; give the folder for a model "
        "that is one"
    )


def _open_folder(path: Path, vocabulary: bool) -> Foreign:
    if (path / "lit_model.pth").is_file():
        from gpt.weights import litgpt

        return litgpt.open_folder(path, vocabulary=vocabulary)
    if (path / "config.json").is_file():
        if _is_ours(path / "config.json"):
            raise CheckpointError(f"{path} is a model folder of Antiphon already; use it as it is")
        from gpt.weights import huggingface

        return huggingface.open_folder(path, vocabulary=vocabulary)
    if (path / "ckpt.pt").is_file():
        return _open_file(path / "ckpt.pt", vocabulary)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _open_file(files[0], vocabulary)
    if files:
        raise CheckpointError(f"{path} holds {len(files)} .gguf files; give one of them")
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(f"{path} is an adapter; merge it into its model first")
    raise CheckpointError(
        f"{path} is no model that is known here: it has neither a config.json (Hugging Face), nor "
        "a .gguf file, nor a ckpt.pt (nanoGPT), nor a lit_model.pth (LitGPT)"
    )


def _is_ours(config: Path) -> bool:
    from gpt.weights.fields import read_json

    return str(read_json(config).get("format")).startswith("antiphon")


def find_tokenizer(given: str) -> Tokenizer:
    """What --tokenizer names: all that other commands take, and Hugging Face's files.

    Raises:
        TokenizerError: there is none, or it cannot be used.
    """
    path = Path(given)
    folder = path if path.is_dir() else path.parent
    if path.exists() and _is_huggingface(path):
        from gpt.vocab import open_vocabulary

        return open_vocabulary(folder)
    from gpt.encodings import named_tokenizer

    return named_tokenizer(given)


def _is_huggingface(path: Path) -> bool:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return (path / "vocab.json").is_file()
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and "added_tokens" in values


def read_weights(foreign: Foreign, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All weights, read one after another, with a bar for those who wait.

    Args:
        dtype: to convert them to; None keeps the source's.

    Raises:
        CheckpointError: a file cannot be read, or a number does not fit the dtype.
    """
    from gpt.data.progress import Progress
    from gpt.size import parameter_count

    state: dict[str, Tensor] = {}
    names = iter(foreign.weights)
    first = next(names)
    state[first] = _converted(first, foreign.weights[first](), dtype)
    total = parameter_count(foreign.config) * state[first].element_size()
    with Progress("importing", total, show=total > 1 << 26) as progress:
        progress.update(state[first].nbytes)
        for name in names:
            state[name] = _converted(name, foreign.weights[name](), dtype)
            progress.update(state[name].nbytes)
    return state


def _converted(name: str, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or weight.dtype == dtype:
        return weight
    converted = weight.to(dtype)
    if bool((weight.isfinite() & ~converted.isfinite()).any()):
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{name} has numbers too large for {kind}; choose another --dtype")
    return converted
