"""Metrics for Prometheus, under the names that vLLM gives them, with `antiphon_` before.

Recording is a few additions in the thread where a thing happens (the engine's for texts, the event
loop's for calls), with no lock: each number has one writer. A scrape works in a thread of its own.
prometheus_client's own histograms would lock and walk all their buckets for each number, and cannot
add one for all texts of a step at once.
"""

from __future__ import annotations

import platform
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from gpt.errors import ServerError
from gpt.stream import FinishReason
from serve.observing import FAILED, LEFT, SCORED, Load, Observer, Text, TextEnd
from serve.results import ModelInfo

if TYPE_CHECKING:
    from socketserver import BaseServer

PREFIX = "antiphon_"

Families = Mapping[str, Any]
"""Metric families by name. They have `add_metric`, each kind with its own arguments."""

SECONDS = (*(m * 10.0**e for e in range(-3, 3) for m in (1, 2, 3, 5, 7)), 1000.0)
"""1 ms to 1000 s, five a decade: a percentile read from them is off by a fifth at most."""
GAPS = (*(m * 10.0**e for e in range(-4, 1) for m in (1, 2, 3, 5, 7)), 10.0)
"""0.1 ms to 10 s: between tokens."""
TOKENS = tuple(2.0**e for e in range(18))
"""1 to 131,072."""

REASONS = (*(reason.value for reason in FinishReason), SCORED, FAILED, LEFT)


@dataclass(frozen=True)
class Spec:
    """A metric: its name without prefix (and without the `_total` that counters get), what it is,
    and what its labels are."""

    kind: str
    help: str
    labels: tuple[str, ...] = ("model_name",)
    buckets: tuple[float, ...] = ()


def _seconds(text: str) -> Spec:
    return Spec("histogram", text, buckets=SECONDS)


