"""Engine: the one thread that owns torch. Schedule, step, hand out what was made; nothing else.

    submit ──▶ Scheduler ──▶ work ──▶ gpt.generate.step ──▶ serve.held ──▶ Reply (event loop)
                   ▲                          │
                   └──── finish, preempt ◀────┘

The scheduler is guarded by a lock that is never held during a step, so `submit` answers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Sequence as Seq
from concurrent.futures import Future, InvalidStateError
from typing import Protocol

import torch

from gpt.cache import PAGE_SIZE, KVCache
from gpt.generate import PREFILL_CHUNK, Model, step, text_of
from gpt.pages import CachePages
from gpt.params import NOT_FINITE, Made, SamplingParams
from gpt.sequence import Sequence
from gpt.starter import Starter
from gpt.tokenizer import Tokenizer
from serve.asked import Asked
from serve.faults import (
    GenerationFailedError,
    OutOfMemoryFaultError,
    StuckError,
    is_out_of_memory,
)
from serve.held import Event, Held, emit
from serve.memory import DEFAULT_SHARE, Pool, size_pool
from serve.observing import NOBODY, Load, Observer, text_end
from serve.pace import Pace
from serve.reply import EngineStoppedError, Reply, Scored, ScoreReply, TextReply
from serve.results import Finish, ModelInfo
from serve.scheduler import Scheduler

log = logging.getLogger(__name__)


class ServedModel(Model, Protocol):
    """What serving needs of a model; `gpt.model.GPT` is one."""

    def num_params(self) -> int: ...


class Engine:
    """Serves one model to many requests at once.

    Args:
        model: any object with the model's interface.
        name: what the model is called to clients.
        max_running: most sequences in one step.
        max_waiting: how many requests may wait beyond those.
        max_waiting_tokens: most tokens that those may have together; None: any number.
        n_pages: size of the KV cache in pages for each group of layers, the null page included;
            None sizes it for `max_running` full contexts within `kv_bytes`.
        kv_bytes: byte budget of the cache; None takes a share of the free memory.
        kv_share: that share, from 0 to 1.
        page_size: tokens a page holds.
        prefill_chunk: most prompt tokens of one sequence in one step.
        prefill_stretch: how many times as long a step may take while prompts are read beside texts
            that are being made (`serve.pace`); None: as long as a chunk takes. Where it is `fixed`
            there must be none, as texts would depend on the machine's speed.
        prefix_cache: whether a text may start from what others with the same beginning computed.
        dtype, device: of the cache; the model's own.
        fixed: texts do not depend on company, down to the last bit; the model must have been made
            ready for it (`gpt.deterministic`).
        check_every_step: verify pages and queues after every step, not only when idle.

    Attributes:
        ended: done when the engine's thread is; holds the exception if the engine itself failed.
        observer: whom it tells of steps and of texts that end.
        version: of the files that the model was read from; empty: it is of none.
        pool: how its cache was sized; None: it was given in pages.

    Raises:
        ServerError: the cache cannot hold even one full context.
    """

    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        *,
        name: str,
        max_running: int = 32,
        max_waiting: int = 256,
        max_waiting_tokens: int | None = None,
        n_pages: int | Seq[int] | None = None,
        kv_bytes: int | None = None,
        kv_share: float = DEFAULT_SHARE,
        page_size: int = PAGE_SIZE,
        prefill_chunk: int = PREFILL_CHUNK,
        prefill_stretch: float | None = None,
        prefix_cache: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        fixed: bool = False,
        check_every_step: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.dtype = dtype
        self.version = ""
        self.pool: Pool | None = None
        self._fixed = fixed
        self.ended: Future[None] = Future()
        self.observer: Observer = NOBODY
        if n_pages is None:
            pool = size_pool(
                model.config,
                page_size=page_size,
                dtype=dtype,
                device=torch.device(device),
                max_running=max_running,
                prefill_chunk=prefill_chunk,
                budget=kv_bytes,
                share=kv_share,
            )
            log.info("KV cache: %s", pool)
            n_pages = pool.n_pages
            self.pool = pool
        self._cache = KVCache(model.config, n_pages, page_size, dtype=dtype, device=device)
        self._wake = threading.Condition()  # guards everything below
        self._scheduler = Scheduler(
            CachePages(self._cache.spec.memories, n_pages, page_size, prefix_cache=prefix_cache),
            max_running=max_running,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            prefill_chunk=prefill_chunk,
            pace=None if prefill_stretch is None else Pace(prefill_stretch, prefill_chunk),
        )
        self._held: dict[Sequence, Held] = {}
        self._cancelled: list[Sequence] = []
        self._departures = 0
        self._awaiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._stopping = False
        self._stopped_because = "the server shut down before the text was complete"
        self._suspect = False  # a step has failed, and it is not known whether by its requests
        self._rounds = 0
        self._idle = True
        self._check_every_step = check_every_step
        self._ids = itertools.count(1)
        self._id_prefix = secrets.token_hex(4)
        self._thread = threading.Thread(target=self._run, name="antiphon-engine", daemon=True)

    # What other threads may call

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float | None = None, because: str = "") -> None:
        """End after the step that is running; requests still held get EngineStoppedError.

        Args:
            seconds: how long to wait for that step, after which the engine is given up (`give_up`);
                None: as long as it takes.
            because: what those requests are told, if it is not that the server shut down.
        """
        with self._wake:
            self._stopped_because = because or self._stopped_because
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)
            if self._thread.is_alive():
                told = EngineStoppedError(self._stopped_because)
                self.give_up("its last step did not end", told)

    def give_up(self, reason: str, told: Exception) -> None:
        """End without the engine's thread, which is stuck; for any other thread.

        Args:
            reason: what `ended` raises, as a StuckError.
            told: what the requests held are told.
        """
        self._stopping = True
        # Whoever is stuck may hold the lock. A copy of a dict's values needs none.
        left = list(self._held.values())
        emit(Event(held, end=told) for held in left)
        self._settle(StuckError(reason))

    @property
    def pulse(self) -> int | None:
        """A number that changes with every step; None while there is nothing to do."""
        return None if self._idle or self.ended.done() else self._rounds

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

    # The engine's thread

    def _run(self) -> None:
        try:
            while self.turn():
                pass
        except BaseException as error:
            # Not one request's fault but the engine's own; whoever watches `ended` must know.
            log.critical("the engine failed", exc_info=True)
            self._end(GenerationFailedError("the engine failed; see the server's log"), error)
        else:
            self._end(EngineStoppedError(self._stopped_because))

    def turn(self) -> bool:
        """Wait for work, run a step of it, and hand out what it made; False: the engine is to end.
        For the engine's thread, or for one that drives an engine which was not started."""
        found = self._next_work()
        if found is None:
            return False
        work, overdue = found
        emit(overdue)
        if work:
            emit(self._step(work))
        if self._suspect:
            self._prove()
        return True

    def _next_work(self) -> tuple[list[tuple[Sequence, int]], list[Event]] | None:
        """Wait until there is work, or a text whose time is over. None: the engine is to end."""
        with self._wake:
            while not self._stopping:
                self._rounds += 1
                self._idle = False
                for sequence in self._cancelled:
                    self._forget(sequence)
                self._cancelled.clear()
                now = time.monotonic()
                late = [held for held in self._held.values() if now > held.ends_by]
                overdue = [held.time_is_over(now) for held in late]
                for event in overdue:
                    self._forget(event.held.sequence, event.end)
                work = self._scheduler.schedule()
                if self._check_every_step or not work:
                    self._scheduler.check_integrity()
                if work or overdue:
                    for sequence, _ in work:
                        held = self._held[sequence]
                        if held.started is None:
                            held.started = now
                    return work, overdue
                self._idle = True
                self._wake.wait()
            self._idle = True
            return None

    def _step(self, work: list[tuple[Sequence, int]]) -> list[Event]:
        """Run the work and return what it made. Requests that are over hold nothing any more."""
        began = time.monotonic()
        try:
            results = self._run_model(work)
        except BaseException as error:  # whatever it was, only these requests are touched
            ids = [self._held[sequence].reply.request_id for sequence, _ in work]
            log.exception(
                "a step over %d requests failed", len(work), extra={"fields": {"ids": ids}}
            )
            self._suspect = True
            failed = GenerationFailedError("the model failed in a step that ran this request")
            if is_out_of_memory(error):
                failed = OutOfMemoryFaultError(
                    "the server had no memory left for a step that ran this request; try again "
                    "later, or ask for fewer tokens"
                )
            events = [Event(self._held[sequence], end=failed) for sequence, _ in work]
        else:
            self._publish(work, results)
            now = time.monotonic()
            self._learn_pace(work, now - began)
            events = [
                self._held[sequence].take(made, now)
                for (sequence, _), made in zip(work, results, strict=True)
                if made is not None
            ]
            made_for = [event.held for event in events if event.delta is not None]
            self.observer.stepped(sum(n for _, n in work), made_for, began, now)
            for held in made_for:
                held.last_token = now
        self._close([event for event in events if event.end is not None])
        return events

    def _learn_pace(self, work: list[tuple[Sequence, int]], seconds: float) -> None:
        if (pace := self._scheduler.pace) is not None:
            texts = sum(n == 1 for _, n in work)
            pace.ran(texts, sum(n for _, n in work) - texts, seconds)

    def _run_model(self, work: list[tuple[Sequence, int]]) -> list[Made | None]:
        n_vocab = self.tokenizer.n_vocab
        return step(self.model, self._cache, work, n_vocab=n_vocab, fixed=self._fixed)

    def _publish(self, work: list[tuple[Sequence, int]], results: list[Made | None]) -> None:
        """Let others start from the pages that a step has filled with finite numbers."""
        pages = self._scheduler.pages
        if not pages.prefix_cache:
            return
        filled = [
            (sequence, n, pages.filled(sequence, n))
            for (sequence, n), made in zip(work, results, strict=True)
            if made is None or made.token != NOT_FINITE
        ]
        filled = [entry for entry in filled if any(entry[2])]
        if not filled:
            return
        groups = zip(*(tables for _, _, tables in filled), strict=True)
        broken = self._cache.broken([[page for t in tables for page in t] for tables in groups])
        with self._wake:
            for sequence, n, tables in filled:
                if all(map(set.isdisjoint, broken, tables)):
                    self._scheduler.publish(sequence, n)

    def _prove(self) -> None:
        """Run a prompt of one token after a step that failed, and raise what it raises: then the
        fault is not the requests', and every later step would fail as well (a GPU that is lost, a
        process that gets no memory any more)."""
        config = self.model.config
        sequence = Starter(config, self.tokenizer).start([], SamplingParams(max_tokens=1, seed=0))
        with self._wake:
            pages = self._scheduler.pages
            granted = pages.grow(sequence, 1)
        try:
            if granted:  # else others hold every page: it is proven at the next failure
                self._run_model([(sequence, 1)])
        finally:
            with self._wake:
                pages.release(sequence)
        self._suspect = False

    def _close(self, over: list[Event]) -> None:
        with self._wake:
            for event in over:
                self._forget(event.held.sequence, event.end)

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

    def _end(self, told: Exception, error: BaseException | None = None) -> None:
        """Tell the requests left, and whoever watches `ended`, whatever else goes wrong."""
        try:
            with self._wake:
                self._stopping = True
                left = list(self._held.values())
            events = [Event(held, end=told) for held in left]
            emit(events)
            if error is None:
                self._close(events)  # not after a fault: the scheduler may be what is broken
        except BaseException as fault:  # noqa: BLE001 - raised where `ended` is looked at
            error = error or fault
        finally:
            self._settle(error)

    def _settle(self, error: BaseException | None) -> None:
        with contextlib.suppress(InvalidStateError):  # given up meanwhile
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)
        self._tell_awaiting()


def _tell(left: asyncio.Future[None]) -> None:
    if not left.done():  # who waited may have given up
        left.set_result(None)
