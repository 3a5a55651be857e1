"""Interactive sampling: one prompt after another at a terminal, with the model loaded once.

A line is a prompt; a line that begins with `/` is a command. Ctrl-C stops the text that is being
made, Ctrl-D leaves. Without a terminal the lines are read as they come, which is good for scripts.
"""

from __future__ import annotations

import codecs
import contextlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import FrameType

import torch

from gpt.checkpoint import LoadedModel
from gpt.errors import SamplingError, UserError
from gpt.generate import Piece, generate
from gpt.line_input import line_input
from gpt.params import SamplingParams, brief, random_seed
from gpt.sample import MAX_SAMPLES, show
from gpt.settings import SETTINGS, from_text, nearest, shown
from gpt.stream import FinishReason
from gpt.terminal import dim, printable, red, shows_colour
from gpt.tokenizer import Tokenizer
from gpt.transcript import Transcript, table

COMMANDS = {
    "/help": "show this",
    "/set NAME VALUE": "change a setting, as /set temperature 0.7; /set alone lists them",
    "/show": "show the settings that are not at their defaults",
    "/reset": "all settings as they were at the start",
    "/seed [N | random]": "show the last text's seed; keep to N; draw a new one for each text",
    "/again": "continue the last prompt once more",
    "/more": "go on with the last text",
    "/new": "start a new document, without a prompt",
    "/multi": "a prompt of several lines, up to an empty line or one with a dot alone",
    "/quit": "leave, as Ctrl-D does",
}
NAMES = [usage.split()[0] for usage in COMMANDS]

NOT_UTF8 = "the line is not UTF-8; check the terminal's encoding"

NUM_SAMPLES = "num_samples"
"""Can be set like the sampling settings: how many texts a prompt gets."""
NUM_SAMPLES_HELP = "texts to make for each prompt (default: 1)"
NUM_SAMPLES_ALLOWED = f"a whole number from 1 to {MAX_SAMPLES}"


def run(session: Session) -> int:
    """Ask for lines until there are no more. Returns the exit status."""
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if on_terminal:
        print(session.greeting())
    with line_input(completions) as read:
        while True:
            try:
                line = read("> ")
            except EOFError:
                if on_terminal:
                    print()
                return 0
            except KeyboardInterrupt:  # as in a shell: what was typed is dropped
                print("\n(Ctrl-D or /quit leaves)")
                continue
            except UnicodeDecodeError:
                session.complain(NOT_UTF8)
                continue
            try:
                if not session.take(line, lambda: read("… ")):
                    return 0
            except KeyboardInterrupt:
                print()


def completions(line: str) -> list[str]:
    """Lines that begin like this one: commands and names of settings."""
    settings = [*SETTINGS, NUM_SAMPLES]
    lines = [*NAMES, *(f"/set {name} " for name in settings)]
    return [whole for whole in lines if line.startswith("/") and whole.startswith(line)]


