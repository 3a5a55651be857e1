"""The processes of `antiphon bench serve`: what is loaded, and the workers that load it."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpt.errors import ServerError
from serve.bench.drive import Seen
from serve.child import stop

Progress = Callable[[dict[str, Any]], None]


class Worker:
    """`serve.bench.worker` in a process of its own.

    Args:
        told: what it is told first, on its standard input: what has a key in it is no argument.

    Attributes:
        served: what it says of the model.
    """

    def __init__(self, process: subprocess.Popen[str], told: dict[str, Any] | None) -> None:
        self._process = process
        if told is not None:
            self._tell(told)
        self.served: dict[str, Any] = self._next("ready", lambda progress: None)

    def run(self, job: dict[str, Any], progress: Progress) -> Seen:
        """Carry out a job.

        Raises:
            ServerError: the worker ended instead; what it said is on standard error.
        """
        self._tell(job)
        return Seen.from_dict(self._next("seen", progress))

    def _tell(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ServerError("the process that loads ended early") from None

    def _next(self, kind: str, progress: Progress) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "error" in message:
                raise ServerError(message["error"])
            if "progress" in message:
                progress(message["progress"])
            if kind in message:
                found: dict[str, Any] = message[kind]
                return found
        raise ServerError("the process that loads ended early")


@contextlib.contextmanager
def worker(kind: str, *arguments: str, told: dict[str, Any] | None = None) -> Iterator[Worker]:
    """A worker that does not outlive the block. What it logs is shown if it fails."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "serve.bench.worker", kind, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
        )
        try:
            yield Worker(process, told)
        except ServerError:
            stop(process)
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            stop(process)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()


@contextlib.contextmanager
def random_model(preset: str, seed: int) -> Iterator[Path]:
    """A folder with a model of random weights, for as long as the block lasts. Its vocabulary is
    of the preset's size; a preset without one has that of bytes.

    Raises:
        ConfigError: there is no such preset.
    """
    import torch

    from gpt.checkpoint import save_model
    from gpt.config import GPTConfig
    from gpt.model import GPT
    from gpt.tokenizer import Tokenizer

    size = GPTConfig.preset(preset).vocab_size
    tokenizer = made_up_tokenizer(size) if size else Tokenizer.bytes()
    torch.manual_seed(seed)
    model = GPT(GPTConfig.preset(preset, vocab_size=tokenizer.n_vocab)).eval()
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as folder:
        path = Path(folder) / preset
        save_model(path, model, tokenizer)
        del model
        yield path


def made_up_tokenizer(size: int) -> Any:
    """A vocabulary of so many tokens: all bytes, short words of letters, and end-of-text."""
    from gpt.splitting import GPT4_PATTERN
    from gpt.tokenizer import Tokenizer

    letters = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    words = (bytes(word) for n in (2, 3, 4) for word in itertools.product(letters, repeat=n))
    tokens = [*(bytes([byte]) for byte in range(256)), *itertools.islice(words, size - 257)]
    return Tokenizer("bpe", GPT4_PATTERN, tokens)
