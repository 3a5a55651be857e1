"""Engine: the one thread that owns torch. Schedule, step, hand out what was made; nothing else.

    submit ──▶ Scheduler ──▶ work ──▶ gpt.generate.step ──▶ serve.held ──▶ Reply (event loop)
                   ▲                          │
                   └──── finish, preempt ◀────┘

What other threads call, and what is held, stands in `serve.desk`, whose lock is never held during a
step.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence as Seq
from concurrent.futures import InvalidStateError

import torch

from gpt.cache import PAGE_SIZE, KVCache
from gpt.generate import PREFILL_CHUNK, step
from gpt.pages import CachePages
from gpt.params import NOT_FINITE, Made, SamplingParams
from gpt.sequence import Sequence
from gpt.starter import Starter
from gpt.tokenizer import Tokenizer
from serve.desk import Desk, ServedModel
from serve.faults import (
    GenerationFailedError,
    OutOfMemoryFaultError,
    StuckError,
    is_out_of_memory,
)
from serve.held import Event, emit
from serve.memory import DEFAULT_SHARE, Pool, size_pool
from serve.pace import Pace
from serve.reply import EngineStoppedError
from serve.scheduler import Scheduler

log = logging.getLogger(__name__)


class Engine(Desk):
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
        self.pool: Pool | None = None
        self._fixed = fixed
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
        scheduler = Scheduler(
            CachePages(self._cache.spec.memories, n_pages, page_size, prefix_cache=prefix_cache),
            max_running=max_running,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            prefill_chunk=prefill_chunk,
            pace=None if prefill_stretch is None else Pace(prefill_stretch, prefill_chunk),
        )
        super().__init__(model, tokenizer, scheduler, name=name, dtype=dtype)
        self._stopped_because = "the server shut down before the text was complete"
        self._suspect = False  # a step has failed, and it is not known whether by its requests
        self._rounds = 0
        self._idle = True
        self._check_every_step = check_every_step
        self._thread = threading.Thread(target=self._run, name="antiphon-engine", daemon=True)

    # Its beginning and its end, for other threads

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
