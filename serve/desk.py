"""Desk: the half of an engine that other threads call. Requests come here, and who asks is told
what is held.

    submit, score ──▶ queue, texts held ──▶ the engine's steps ──▶ let go
                              │                                      │
                        held, load, …                            departure

One lock guards all of it, and the engine never holds it during a step, so nobody who comes or asks
waits for the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
import threading
import time
from concurrent.futures import Future
from typing import Protocol

import torch

from gpt.generate import Model, text_of
from gpt.sequence import Sequence
from gpt.tokenizer import Tokenizer
from serve.asked import Asked
from serve.held import Held
from serve.observing import NOBODY, Load, Observer, text_end
from serve.reply import EngineStoppedError, Reply, Scored, ScoreReply, TextReply
from serve.results import Finish, ModelInfo
from serve.scheduler import Scheduler


class ServedModel(Model, Protocol):
    """What serving needs of a model; `gpt.model.GPT` is one."""

    def num_params(self) -> int: ...


class Desk:
    """The requests that an engine holds, and what is told of them.

    Args:
        model: any object with the model's interface.
        name: what the model is called to clients.
        dtype: of its weights and its cache.
        scheduler: the queue, and the pages.

    Attributes:
        ended: done when the engine's thread is; holds the exception if the engine itself failed.
        observer: whom it tells of steps and of texts that end.
        version: of the files that the model was read from; empty: it is of none.
    """

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        *,
        name: str,
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.dtype = dtype
        self.version = ""
        self.ended: Future[None] = Future()
        self.observer: Observer = NOBODY
        self._wake = threading.Condition()  # guards everything below
        self._scheduler = scheduler
        self._held: dict[Sequence, Held] = {}
        self._cancelled: list[Sequence] = []
        self._departures = 0
        self._awaiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._stopping = False
        self._ids = itertools.count(1)
        self._id_prefix = secrets.token_hex(4)

    def submit(self, asked: Asked) -> TextReply:
        """Take texts that are to be made, all of them or none. Called in an event loop, to which
        the reply then belongs.

        Raises:
            QueueFullError: as many as allowed are held already.
            PoolTooSmallError: the cache could never hold it.
            EngineStoppedError: the engine has ended.
        """
        sequences = asked.sequences
        first = sequences[0]
        reply = TextReply(
            self._mint_id(),
            first.prompt_len,
            first.params.seed,
            len(sequences),
            lambda: self._cancel(sequences),
        )
        self._hold(sequences, reply, asked.before, asked.time_limit)
        return reply

    def score(self, sequence: Sequence) -> ScoreReply:
        """Take a new sequence that is to be scored. It waits, and raises, as in `submit`."""
        reply = ScoreReply(self._mint_id(), lambda: self._cancel([sequence]))
        self._hold([sequence], reply)
        return reply

    def _mint_id(self) -> str:
        return f"{self._id_prefix}-{next(self._ids)}"

    def _hold(
        self,
        sequences: list[Sequence],
        reply: Reply,
        before: bytes = b"",
        time_limit: float | None = None,
    ) -> None:
        now = time.monotonic()
        held = [
            Held(
                sequence,
                self.tokenizer,
                text_of(sequence, self.tokenizer, before),
                reply,
                now,
                math.inf if time_limit is None else now + time_limit,
            )
            for sequence in sequences
        ]
        with self._wake:
            if self._stopping or self.ended.done():
                raise EngineStoppedError("the server is shutting down")
            self._scheduler.add(sequences, now)
            self._held.update(zip(sequences, held, strict=True))
            self._wake.notify()

    @property
    def info(self) -> ModelInfo:
        """What is told of the model that is served."""
        config = self.model.config
        return ModelInfo(
            name=self.name,
            block_size=config.block_size,
            vocab_size=self.tokenizer.n_vocab,
            parameter_count=self.model.num_params(),
            dtype=str(self.dtype).removeprefix("torch."),
            architecture={
                "n_layer": config.n_layer,
                "n_head": config.n_head,
                "n_kv_head": config.kv_heads,
                "d_model": config.d_model,
                "head_dim": config.head_width,
                "d_ff": config.mlp_width,
                "position": config.position,
                "pattern": ", ".join(config.patterns),
                "norm": config.norm,
                "mlp": config.mlp,
            },
            tokenizer_kind=self.tokenizer.kind,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            special_tokens=self.tokenizer.special,
            end_of_text_id=self.tokenizer.eot,
            version=self.version,
        )

    @property
    def held(self) -> int:
        """Requests running or waiting."""
        with self._wake:
            return len(self._scheduler)

    @property
    def capacity(self) -> int:
        """Most requests held at once."""
        return self._scheduler.capacity

    @property
    def departures(self) -> int:
        """How many sequences have left since the start."""
        return self._departures

    async def departure(self, seen: int) -> bool:
        """Wait until more than `seen` have left, or the engine has ended; False, at once, if nobody
        is held who could."""
        loop = asyncio.get_running_loop()
        left: asyncio.Future[None] = loop.create_future()
        with self._wake:
            if self._departures != seen or self.ended.done():
                return True
            if not self._held:
                return False
            self._awaiting.append((loop, left))
        if not self.ended.done():  # else it may have ended, which takes no lock, just before that
            await left
        return True

    @property
    def pages_used(self) -> int:
        """Pages of the cache that sequences hold now, over all groups of layers."""
        with self._wake:
            return self._scheduler.pages.used

    @property
    def load(self) -> Load:
        """What is held now."""
        with self._wake:
            scheduler, pages = self._scheduler, self._scheduler.pages
            return Load(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                waiting_tokens=sum(len(sequence.ids) for sequence in scheduler.waiting),
                pages_used=[pool.used for pool in pages.pools],
                pages=pages.capacity,
                page_size=pages.page_size,
                preemptions=scheduler.preemptions,
            )

    @property
    def preemptions(self) -> int:
        """How often a sequence had to give up its pages since the start."""
        with self._wake:
            return self._scheduler.preemptions

    def _cancel(self, sequences: list[Sequence]) -> None:
        with self._wake:
            held = [sequence for sequence in sequences if sequence in self._held]
            if held:
                self._cancelled.extend(held)
                self._wake.notify()

    def _forget(self, sequence: Sequence, end: Finish | Scored | Exception | None = None) -> None:
        """Let go of a text, held or not.

        Args:
            end: what its reply is told; None: nobody reads that any more.
        """
        if (held := self._held.pop(sequence, None)) is not None:
            self._scheduler.finish(sequence)
            self.observer.ended(text_end(self.name, held, end, time.monotonic()))
            self._departures += 1
            self._tell_awaiting()

    def _tell_awaiting(self) -> None:
        awaiting, self._awaiting = self._awaiting, []
        for loop, left in awaiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                loop.call_soon_threadsafe(_tell, left)


def _tell(left: asyncio.Future[None]) -> None:
    if not left.done():  # who waited may have given up
        left.set_result(None)
