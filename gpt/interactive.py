"""Interactive sampling: one prompt after another at a terminal, with the model loaded once.

A line is a prompt; a line that begins with `/` is a command (`gpt.session`).
"""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Callable
from dataclasses import replace

import torch

from gpt.checkpoint import LoadedModel
from gpt.errors import SamplingError
from gpt.generate import generate
from gpt.params import SamplingParams, brief
from gpt.sample import MAX_SAMPLES, show
from gpt.session import Session, interruptible, until, write
from gpt.stream import FinishReason
from gpt.terminal import dim
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

NUM_SAMPLES = "num_samples"
"""Can be set like the sampling settings: how many texts a prompt gets."""
NUM_SAMPLES_HELP = "texts to make for each prompt (default: 1)"
NUM_SAMPLES_ALLOWED = f"a whole number from 1 to {MAX_SAMPLES}"


class Continuation(Session):
    """Prompts that are continued.

    Args:
        seed: for every text; None: a new one each time.
        num_samples: texts for each prompt.
        dtype, device: of the KV cache; the model's own.
    """

    commands = COMMANDS
    a_text = "a prompt"

    def __init__(
        self,
        loaded: LoadedModel,
        params: SamplingParams,
        seed: int | None,
        num_samples: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(params, seed)
        self._loaded = loaded
        self._num_samples = self._samples_at_start = num_samples
        self._dtype = dtype
        self._device = device
        self._prompt: list[int] | None = None

    def greeting(self) -> str:
        model = self._loaded.model
        return (
            f"{self._loaded.name}: {model.num_params():,} parameters, context of "
            f"{model.config.block_size} tokens. Type a text to have it continued.\n"
            "/help shows the commands; Ctrl-C stops a text, Ctrl-D leaves."
        )

    def _command(self, name: str, rest: str, read: Callable[[], str]) -> bool:
        if name == "/again" and self._prompt is not None:
            self._make(self._prompt, self._shown(self._prompt))
        elif name == "/more" and self._last is not None:
            self._make(self._whole_text(self._last), "")
        elif name in ("/again", "/more"):
            self.complain("nothing was made yet; type a prompt first, or /new")
        elif name == "/new":
            self._make(self._loaded.tokenizer.prompt(""), "")
        else:
            return super()._command(name, rest, read)
        return True

    # How many texts a prompt gets is set like the sampling settings.

    def _settings(self) -> dict[str, str]:
        return super()._settings() | {NUM_SAMPLES: NUM_SAMPLES_HELP}

    def _change(self, name: str, text: str) -> None:
        if name != NUM_SAMPLES:
            super()._change(name, text)
            return
        # Of a long number Python would refuse to read the digits.
        number = int(text) if text.isdecimal() and len(text) < 10 else 0
        if not 1 <= number <= MAX_SAMPLES:
            raise SamplingError([(name, f"{brief(text)!r} is not {NUM_SAMPLES_ALLOWED}")])
        self._num_samples = number

    def _reset(self) -> None:
        super()._reset()
        self._num_samples = self._samples_at_start

    def _value(self, name: str) -> str:
        return str(self._num_samples) if name == NUM_SAMPLES else super()._value(name)

    def _allowed(self, name: str) -> str:
        return NUM_SAMPLES_ALLOWED if name == NUM_SAMPLES else super()._allowed(name)

    def _changed(self) -> list[str]:
        return super()._changed() + ([NUM_SAMPLES] if self._num_samples != 1 else [])

    # Texts

    def _text(self, text: str) -> None:
        self._make(self._loaded.tokenizer.prompt(text), text)

    def _make(self, ids: list[int], head: str) -> None:
        """Continue `ids` and print the text behind `head`, until it is over or Ctrl-C comes.

        Raises:
            PromptError, CheckpointError: as `generate`.
        """
        params = self._params_of_a_text()
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
                    write,
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
            write("\n")
            if any(sample.finish_reason is None for sample in samples):
                self._say("stopped; /more goes on, /again begins once more")

    def _shown(self, ids: list[int]) -> str:
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