SPECS: dict[str, Spec] = {
    "num_requests_running": Spec("gauge", "Texts that take part in the steps."),
    "num_requests_waiting": Spec("gauge", "Texts that wait for a place or for pages."),
    "num_tokens_waiting": Spec("gauge", "Tokens of the texts that wait."),
    "kv_cache_usage_perc": Spec("gauge", "Share of the KV cache that texts hold, 0 to 1."),
    "num_preemptions": Spec("counter", "Times a text had to give its pages up."),
    "prefix_cache_queries": Spec("counter", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": Spec("counter", "Prompt tokens found there, and not computed."),
    "prompt_tokens": Spec("counter", "Prompt tokens of texts that got their first token."),
    "generation_tokens": Spec("counter", "Tokens made."),
    "request_success": Spec("counter", "Texts that ended.", ("model_name", "finished_reason")),
    "iteration_tokens_total": Spec("histogram", "Tokens that a step ran.", buckets=TOKENS),
    "iteration_seconds": Spec("histogram", "What a step took.", buckets=GAPS),
    "request_prompt_tokens": Spec("histogram", "Prompt tokens of a text.", buckets=TOKENS),
    "request_generation_tokens": Spec("histogram", "Tokens made for a text.", buckets=TOKENS),
    "time_to_first_token_seconds": _seconds("From a text's arrival to its first token."),
    "inter_token_latency_seconds": Spec(
        "histogram", "From one token of a text to its next.", buckets=GAPS
    ),
    "e2e_request_latency_seconds": _seconds("From a text's arrival to its end."),
    "request_queue_time_seconds": _seconds("From a text's arrival to its first step."),
    "request_prefill_time_seconds": _seconds("From a text's first step to its first token."),
    "request_decode_time_seconds": _seconds("From a text's first token to its last."),
    "rpcs": Spec("counter", "Calls answered, by their gRPC status.", ("method", "code")),
    "rpc_seconds": Spec(
        "histogram", "From a call to its end, tokenizing included.", ("method",), SECONDS
    ),
    "log_lines_dropped": Spec("counter", "Log lines that nobody took in time.", ()),
    "build_info": Spec("gauge", "1; what this is.", ("version", "python", "torch")),
    "model_info": Spec(
        "gauge", "1; what is served.", ("model_name", "dtype", "parameters", "context", "tokenizer")
    ),
    "cache_config_info": Spec(
        "gauge", "1; the KV cache, in pages of each group of layers.",
        ("model_name", "page_size", "pages"),
    ),
}  # fmt: skip


class Histogram:
    """Numbers sorted into buckets. One thread writes; others may read meanwhile."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count `value` that many times. A bucket holds what is at most its bound."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def merge(self, other: Histogram) -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, with the bounds as Prometheus writes them."""
        found, below = [], 0
        for bound, count in zip((*map(_number, self.bounds), "+Inf"), [*self.counts], strict=True):
            below += count
            found.append((bound, float(below)))
        return found


def _number(bound: float) -> str:
    return repr(float(f"{bound:.6g}"))


def _histograms(label: str) -> dict[str, Histogram]:
    return {
        name: Histogram(spec.buckets)
        for name, spec in SPECS.items()
        if spec.kind == "histogram" and label in spec.labels
    }


class Tally(Observer):
    """What one engine has done. Its thread writes, without a lock."""

    def __init__(self) -> None:
        self.histograms = _histograms("model_name")
        self.counters = dict.fromkeys(
            ("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens"), 0
        )
        self.reasons = dict.fromkeys(REASONS, 0)  # all at once: a scrape may be reading
        self.preemptions = 0

    def stepped(self, tokens: int, made: Seq[Text], began: float, now: float) -> None:
        histograms, counters = self.histograms, self.counters
        histograms["iteration_tokens_total"].add(tokens)
        histograms["iteration_seconds"].add(now - began)
        # Texts that got their last token in one step wait the same time for this one.
        for last, count in Counter(text.last_token for text in made).items():
            if last:
                histograms["inter_token_latency_seconds"].add(now - last, count)
        for text in made:
            if not text.last_token:
                counters["prompt_tokens"] += text.sequence.prompt_len
                histograms["time_to_first_token_seconds"].add(now - text.arrived)
        counters["generation_tokens"] += len(made)

    def ended(self, end: TextEnd) -> None:
        histograms, counters = self.histograms, self.counters
        self.reasons[end.reason] += 1
        histograms["e2e_request_latency_seconds"].add(end.seconds)
        histograms["request_queue_time_seconds"].add(end.queue_seconds)
        histograms["request_prompt_tokens"].add(end.prompt_tokens)
        if end.started:
            counters["prefix_cache_queries"] += end.prompt_tokens
            counters["prefix_cache_hits"] += end.cached_tokens
        if end.first_token:
            histograms["request_prefill_time_seconds"].add(end.prefill_seconds)
            if end.reason != SCORED:
                histograms["request_generation_tokens"].add(end.completion_tokens)
                histograms["request_decode_time_seconds"].add(end.decode_seconds)

    def merge(self, other: Tally) -> None:
        """Add what another has counted."""
        for name, histogram in self.histograms.items():
            histogram.merge(other.histograms[name])
        for mine, theirs in ((self.counters, other.counters), (self.reasons, other.reasons)):
            for name, value in theirs.items():
                mine[name] += value
        self.preemptions += other.preemptions


class Watched(Protocol):
    """What metrics need of an engine."""

    name: str

    @property
    def load(self) -> Load: ...
    @property
    def info(self) -> ModelInfo: ...


class Metrics:
    """All that is counted in a server process; a collector for prometheus_client.

    Counts go on when a model is replaced by another of the same name.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._engines: list[tuple[Watched, Tally]] = []
        self._past: dict[str, Tally] = defaultdict(Tally)
        self._calls: dict[tuple[str, str], int] = defaultdict(int)
        self._call_seconds: dict[str, Histogram] = {}
        self._dropped_lines = _zero
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.registry.register(self)

    def watch(self, engine: Watched) -> Tally:
        """Count for this engine from here on; it is to be told what the engine does."""
        tally = Tally()
        with self._lock:
            self._engines.append((engine, tally))
        return tally

    def forget(self, engine: Watched) -> None:
        """An engine has ended. What it did stays counted."""
        with self._lock:
            for entry in [entry for entry in self._engines if entry[0] is engine]:
                self._engines.remove(entry)
                entry[1].preemptions = engine.load.preemptions
                self._past[engine.name].merge(entry[1])

    def called(self, method: str, code: str, seconds: float) -> None:
        """A call has ended. Always in the same thread."""
        self._calls[method, code] += 1
        histogram = self._call_seconds.get(method)
        if histogram is None:
            histogram = self._call_seconds[method] = Histogram(SECONDS)
        histogram.add(seconds)

    def count_dropped_lines(self, count: DroppedLines) -> None:
        """Say how the log lines that were dropped are counted."""
        self._dropped_lines = count

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets."""
        families = {name: _family(name, spec) for name, spec in SPECS.items()}
        with self._lock:
            engines = list(self._engines)
            tallies: dict[str, Tally] = {}
            for name, tally in self._past.items():
                tallies.setdefault(name, Tally()).merge(tally)
        loads = [(engine, engine.load) for engine, _ in engines]
        for (engine, tally), (_, load) in zip(engines, loads, strict=True):
            total = tallies.setdefault(engine.name, Tally())
            total.merge(tally)
            total.preemptions += load.preemptions
        for name, tally in tallies.items():
            _add_tally(families, name, tally)
        _add_loads(families, loads)
        for (method, code), count in self._calls.copy().items():
            families["rpcs"].add_metric([method, code], count)
        for method, histogram in self._call_seconds.copy().items():
            families["rpc_seconds"].add_metric([method], histogram.buckets(), histogram.total)
        families["log_lines_dropped"].add_metric([], self._dropped_lines())
        families["build_info"].add_metric(
            [_version("antiphon"), platform.python_version(), _version("torch")], 1
        )
        yield from families.values()

    def serve(self, host: str, port: int) -> MetricsPort:
        """Answer scrapes on a port, in threads of their own.

        Raises:
            ServerError: the port cannot be had.
        """
        try:
            server, _ = start_http_server(port, host, self.registry)
        except (OSError, OverflowError) as error:
            raise ServerError(
                f"cannot serve metrics on {host}:{port} ({error}); choose another port with "
                "--metrics-port (0 takes a free one), or leave it out"
            ) from None
        return MetricsPort(server)


class MetricsPort:
    """Attributes:
    address: `host:port`.
    """

    def __init__(self, server: BaseServer) -> None:
        self._server = server
        address: Any = server.server_address  # a pair, or four of IPv6
        host, port = address[:2]
        self.address = f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class DroppedLines(Protocol):
    def __call__(self) -> int: ...


def _zero() -> int:
    return 0


def _family(name: str, spec: Spec) -> Any:
    kind: Any = {
        "gauge": GaugeMetricFamily,
        "counter": CounterMetricFamily,
        "histogram": HistogramMetricFamily,
    }[spec.kind]
    return kind(PREFIX + name, spec.help, labels=spec.labels)


def _add_tally(families: Families, name: str, tally: Tally) -> None:
    for key, histogram in tally.histograms.items():
        families[key].add_metric([name], histogram.buckets(), histogram.total)
    for key, count in tally.counters.items():
        families[key].add_metric([name], count)
    for reason, count in tally.reasons.items():
        families["request_success"].add_metric([name, reason], count)
    families["num_preemptions"].add_metric([name], tally.preemptions)


def _add_loads(families: Families, loads: Iterable[tuple[Watched, Load]]) -> None:
    """What is held now. Of engines that serve one name, as while one takes over from another, the
    texts are added up and the fuller cache counts."""
    gauges: dict[str, dict[str, float]] = {}
    for engine, load in loads:
        now = gauges.setdefault(engine.name, defaultdict(float))
        now["num_requests_running"] += load.running
        now["num_requests_waiting"] += load.waiting
        now["num_tokens_waiting"] += load.waiting_tokens
        now["kv_cache_usage_perc"] = max(now["kv_cache_usage_perc"], load.kv_usage)
    infos = {}
    for engine, load in loads:
        infos[engine.name] = (engine.info, load)
    for name, values in gauges.items():
        for key, value in values.items():
            families[key].add_metric([name], value)
        info, load = infos[name]
        about = (info.dtype, info.parameter_count, info.block_size, info.tokenizer_kind)
        families["model_info"].add_metric([name, *map(str, about)], 1)
        pages = ",".join(map(str, load.pages))
        families["cache_config_info"].add_metric([name, str(load.page_size), pages], 1)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
