"""Many prompts from a file, many results into another: `antiphon sample --input`.

Several texts are made side by side; as one is over the next joins. Results come out in the order of
the input, and each says what it was made of. What is in memory does not grow with the input.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from gpt.errors import DataError, PromptError, UserError
from gpt.journal import Done, Journal, dumps, output_file
from gpt.params import MAX_SEED, SamplingParams
from gpt.prompts import Format, LineReader, Nothing, Prompt, PromptReader
from gpt.sequence import Sequence
from gpt.transcript import Transcript

if TYPE_CHECKING:
    import torch

    from gpt.checkpoint import LoadedModel
    from gpt.generate import Texts

    Open = Callable[[], tuple[LoadedModel, torch.dtype, torch.device]]

AHEAD = 8
"""Results kept back for the sake of the order are at most this many batches."""

CACHE_BYTES = 2**31
"""Most bytes of the KV cache, unless a single context takes more."""


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
                ids = self._loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
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
        """Raises PromptError."""
        seed = prompt.settings.get("seed", seed_of(self._base.seed, prompt.index))
        settings = prompt.settings | {"seed": seed_of(seed, self._choice)}
        params = replace(self._base, **settings)
        sequence = Sequence.start(
            ids,
            params,
            block_size=self._loaded.model.config.block_size,
            n_vocab=self._loaded.tokenizer.n_vocab,
            eot=self._loaded.tokenizer.eot,
        )
        transcript = Transcript(prompt.prompt, params, sequence.prompt_len, self._choice)
        return sequence, Entry(prompt, transcript)

    def _step(self) -> None:
        for sequence, piece in self._texts.step():
            entry = self._making[sequence]
            if piece is None:
                entry.error = "the model's logits for this text are not finite numbers"
            else:
                assert entry.transcript is not None
                entry.transcript.add(piece)
                self.tokens += 1
            if piece is None or piece.finish_reason is not None:
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


# The command


def run_file(args: argparse.Namespace, base: SamplingParams, open_model: Open) -> int:
    """Run `antiphon sample --input`. Returns the exit status: 1 if a line could not be used.

    Raises:
        UserError: the input cannot be read, the output not written, or it is of another run.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_open(args.input))
        kind: Format = args.input_format or _format(args.input)
        digest, total = (None, None) if args.input == "-" else _look_through(file)
        if total == 0:
            raise DataError(f"{args.input} has no prompts; give one on each line")
        output = None if args.output is None else output_file(args.output)
        if output is not None and _same_file(file, output):
            raise DataError(f"{output} is the input; the results need a file of their own")
        loaded, dtype, device = open_model()
        journal, skip = None, (0, 0)
        if output is not None:
            identity = _identity(args, base, loaded, digest)
            journal = stack.enter_context(
                Journal(output, identity, base.seed, overwrite=args.overwrite)
            )
            base = replace(base, seed=journal.identity["seed"])
            skip = _after(journal.done, args.num_samples)
            if skip != (0, 0) and digest is None:
                raise DataError(
                    f"{output} has results, and whether standard input is the same as then cannot "
                    "be known; put the prompts into a file, or give --overwrite to begin again"
                )
        from gpt.generate import Texts

        batch = Batch(
            loaded,
            Texts(
                loaded.model,
                loaded.tokenizer,
                _pages(loaded, args.batch_size, dtype),
                dtype=dtype,
                device=device,
            ),
            PromptReader(LineReader(file.fileno()), kind, base),
            base,
            size=args.batch_size,
            num_samples=args.num_samples,
            skip=skip,
        )
        done = Done() if journal is None else journal.done
        report = stack.enter_context(Report(total, skip[0], done, batch, printing=output is None))
        try:
            for prompt, record in batch.results():
                if journal is None:
                    sys.stdout.buffer.write(dumps(record))
                    sys.stdout.buffer.flush()
                else:
                    journal.add(dumps(record))
                report.add(prompt, "error" in record)
        except KeyboardInterrupt:
            if journal is not None:
                report.say(f"stopped; give the same command again to go on with {output}")
            raise
        report.say(report.summary(output))
        return 1 if report.errors else 0


