"""Many prompts from a file, many results into another: `antiphon sample --input`.

Opens the input, sees how far an earlier run came with the output, and adds to it what `gpt.batch`
makes, with progress on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from gpt.batch import Batch
from gpt.errors import DataError
from gpt.journal import Done, Journal, dumps, output_file
from gpt.params import SamplingParams
from gpt.prompts import Format, LineReader, Prompt, PromptReader

if TYPE_CHECKING:
    import torch

    from gpt.checkpoint import LoadedModel

    Open = Callable[[], tuple[LoadedModel, torch.dtype, torch.device]]

CACHE_BYTES = 2**31
"""Most bytes of the KV cache, unless a single context takes more."""


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
    settings = json.loads(json.dumps(asdict(base)))  # as it will be read
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


def _pages(loaded: LoadedModel, size: int, dtype: torch.dtype) -> list[int]:
    """Pages for `size` full contexts, or for as many as may be held in memory, at least one."""
    from gpt.cache import PAGE_SIZE
    from gpt.cachespec import CacheSpec
    from gpt.generate import PREFILL_CHUNK

    config = loaded.model.config
    spec = CacheSpec.of(config)

    def pools(texts: int, budget: float) -> list[int] | None:
        return spec.pool_sizes(
            config.block_size, page_size=PAGE_SIZE, itemsize=dtype.itemsize, texts=texts,
            chunk=PREFILL_CHUNK, budget=budget, together=False,
        )  # fmt: skip

    found = pools(size, CACHE_BYTES) or pools(1, math.inf)
    assert found is not None, "without a budget there is always room"
    return found