class Session:
    """What is set and what was said last. Mistakes are shown, never raised.

    Args:
        seed: for every text; None: a new one each time.
        dtype, device: of the KV cache; the model's own.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        params: SamplingParams,
        seed: int | None,
        num_samples: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._loaded = loaded
        self._params = params
        self._seed = seed
        self._num_samples = num_samples
        self._start = (params, seed, num_samples)
        self._dtype = dtype
        self._device = device
        self._colour = shows_colour(sys.stdout)
        self._clean = printable if sys.stdout.isatty() else str
        self._prompt: list[int] | None = None
        self._last: Transcript | None = None

    def greeting(self) -> str:
        model = self._loaded.model
        return (
            f"{self._loaded.name}: {model.num_params():,} parameters, context of "
            f"{model.config.block_size} tokens. Type a text to have it continued.\n"
            "/help shows the commands; Ctrl-C stops a text, Ctrl-D leaves."
        )

    def complain(self, message: str) -> None:
        print(f"{red('error', shows_colour(sys.stderr))}: {message}", file=sys.stderr)

    def take(self, line: str, read: Callable[[], str]) -> bool:
        """Do what a line says; False: leave.

        Args:
            read: gives further lines, for `/multi`; raises EOFError after the last.
        """
        try:
            if line.startswith("/") and not line.startswith("//"):
                name, _, rest = line.partition(" ")
                return self._command(name, rest.strip(), read)
            if line.strip():
                self._continue(line[1:] if line.startswith("//") else line)
        except SamplingError as error:
            for field, description in error.violations:
                name = field.partition("[")[0]  # of several stop strings it says which
                self.complain(f"{field}: {description}; it stays {self._value(name)}")
        except UserError as error:
            self.complain(str(error))
        except UnicodeDecodeError:  # a further line
            self.complain(NOT_UTF8)
        except ValueError as error:  # nothing that is typed shall end the session
            self.complain(f"that cannot be done: {error}")
        return True

    # Commands

    def _command(self, name: str, rest: str, read: Callable[[], str]) -> bool:
        if name == "/quit":
            return False
        if name == "/help":
            self._help()
        elif name == "/set":
            self._set(rest)
        elif name == "/show":
            self._show()
        elif name == "/reset":
            self._params, self._seed, self._num_samples = self._start
            self._say("all settings are as they were at the start")
        elif name == "/seed":
            self._seed_command(rest)
        elif name == "/again" and self._prompt is not None:
            self._make(self._prompt, self._text(self._prompt))
        elif name == "/more" and self._last is not None:
            self._make(self._whole_text(self._last), "")
        elif name in ("/again", "/more"):
            self.complain("nothing was made yet; type a prompt first, or /new")
        elif name == "/new":
            self._make(self._loaded.tokenizer.prompt(""), "")
        elif name == "/multi":
            self._continue("\n".join(lines_of(read)))
        else:
            near = nearest(name, NAMES)
            hint = f"did you mean {near}?" if near else "/help lists them"
            self.complain(f"unknown command {name!r}; {hint} (a prompt may begin with //)")
        return True

    def _help(self) -> None:
        columns = max(map(len, COMMANDS))
        for usage, what in COMMANDS.items():
            print(f"  {usage:{columns}}  {what}")
        print("Any other line is a prompt; // at its beginning stands for one slash.")
        print("Ctrl-C stops the text that is being made, Ctrl-D leaves.")

    def _set(self, rest: str) -> None:
        name, _, text = rest.replace("=", " ", 1).partition(" ")
        if not name:
            self._list()
            return
        known = [*SETTINGS, NUM_SAMPLES]
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
            self.complain(f"unknown setting {name!r}; {hint}")
            return
        text = text.strip()
        if text:
            self._change(name, text)
        print(f"{name} = {self._value(name)}" + ("" if text else f" ({self._allowed(name)})"))

    def _change(self, name: str, text: str) -> None:
        """Raises SamplingError: no value for this setting."""
        if name == NUM_SAMPLES:
            # Of a long number Python would refuse to read the digits.
            number = int(text) if text.isdecimal() and len(text) < 10 else 0
            if not 1 <= number <= MAX_SAMPLES:
                raise SamplingError([(name, f"{brief(text)!r} is not {NUM_SAMPLES_ALLOWED}")])
            self._num_samples = number
        elif name == "seed":
            value = None if text == "random" else from_text(name, text)
            if value is not None:
                replace(self._params, seed=value)  # checks it
            self._seed = value
        else:
            self._params = replace(self._params, **{name: from_text(name, text)})

    def _seed_command(self, rest: str) -> None:
        if rest:
            self._change("seed", rest)
        if rest or self._last is None:
            print(f"seed = {self._value('seed')}")
        else:
            print(f"the last text had seed {self._last.params.seed}")

    def _value(self, name: str) -> str:
        if name == NUM_SAMPLES:
            return str(self._num_samples)
        if name == "seed":
            return "random" if self._seed is None else str(self._seed)
        return shown(name, getattr(self._params, name))

    def _allowed(self, name: str) -> str:
        if name == NUM_SAMPLES:
            return NUM_SAMPLES_ALLOWED
        setting = SETTINGS[name]
        none = ", or random" if name == "seed" else ", or none" if setting.optional else ""
        return setting.allowed + none

    def _list(self) -> None:
        helps = {name: setting.help for name, setting in SETTINGS.items()}
        helps[NUM_SAMPLES] = NUM_SAMPLES_HELP
        columns = max(map(len, helps))
        for name, what in helps.items():
            print(f"  {name:{columns}}  {self._value(name):>6}  {dim(what, self._colour)}")

    def _show(self) -> None:
        defaults = SamplingParams()
        changed = [name for name in SETTINGS if name != "seed"]
        changed = [n for n in changed if getattr(self._params, n) != getattr(defaults, n)]
        changed += ["seed"] if self._seed is not None else []
        changed += [NUM_SAMPLES] if self._num_samples != 1 else []
        for name in changed:
            print(f"{name} = {self._value(name)}")
        if not changed:
            self._say("all settings are at their defaults; /set lists them")

    # Texts

    def _continue(self, prompt: str) -> None:
        self._make(self._loaded.tokenizer.prompt(prompt), prompt)

    def _make(self, ids: list[int], head: str) -> None:
        """Continue `ids` and print the text behind `head`, until it is over or Ctrl-C comes.

        Raises:
            PromptError, CheckpointError: as `generate`.
        """
        params = replace(self._params, seed=random_seed() if self._seed is None else self._seed)
        samples = [
            Transcript(head, params, max(1, len(ids)), choice)
            for choice in range(self._num_samples)
        ]
        pieces = generate(
            self._loaded.model,
            self._loaded.tokenizer,
            ids,
            params,
            num_samples=self._num_samples,
            dtype=self._dtype,
            device=self._device,
        )
        with interruptible() as pressed:
            # A second Ctrl-C, in a step that takes long, is a KeyboardInterrupt.
            with contextlib.suppress(KeyboardInterrupt):
                show(
                    until(pieces, pressed),
                    samples,
                    _write,
                    after=self._after,
                    colour=self._colour,
                    clean=self._clean,
                )
            stopped = pressed()
        self._prompt = ids
        # The one that stands last on the screen: of several all are made at the same time.
        last = next((s for s in samples if s.finish_reason is None), samples[-1])
        if last.made:
            self._last = replace(last, prompt=ids)
        if stopped:
            _write("\n")
            if any(sample.finish_reason is None for sample in samples):
                self._say("stopped; /more goes on, /again begins once more")

    def _text(self, ids: list[int]) -> str:
        """The text of a prompt, without the token that begins it."""
        tokenizer = self._loaded.tokenizer
        begins = tokenizer.begin is not None and ids[:1] == [tokenizer.start]
        return tokenizer.decode(ids[1:] if begins else ids)

    def _after(self, sample: Transcript) -> str:
        """What stands below a text that is over."""
        note = ""
        if sample.finish_reason is FinishReason.END_OF_TEXT:
            note = "(end of text)"
        elif sample.finish_reason is FinishReason.STOP:
            note = f"(before {sample.matched_stop!r})"
        elif len(sample.made) != sample.params.max_tokens:
            note = f"(the context of {self._loaded.model.config.block_size} tokens is full)"
        below = dim(note, self._colour) + "\n" if note else ""
        if sample.params.logprobs is not None:
            below += table(sample.made, self._loaded.tokenizer, colour=self._colour)
        return below

    def _whole_text(self, last: Transcript) -> list[int]:
        """Prompt and text of a sample, as the prompt of what follows it."""
        tokenizer = self._loaded.tokenizer
        assert not isinstance(last.prompt, str)
        prompt = list(last.prompt)
        held = last.finish_reason is None and last.params.stop
        if held or last.finish_reason is FinishReason.STOP:  # its tokens go beyond the text
            return prompt + tokenizer.encode(last.text, after="text")
        made = [m.token for m in last.made if m.token not in tokenizer.end_ids]
        return prompt + whole_characters(made, tokenizer)

    def _say(self, message: str) -> None:
        print(dim(f"({message})", self._colour))


def lines_of(read: Callable[[], str]) -> Iterator[str]:
    """Lines up to an empty one, a dot, or the end."""
    with contextlib.suppress(EOFError):
        while (line := read()) not in ("", "."):
            yield line


def whole_characters(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids without those at the end that begin a character and do not complete it: the model
    shall begin it again, so that it is shown whole."""
    kept = list(ids)
    while kept:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # A character has at most four bytes; what stands before the last few tokens is complete.
        decoder.decode(tokenizer.decode_bytes(kept))
        if not decoder.getstate()[0]:
            break
        kept.pop()
    return kept


def until(pieces: Iterable[Piece], pressed: Callable[[], bool]) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        if pressed():
            return


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C set a mark that is looked at between two tokens; a second one interrupts at once.

    Yields:
        A function that says whether it was pressed.
    """
    presses = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, before)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
