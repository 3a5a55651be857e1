"""ChatTemplate: messages to text, by a Jinja template that nobody here has read.

It is rendered in a process of its own (`gpt.chat.sandbox`) that is ended when it takes too long.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gpt.chat.sandbox import MAX_OUTPUT
from gpt.errors import ChatTemplateError

MAX_SOURCE = 2**20
"""Bytes of a template; the longest in use have some 20,000."""
SECONDS = 10
"""How long rendering may take. It takes milliseconds; a busy machine may take a second."""
START_SECONDS = 120
"""How long a busy machine may take to start a Python."""
MEMORY = 2**29
"""Bytes of address space of the process that renders."""

START = (
    "import json, sys\n"
    "sys.path[:] = json.loads(sys.argv[1])\n"
    "from gpt.chat.sandbox import serve\n"
    "serve(int(sys.argv[2]), int(sys.argv[3]))\n"
)
"""The other process imports what this one would, wherever both were started."""

Message = Mapping[str, str]
"""`role` and `content`."""


def read_template(path: Path | str) -> str:
    """The template in a file.

    Raises:
        ChatTemplateError: not there, not text, or longer than templates are.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SOURCE + 1)
        if len(data) > MAX_SOURCE:
            raise ChatTemplateError(
                f"{path} is larger than {MAX_SOURCE:,} bytes; give a file with a template alone"
            )
        return data.decode("utf-8")
    except OSError as error:
        raise ChatTemplateError(
            f"cannot read the chat template {path}: {error.strerror or error}"
        ) from None
    except ValueError as error:
        what = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise ChatTemplateError(f"cannot read the chat template {path}: {what}") from None


class ChatTemplate:
    """A template, and the process that renders it. A context manager; leaving it ends the process.

    Args:
        source: Jinja, as the `chat_template` of Hugging Face models.
        variables: what it may use besides the messages, such as `bos_token`.
        seconds: how long rendering may take; then the process is ended.

    Raises:
        ChatTemplateError: no template, or longer than `MAX_SOURCE`.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str] | None = None, *, seconds: float = SECONDS
    ) -> None:
        if not source.strip():
            raise ChatTemplateError("the chat template is empty; give another one: --template FILE")
        if len(source) > MAX_SOURCE:
            raise ChatTemplateError(
                f"the chat template has {len(source):,} characters, but may have {MAX_SOURCE:,}"
            )
        self.source = source
        self._variables = dict(variables or {})
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[bytes] = queue.Queue()

    def render(
        self, conversations: Sequence[Sequence[Message]], *, add_generation_prompt: bool = True
    ) -> list[str]:
        """The text of each conversation, all at the same moment of the template's clock.

        Args:
            add_generation_prompt: end with what makes the model answer.

        Raises:
            ChatTemplateError: the template is broken, takes too long, wants too much, or refuses
                the messages.
        """
        shared = {**self._variables, "add_generation_prompt": add_generation_prompt}
        shared |= {"tools": None, "documents": None}
        request = {
            "source": self.source,
            "requests": [{**shared, "messages": list(each)} for each in conversations],
            "now": time.time(),
        }
        if self._process is None:
            self._start()
        answer = self._ask(json.dumps(request).encode() + b"\n")
        if "texts" in answer:
            return [str(text) for text in answer["texts"]]
        # A stranger's words: one line, and nothing that commands a terminal.
        why = "".join(char if char.isprintable() else " " for char in str(answer["error"]))
        if answer["kind"] == "refused":
            raise ChatTemplateError(f"the chat template refuses these messages: {why}")
        self.close()  # whatever state it is in
        raise ChatTemplateError(f"the chat template cannot be used: {why}")

    def close(self) -> None:
        """End the process. A later `render` starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):  # what was not written has nowhere to go
                    pipe.close()
            self._process = None

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        seconds = str(max(1, int(self._seconds)))
        command = [sys.executable, "-c", START, json.dumps(sys.path), seconds, str(MEMORY)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._lines = queue.Queue()
        # A pipe cannot be waited at with a limit everywhere; a thread can.
        reader = threading.Thread(
            target=_read, args=(self._process.stdout, self._lines), daemon=True
        )
        reader.start()
        try:
            ready = self._lines.get(timeout=START_SECONDS)
        except queue.Empty:
            ready = b""
        if ready != b"ready\n":
            self.close()
            raise ChatTemplateError(
                "the process that renders chat templates does not start; is jinja2 installed? "
                "(pip install 'jinja2>=3.1.6')"
            )

    def _ask(self, line: bytes) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
            answer = self._lines.get(timeout=self._seconds)
        except OSError:
            answer = b""
        except queue.Empty:
            return _failed(f"it is not done after {self._seconds:g} seconds; does it loop?")
        if not answer.endswith(b"\n"):
            return _failed("it ended the process that rendered it; it wants too much")
        found: dict[str, Any] = json.loads(answer)
        return found


def _failed(why: str) -> dict[str, Any]:
    return {"kind": "failed", "error": why}


def _read(pipe: Any, lines: queue.Queue[bytes]) -> None:
    """Hand on lines until the pipe ends; the end is an empty one."""
    # JSON may write a character as twelve bytes; a few texts come in one line.
    longest = 4 * 12 * MAX_OUTPUT
    with contextlib.suppress(OSError, ValueError):
        while line := pipe.readline(longest):
            lines.put(line)
    lines.put(b"")
