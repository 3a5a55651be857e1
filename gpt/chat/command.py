"""The `antiphon chat` command: talk with a model on this machine.

`serve.chat` is the command itself: it knows how to talk with a server, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.arguments import CommandParser, add_machine_arguments, examples
from gpt.chat.session import Bit, Chat, Speaker
from gpt.chat.template import ChatTemplate, read_template
from gpt.errors import ChatTemplateError
from gpt.params import Made, SamplingParams
from gpt.settings import add_sampling_arguments

if TYPE_CHECKING:
    import torch

    from gpt.checkpoint import LoadedModel
    from gpt.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"

LINES_HELP = """\
A line is a message; /help shows the commands. What is typed is ordinary text: names of special
tokens in it steer nothing. From a pipe each line is a message, too, and the answers alone are
printed.
"""

EXAMPLES = examples(
    "antiphon chat models/smollm2",
    'antiphon chat models/smollm2 --system "You answer in one sentence." --temperature 0.2',
    "antiphon chat runs/shakespeare-tiny/model --template chatml.jinja",
    'echo "What is the capital of France?" | antiphon chat models/smollm2 --temperature 0',
)


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Talk with a model that was trained to chat: it answers each line, and knows "
        "what was said before.",
        epilog=LINES_HELP + "\n" + EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder, run folder or .ckpt file")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument(
        "--template", metavar="FILE",
        help="a chat template (Jinja, as Hugging Face models have) instead of the model's own",
    )  # fmt: skip
    parser.add_argument(
        "--save", metavar="FILE", help="keep the conversation in this JSON file as it goes on"
    )
    add_sampling_arguments(parser)
    add_machine_arguments(parser, measures=True)
    return parser


def find_template(model: Path, given: str | None) -> str:
    """The chat template of a model, or the one in the file that is given instead.

    Raises:
        ChatTemplateError: there is none, or it cannot be read.
    """
    if given is not None:
        return read_template(given)
    for folder in (model, model / "model"):
        if (folder / TEMPLATE_FILE).is_file():
            return read_template(folder / TEMPLATE_FILE)
    raise ChatTemplateError(
        f"{model} has no chat template: nothing says how messages are put to it; give a file with "
        f"one (--template FILE, or {TEMPLATE_FILE} in the model folder), or have it continue texts "
        "with antiphon sample"
    )


class Local:
    """A model in this process."""

    def __init__(self, loaded: LoadedModel, dtype: torch.dtype, device: torch.device | str) -> None:
        self._loaded = loaded
        self._dtype = dtype
        self._device = device
        self.name = loaded.name
        self.block_size = loaded.model.config.block_size

    def answer(self, ids: Sequence[int], params: SamplingParams) -> Generator[Bit, None, None]:
        """Raises what `gpt.generate.generate` does."""
        from gpt.generate import generate

        pieces = generate(
            self._loaded.model,
            self._loaded.tokenizer,
            ids,
            params,
            dtype=self._dtype,
            device=self._device,
        )
        for piece in pieces:
            made = Made(piece.token, piece.logprob, piece.top)
            yield Bit(piece.text, (made,), piece.finish_reason, piece.matched_stop)


def talk(
    args: argparse.Namespace,
    params: SamplingParams,
    source: str,
    speaker: Speaker,
    tokenizer: Tokenizer,
) -> int:
    """Chat until there are no more lines. Returns the exit status.

    Args:
        source: the chat template.

    Raises:
        ChatTemplateError: it is broken; seen before the first line is asked for.
    """
    from gpt.chat.turns import USER, ChatEncoder, Turn, template_variables

    with ExitStack() as stack:
        template = stack.enter_context(ChatTemplate(source, template_variables(tokenizer)))
        encode = ChatEncoder(template, tokenizer)
        encode([Turn(USER, "?")])
        end = encode.end_of_turn()
        ends: Collection[int] = () if end is None else (end,)
        save = None if args.save is None else Path(args.save).expanduser()
        chat = Chat(
            speaker, encode, tokenizer, params, args.seed, ends=ends, system=args.system, save=save
        )
        return chat.run()


def talk_here(args: argparse.Namespace, params: SamplingParams) -> int:
    """Chat with a model in this process.

    Raises:
        UserError: a model or a template that cannot be used.
    """
    from gpt.sample import open_model

    model = Path(args.model)
    # Before the weights are read; of a model that is not there, those who read them say so best.
    source = find_template(model, args.template) if model.exists() else ""
    loaded, dtype, device = open_model(args)
    return talk(args, params, source, Local(loaded, dtype, device), loaded.tokenizer)