class Report:
    """Progress on stderr: a bar on a terminal, and a summary.

    Args:
        total: prompts of the input, if that is known.
        skipped: prompts done by an earlier run.
        printing: whether the results go to stdout; if that is a terminal there is no bar, since
            the two would write into each other.
    """

    def __init__(
        self, total: int | None, skipped: int, done: Done, batch: Batch, *, printing: bool
    ) -> None:
        self.results, self.errors = done.results, done.errors
        self._batch = batch
        self._new = 0
        self._begun = time.monotonic()
        self._seen = skipped - 1
        self._bar = tqdm(
            total=total,
            initial=skipped,
            unit="prompt",
            disable=True if printing and sys.stdout.isatty() else None,
            dynamic_ncols=True,
            smoothing=0.1,
            file=sys.stderr,
        )

    def add(self, prompt: Prompt, failed: bool) -> None:
        self._new += 1
        self.errors += failed
        self.results += not failed
        if prompt.index > self._seen:
            self._bar.update(prompt.index - self._seen)
            self._seen = prompt.index
        self._bar.set_postfix_str(f"{self._rate():,.0f} tokens/s", refresh=False)

    def _rate(self) -> float:
        return self._batch.tokens / max(1e-9, time.monotonic() - self._begun)

    def summary(self, output: Path | None) -> str:
        where = "" if output is None else f" in {output}"
        if self._new == 0:
            return f"nothing to do: {self.results:,} results are{where or ' there'} already"
        seconds = time.monotonic() - self._begun
        text = (
            f"{self.results:,} results{where}; {self._batch.tokens:,} tokens in {seconds:.1f} s "
            f"({self._new / seconds:.1f} results/s, {self._rate():,.0f} tokens/s)"
        )
        if self.errors:
            lines = "line" if self.errors == 1 else "lines"
            text += f'; {self.errors:,} {lines} with "error" in place of a text'
        return text

    def say(self, message: str) -> None:
        self._bar.close()
        print(message, file=sys.stderr)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _open(name: str) -> BinaryIO:
    try:
        return open(0 if name == "-" else name, "rb", buffering=0, closefd=name != "-")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"cannot read {name}: {reason}; give a file with prompts, or -") from None


def _format(name: str) -> Format:
    return "jsonl" if name == "-" or Path(name).suffix in (".jsonl", ".ndjson", ".json") else "txt"


def _look_through(file: BinaryIO) -> tuple[str | None, int | None]:
    """Fingerprint of the content and number of prompts; None for what can be read only once."""
    if not file.seekable():
        return None, None
    digest = hashlib.blake2b(digest_size=16)
    prompts, begun = 0, False
    while data := file.read(2**20):
        digest.update(data)
        *whole, rest = data.split(b"\n")
        for line in whole:
            prompts += begun or bool(line.strip())
            begun = False
        begun = begun or bool(rest.strip())
    file.seek(0)
    return digest.hexdigest(), prompts + begun


def _same_file(file: BinaryIO, output: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), output.stat())
    except (OSError, ValueError):
        return False


def _identity(
    args: argparse.Namespace, base: SamplingParams, loaded: LoadedModel, digest: str | None
) -> dict[str, Any]:
    """What the results depend on. The size of the batch and the device are only rounding."""
    settings = asdict(base) | {"stop": list(base.stop)}
    return {
        "format": "antiphon-batch/1",
        "input": digest,
        "model": _weights(loaded.path),
        "dtype": args.dtype,
        "num_samples": args.num_samples,
        **settings,
        "seed": args.seed,  # not the one that is drawn where none was given
    }


def _weights(path: Path) -> str:
    """A fingerprint of the file that holds the weights."""
    from gpt.checkpoint import WEIGHTS_FILE

    found = next(
        file
        for file in (path, path / WEIGHTS_FILE, path / "model" / WEIGHTS_FILE)
        if file.is_file()
    )
    digest = hashlib.blake2b(digest_size=16)
    with open(found, "rb") as file:
        while data := file.read(2**22):
            digest.update(data)
    return digest.hexdigest()


def _after(done: Done, num_samples: int) -> tuple[int, int]:
    """The prompt, and the text for it, that come after the last result."""
    if done.last is None:
        return 0, 0
    index, choice = done.last.get("index"), done.last.get("choice")
    if not isinstance(index, int):
        raise DataError("the last line of the output has no index; give --overwrite to begin again")
    if not isinstance(choice, int) or choice + 1 >= num_samples:
        return index + 1, 0
    return index, choice + 1


def _pages(loaded: LoadedModel, size: int, dtype: torch.dtype) -> int:
    """Pages for `size` full contexts, or for as many as may be held in memory, at least one."""
    from gpt.cache import PAGE_SIZE, KVCache
    from gpt.pages import pages_for

    config = loaded.model.config
    context = pages_for(config.block_size, PAGE_SIZE)
    most = CACHE_BYTES // KVCache.page_bytes(config, PAGE_SIZE, dtype)
    return 1 + max(context, min(size * context, most))
