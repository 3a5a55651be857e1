"""Chatting at a terminal: each line is answered, and the model remembers what was said."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpt.chat.conversation import Conversation
from gpt.chat.turns import ASSISTANT, SYSTEM, USER, Turn
from gpt.errors import UserError
from gpt.files import write_atomically
from gpt.params import Made, SamplingParams
from gpt.session import Session, interruptible, until, write
from gpt.stream import FinishReason
from gpt.terminal import dim
from gpt.transcript import Transcript, Vocabulary, table

COMMANDS = {
    "/help": "show this",
    "/set NAME VALUE": "change a setting, as /set temperature 0.7; /set alone lists them",
    "/show": "show the settings that are not at their defaults",
    "/reset": "all settings as they were at the start",
    "/seed [N | random]": "show the last answer's seed; keep to N; draw a new one for each answer",
    "/system [TEXT | none]": "show what the model is told first; tell it something else",
    "/again": "answer the last message once more",
    "/new": "forget what was said",
    "/history": "show what the model remembers",
    "/save FILE": "write the conversation into a JSON file",
    "/multi": "a message of several lines, up to an empty line or one with a dot alone",
    "/quit": "leave, as Ctrl-D does",
}


@dataclass(frozen=True)
class Bit:
    """A bit of an answer: what is now certain of its text, and tokens that were made for it.

    Attributes:
        finish_reason, matched_stop: set on the last one, as in `gpt.transcript.Transcript`.
    """

    text: str
    made: tuple[Made, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | None = None


class Speaker(Protocol):
    """A model that answers, here or on a server."""

    @property
    def name(self) -> str: ...

    @property
    def block_size(self) -> int: ...

    def answer(self, ids: Sequence[int], params: SamplingParams) -> Generator[Bit, None, None]:
        """What continues the ids, bit by bit. It is closed when enough was heard."""


class Chat(Session):
    """Messages that are answered.

    Args:
        encode: makes ids of turns, as `gpt.chat.turns.ChatEncoder`.
        ends: special tokens that end an answer besides those that end every text.
        seed: for every answer; None: a new one each time.
        system: what the model is told first.
        save: a file that is to have the conversation, as far as it has come.
    """

    commands = COMMANDS
    a_text = "a message"

    def __init__(
        self,
        speaker: Speaker,
        encode: Callable[[Sequence[Turn]], list[int]],
        tokenizer: Vocabulary,
        params: SamplingParams,
        seed: int | None,
        *,
        ends: Collection[int] = (),
        system: str | None = None,
        save: Path | None = None,
    ) -> None:
        super().__init__(params, seed)
        self._speaker = speaker
        self._encode = encode
        self._tokenizer = tokenizer
        self._ends = ends
        self._conversation = Conversation(system)
        self._said: list[dict[str, Any]] = []
        self._save_to = save
        self._saved: Path | None = None

    def greeting(self) -> str:
        return (
            f"{self._speaker.name}: a context of {self._speaker.block_size} tokens. "
            "Say something.\n/help shows the commands; Ctrl-C stops an answer, Ctrl-D leaves."
        )

    def _command(self, name: str, rest: str, read: Callable[[], str]) -> bool:
        if name == "/system":
            self._system(rest)
        elif name == "/again":
            self._again()
        elif name == "/new":
            self._conversation.turns = []
            self._said = []
            self._say("what was said is forgotten")
        elif name == "/history":
            self._history()
        elif name == "/save":
            if rest:
                self._save(Path(rest).expanduser())
                self._say(f"saved as {self._saved}")
            else:
                self.complain("/save needs the name of a file, as /save talk.json")
        else:
            return super()._command(name, rest, read)
        return True

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text.lower() == "none" else text
            self._conversation.turns = []
            self._said = []
            self._say("a new conversation begins with that")
        elif self._conversation.system is None:
            self._say("the model is told what its chat template has for that, if it has anything")
        else:
            print(self._clean(self._conversation.system))

    def _history(self) -> None:
        messages = self._conversation.messages()
        for turn in messages:
            print(f"{dim(turn.role + ':', self._colour)} {self._clean(turn.content)}")
        if not messages:
            self._say("nothing was said yet")

    # Answers

    def _text(self, text: str) -> None:
        before = list(self._conversation.turns)
        self._conversation.turns.append(Turn(USER, text))
        self._said.append({"role": USER, "content": text})
        try:
            self._answer()
        except UserError:  # it is as if it had not been said
            self._conversation.turns = before
            self._said.pop()
            raise

    def _again(self) -> None:
        before = list(self._conversation.turns)
        if self._conversation.unanswered() is None:
            self.complain("nothing was said yet; say something first")
            return
        try:
            self._answer()
        except UserError:
            self._conversation.turns = before
            raise

    def _answer(self) -> None:
        """Answer the last turn, and remember the answer as far as it came.

        Raises:
            UserError: it cannot be answered; nothing was said then.
        """
        params = self._params_of_a_text()
        ids, forgotten = self._conversation.prompt(
            self._encode, self._speaker.block_size, params.max_tokens
        )
        if forgotten:
            self._note(f"the context is full: the {forgotten} oldest turns are forgotten")
        heard = Transcript(ids, params, len(ids))
        with interruptible() as pressed:
            # A second Ctrl-C, in a step that takes long, is a KeyboardInterrupt.
            with (
                contextlib.suppress(KeyboardInterrupt),
                contextlib.closing(self._bits(ids, params)) as bits,
            ):
                for bit in until(bits, pressed):
                    heard.text += bit.text
                    heard.made += bit.made
                    heard.finish_reason, heard.matched_stop = bit.finish_reason, bit.matched_stop
                    write(self._clean(bit.text))
            stopped = pressed() and heard.finish_reason is None
        write("\n")
        self._remember(heard)
        self._below(heard, stopped)
        if self._save_to is not None:
            self._save(self._save_to)

    def _bits(self, ids: list[int], params: SamplingParams) -> Generator[Bit, None, None]:
        """The answer, ended by a token that ends turns; its name is no part of it."""
        with contextlib.closing(self._speaker.answer(ids, params)) as bits:
            for bit in bits:
                end = next((i for i, m in enumerate(bit.made) if m.token in self._ends), None)
                if end is None or bit.finish_reason is not None:  # it is over without us
                    yield bit
                    continue
                name = self._tokenizer.token_bytes(bit.made[end].token).decode()
                text = bit.text.rpartition(name)[0] if name in bit.text else bit.text
                yield Bit(text, bit.made[: end + 1], FinishReason.END_OF_TEXT)
                return

    def _remember(self, heard: Transcript) -> None:
        if not heard.made:
            return
        special = {token: name for name, token in self._tokenizer.special.items()}
        made = [special[m.token] for m in heard.made if m.token in special]
        # Only where all that stand in the text were made: of others nobody knows which was which.
        own = {name for name in made if heard.text.count(name) == made.count(name)}
        self._last = heard
        self._conversation.turns.append(Turn(ASSISTANT, heard.text, frozenset(own)))
        if self._said and self._said[-1]["role"] == ASSISTANT:  # /again
            self._said.pop()
        reason = heard.finish_reason and heard.finish_reason.value
        answer = {"content": heard.text, "finish_reason": reason, "seed": heard.params.seed}
        self._said.append({"role": ASSISTANT, **answer})

    def _below(self, heard: Transcript, stopped: bool) -> None:
        """What stands below an answer that did not end by itself, and its probabilities."""
        if stopped:
            self._note("stopped; /again answers once more")
        elif heard.finish_reason is FinishReason.LENGTH:
            full = len(heard.made) != heard.params.max_tokens
            why = "the context is full" if full else f"cut at max_tokens {len(heard.made)}"
            self._note(why)
        if heard.params.logprobs is not None:
            write(table(heard.made, self._tokenizer, colour=self._colour))

    def _note(self, message: str) -> None:
        """Something about an answer: beside it on a terminal, and not among answers in a file."""
        if sys.stdout.isatty():
            self._say(message)
        else:
            print(f"note: {message}", file=sys.stderr)

    def _save(self, path: Path) -> None:
        """Raises UserError: a file that somebody else made, or the disk refuses."""
        if path.exists() and path != self._saved:
            raise UserError(f"{path} exists; give the name of a new file")
        system = self._conversation.system
        told = [] if system is None else [{"role": SYSTEM, "content": system}]
        talk = {"model": self._speaker.name, "messages": [*told, *self._said]}
        text = json.dumps(talk, ensure_ascii=False, indent=2) + "\n"
        try:
            write_atomically(path, text.encode("utf-8", errors="backslashreplace"))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from None
        self._saved = path
