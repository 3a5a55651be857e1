"""Batch: many prompts, several texts made side by side; as one is over the next joins.

Results come out in the order of the prompts, and each says what it was made of. What is in memory
does not grow with their number.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpt.errors import PromptError, UserError
from gpt.params import MAX_SEED, SamplingParams
from gpt.prompts import Nothing, Prompt, PromptReader
from gpt.sequence import Sequence
from gpt.starter import Starter
from gpt.transcript import Transcript

if TYPE_CHECKING:
    from gpt.checkpoint import LoadedModel
    from gpt.generate import Texts

AHEAD = 8
"""Results kept back for the sake of the order are at most this many batches."""


def seed_of(seed: int, number: int) -> int:
    """The seed of prompt or choice `number` under another seed, which is that of number 0.

    Runs with seeds 1, 2, 3 share nothing, as they would if numbers were added.
    """
    if number == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED


@dataclass(eq=False)
class Entry:
    """A line of the output: a text that is being made, or one that waits for its turn.

    Attributes:
        transcript: what has been made; None: it could not begin.
        error: why there is no text.
        over: whether nothing more will come.
    """

    prompt: Prompt
    transcript: Transcript | None = None
    error: str | None = None
    over: bool = False


class Batch:
    """Runs prompts side by side and gives their results in order.

    Args:
        texts: what they are made in.
        size: most texts at a time.
        base: the settings of the run; lines may have others. Its seed is that of the first prompt.
        num_samples: texts for each prompt.
        skip: the prompt, and the text for it, to begin with.

    Attributes:
        tokens: made so far.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        texts: Texts,
        reader: PromptReader,
        base: SamplingParams,
        *,
        size: int,
        num_samples: int = 1,
        skip: tuple[int, int] = (0, 0),
    ) -> None:
        self.tokens = 0
        self._loaded = loaded
        self._starter = Starter(loaded.model.config, loaded.tokenizer)
        self._texts = texts
        self._reader = reader
        self._base = base
        self._size = size
        self._num_samples = num_samples
        self._entries: deque[Entry] = deque()  # in the order of the output
        self._making: dict[Sequence, Entry] = {}
        self._waiting: tuple[Sequence, Entry] | None = None  # for pages
        self._prompt: tuple[Prompt, list[int]] | None = None  # has choices that have not begun
        self._choice = 0
        self._ended = False
        reader.skip(skip[0])
        self._first_choice = skip[1]

    def results(self) -> Iterator[tuple[Prompt, dict[str, Any]]]:
        """Each result as plain data, in order, as soon as those before it are over."""
        while True:
            self._fill()
            while self._entries and self._entries[0].over:
                entry = self._entries.popleft()
                yield entry.prompt, self._record(entry)
            if self._making:
                self._step()
            elif self._ended and not self._entries:
                return

    def _fill(self) -> None:
        """Let texts join while there is room for them, and for their results."""
        while len(self._making) < self._size and len(self._entries) < AHEAD * self._size:
            if self._waiting is None and not self._begin():
                return
            if self._waiting is None:
                continue  # it could not begin
            sequence, entry = self._waiting
            if not self._texts.add(sequence):
                return
            self._making[sequence] = entry
            self._waiting = None

    def _begin(self) -> bool:
        """Make the next text ready to join; False: there is none, or none yet."""
        if self._prompt is None:
            # Somebody who reads an answer before asking again must get it: no waiting with work.
            found = Nothing.MORE if self._ended else self._reader.next(wait=not self._entries)
            if isinstance(found, Nothing):
                self._ended = found is Nothing.MORE
                return False
            self._choice, self._first_choice = self._first_choice, 0
            try:
                if found.error is not None:
                    raise PromptError(found.error)
                prompt = found.prompt
                ids = self._starter.encode(prompt)
                self._prompt = (found, ids)
                sequence, entry = self._start(found, ids)
            except UserError as error:
                self._prompt = None
                self._entries.append(Entry(found, error=str(error), over=True))
                return True
        else:
            sequence, entry = self._start(*self._prompt)
        self._entries.append(entry)
        self._waiting = (sequence, entry)
        self._choice += 1
        if self._choice == self._num_samples:
            self._prompt = None
        return True

    def _start(self, prompt: Prompt, ids: list[int]) -> tuple[Sequence, Entry]:
        """Raises PromptError, SamplingError."""
        seed = prompt.settings.get("seed", seed_of(self._base.seed, prompt.index))
        settings = prompt.settings | {"seed": seed_of(seed, self._choice)}
        params = replace(self._base, **settings)
        sequence = self._starter.start(ids, params)  # its seed sets it apart
        transcript = Transcript(prompt.prompt, params, sequence.prompt_len, self._choice)
        return sequence, Entry(prompt, transcript)

    def _step(self) -> None:
        for sequence, piece in self._texts.step():
            entry = self._making[sequence]
            if isinstance(piece, UserError):
                entry.error = str(piece)
            else:
                assert entry.transcript is not None
                entry.transcript.add(piece)
                self.tokens += 1
            if isinstance(piece, UserError) or piece.finish_reason is not None:
                entry.over = True
                del self._making[sequence]

    def _record(self, entry: Entry) -> dict[str, Any]:
        prompt = entry.prompt
        if entry.error is not None:
            where: dict[str, Any] = {"index": prompt.index, "line": prompt.line}
            if entry.transcript is not None:
                where["choice"] = entry.transcript.choice
            return {"error": entry.error} | where | prompt.extra
        assert entry.transcript is not None
        record = entry.transcript.record(self._loaded.tokenizer)
        return {"index": prompt.index} | prompt.extra | record
