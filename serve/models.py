"""The models that are served, by name. Belongs to the event loop.

Whoever answers a request holds the model that he began with, and so ends with it, whatever has
taken its place meanwhile:

    put(new) ─▶ found by name from here on
         └──▶ old: nobody new, `unused` once the last has let go of it
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpt.errors import UserError
from serve.lane import Lane
from serve.requests import MAX_TEXT_BYTES, SequenceReader
from serve.tokens import TokenReader

if TYPE_CHECKING:  # not at run time: the port is bound before torch, which takes seconds, is loaded
    from serve.engine import Engine


class UnknownModelError(UserError):
    """The request is for a model that is not served here."""

    def __init__(self, served: list[str], asked: str) -> None:
        names = ", ".join(map(repr, served))
        verb = "is" if len(served) == 1 else "are"
        super().__init__(f"{names} {verb} served here, not {asked[:100]!r}")


class Served:
    """A model that takes requests, and what reads them for it.

    To make one takes as long as to look at each token of the vocabulary: not for an event loop.

    Args:
        max_text_bytes: longest text that is tokenized.

    Attributes:
        users: requests that are being answered from it.
        reading: where they are checked and tokenized.
    """

    def __init__(self, engine: Engine, max_text_bytes: int = MAX_TEXT_BYTES) -> None:
        self.engine = engine
        self.sequences = SequenceReader(engine.tokenizer, engine.model.config, max_text_bytes)
        self.tokens = TokenReader(engine.name, engine.tokenizer, max_text_bytes)
        self.users = 0
        self.reading = Lane("antiphon-read")
        self._unused = asyncio.Event()
        self._unused.set()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keep the engine for as long as a request is answered from it."""
        self.users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self.users -= 1
            if not self.users:
                self._unused.set()

    async def unused(self) -> None:
        """Wait until nobody uses it."""
        await self._unused.wait()


class Models:
    """By their names; the first that was put is the default."""

    def __init__(self) -> None:
        self._served: dict[str, Served] = {}

    def put(self, new: Served) -> Served | None:
        """Serve this under its name, from the next request on. Returns what it replaces."""
        old = self._served.get(new.engine.name)
        self._served[new.engine.name] = new
        return old

    def find(self, name: str) -> Served:
        """The model that a request names; with an empty name the default.

        Raises:
            UnknownModelError: there is none of that name.
        """
        found = next(iter(self._served.values())) if not name else self._served.get(name)
        if found is None:
            raise UnknownModelError(self.names, name)
        return found

    @property
    def names(self) -> list[str]:
        """In alphabetical order."""
        return sorted(self._served)

    @property
    def engines(self) -> list[Engine]:
        """By their names, in alphabetical order."""
        return [self._served[name].engine for name in self.names]
