"""Every documented metric moves when what it counts happens, and dashboards ask for no other."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt.errors import ServerError
from gpt.tokenizer import Tokenizer
from serve.client import Client, RequestError
from serve.metrics import GAPS, PREFIX, SECONDS, SPECS, TOKENS, Histogram, Metrics
from serve.observing import NOBODY, Observer, Several
from serve.top import Look, look, main, quantile, url_of
from serve.watchflags import WatchSettings
from serve.watching import Watching
from tests.serve.scripted import NAN, ScriptedModel
from tests.serve.served import Served, eventually

ROOT = Path(__file__).resolve().parents[2]
BYTES = Tokenizer.bytes()
MODEL = {"model_name": "scripted"}


def following(position: int, token: int) -> int:
    """`a` for ever; a prompt that ends with E ends at once, one with N cannot go on."""
    return {ord("E"): BYTES.eot, ord("N"): NAN}.get(token, ord("a"))


class Watched:
    """A server whose metrics are looked at. Its cache holds one and a half contexts."""

    def __init__(self) -> None:
        self.lost_lines = 0
        self.watching = Watching(WatchSettings(metrics_port=0))
        self.watching.metrics.count_dropped_lines(lambda: self.lost_lines)
        self.model = ScriptedModel(BYTES.n_vocab, following)
        self.served = Served(
            self.model, watching=self.watching, n_pages=7, max_running=2, max_waiting=8
        )
        self.port = self.watching.port

    @property
    def address(self) -> str:
        assert self.port is not None
        return self.port.address

    def look(self) -> Look:
        return look(url_of(self.address))


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    watched = Watched()
    with watched.served:
        yield watched


def test_all_that_is_counted_goes_up(watched: Watched) -> None:
    client, before = watched.served.client, watched.look()
    long = "the same beginning, of more than a page"
    for prompt, settings in [
        ("ab", {"max_tokens": 3}),
        ("ab", {"stop": ["aa"]}),
        ("E", {}),
        ("ab", {"regex": "aaa"}),
        (long, {"max_tokens": 1}),
        (long, {"max_tokens": 1}),
    ]:
        client.generate(prompt, **settings)
    client.score("abc")
    with pytest.raises(RequestError, match="INTERNAL"):
        client.generate("N")
    with pytest.raises(RequestError, match="INVALID_ARGUMENT"):
        client.generate("a", top_p=2)
    with pytest.raises(grpc.RpcError):
        watched.served.channel.unary_unary("/serve.v1.GenerationService/Nothing")(b"")
    entered = watched.model.entered
    watched.model.hold()
    with client.stream("ab") as gone:
        eventually(lambda: watched.model.entered > entered)  # it looks at nobody until it is let go
        late = client.stream("ab", time_limit_seconds=0.01)
        eventually(lambda: watched.served.engine.held == 2)
        gone.cancel()
        eventually(lambda: watched.look().value("rpcs_total", code="CANCELLED") > 0)
        time.sleep(0.02)  # the other one's time is over
        watched.model.release()
        assert [delta.text for delta in late if delta.text] in ([], ["a"])
    watched.served.await_no_rpc()
    eventually(lambda: watched.served.engine.held == 0)
    # Two whole contexts do not fit into the cache: one gives its pages up, twice at most.
    watched.model.hold()
    two = client.batch([{"prompt": "x" * 20}, {"prompt": "y" * 20}])
    both = threading.Thread(target=lambda: list(two))
    both.start()
    eventually(lambda: watched.served.engine.held == 2)
    watched.model.release()
    both.join()
    watched.lost_lines += 3
    now = watched.look()

    for name, spec in SPECS.items():
        if spec.kind == "counter":
            assert now.value(f"{name}_total") > before.value(f"{name}_total"), name
        elif spec.kind == "histogram":
            assert now.value(f"{name}_count") > before.value(f"{name}_count"), name
            assert now.value(f"{name}_sum") > before.value(f"{name}_sum"), name
    for reason in now.label_values("request_success_total", "finished_reason"):
        assert now.value("request_success_total", finished_reason=reason, **MODEL) > 0, reason
    for method, code in [
        ("Generate", "OK"),
        ("Generate", "INTERNAL"),
        ("Generate", "INVALID_ARGUMENT"),
        ("GenerateStream", "CANCELLED"),
        ("unknown", "UNIMPLEMENTED"),
    ]:
        assert now.value("rpcs_total", method=method, code=code) >= 1, (method, code)
    assert now.value("process_cpu_seconds_total") > before.value("process_cpu_seconds_total")
    # What is counted at once, and at different places, fits together.
    made = now.value("generation_tokens_total", **MODEL)
    assert made == now.value("inter_token_latency_seconds_count") + now.value(
        "time_to_first_token_seconds_count"
    )
    ended = now.value("request_success_total", **MODEL)
    assert ended == now.value("e2e_request_latency_seconds_count", **MODEL)
    assert now.value("prefix_cache_hits_total") == 32


def test_what_is_held_is_told(watched: Watched) -> None:
    gauges = [f for f, spec in SPECS.items() if spec.kind == "gauge" and not f.endswith("_info")]
    eventually(lambda: watched.served.engine.held == 0)
    idle = watched.look()
    assert {name: idle.value(name) for name in gauges} == dict.fromkeys(gauges, 0)
    watched.model.hold()
    prompts = [{"prompt": "abcd", "max_tokens": 2}] * 3
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(watched.served.client.batch(prompts)))
    thread.start()
    eventually(lambda: watched.served.engine.held == 3)
    watched.model.allow()
    eventually(lambda: watched.look().value("num_requests_running", **MODEL) == 2)
    busy = watched.look()
    assert busy.value("num_requests_waiting", **MODEL) == 1
    assert busy.value("num_tokens_waiting", **MODEL) == 4
    assert busy.value("kv_cache_usage_perc", **MODEL) == pytest.approx(2 / 6)
    watched.model.release()
    thread.join()
    assert len(results) == 3


def test_what_is_served_is_told(watched: Watched) -> None:
    found = watched.look()
    assert found.value("model_info", context="64", tokenizer="bytes", **MODEL) == 1
    assert found.value("cache_config_info", pages="6", page_size="16", **MODEL) == 1
    assert found.value("build_info") == 1
    told = {name for name, spec in SPECS.items() if spec.kind == "gauge"}
    assert told <= set(found.values)


def test_a_look_from_the_command_line(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    watched.served.client.generate("ab", max_tokens=4)
    flags = ["--once", "--interval", "0.02"]
    assert main([watched.address, *flags]) == 0
    out = capsys.readouterr().out
    assert f"at {watched.address}   up " in out
    assert "scripted\n  running 0   waiting 0 (0 tokens)   KV cache ░" in out
    for title in ("first token", "between tokens", "in the queue", "whole text"):
        assert re.search(rf"^  {title} +p50 [\d.]+ m?s +p90 [\d.]+ m?s +p99 [\d.]+ m?s", out, re.M)
    assert "\x1b" not in out
    with pytest.raises(
        ServerError, match=r"no metrics at http://127\.0\.0\.1:1/metrics .*--metrics-p"
    ):
        main(["127.0.0.1:1", *flags])
    with pytest.raises(ServerError, match="no metrics at"):
        main([watched.served.server.target, *flags])


def test_the_documented_metrics_are_those_there_are() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = dict(re.findall(rf"^\| `{PREFIX}(\w+)` \| (\w+) \|", page, re.M))
    there = {
        name + ("_total" if spec.kind == "counter" else ""): spec.kind
        for name, spec in SPECS.items()
    }
    assert rows == there


def test_the_dashboard_asks_for_what_there_is(watched: Watched) -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    variables = board["templating"]["list"]
    queries += [each["query"]["query"] for each in variables if each["type"] == "query"]
    assert len(queries) >= 12
    watched.served.client.model()
    found = watched.look().values
    there = {PREFIX + name for name in found if name in _series()} | {
        name for name in found if name.startswith(("process_", "python_"))
    }
    asked = set()
    for query in queries:
        names = set(re.findall(rf"\b(?:{PREFIX}|process_|python_)\w+", query))
        assert names or query.startswith("label_values"), query
        asked |= names
        for labels in re.findall(r"by \(([^)]*)\)", query):
            known = {label for spec in SPECS.values() for label in spec.labels} | {"le"}
            assert set(re.split(r",\s*", labels)) <= known, query
    assert asked <= there
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def _series() -> set[str]:
    found = set()
    for name, spec in SPECS.items():
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
        found |= {name + end for end in ends[spec.kind]}
    return found


@given(st.lists(st.tuples(st.floats(0, 2000), st.integers(1, 4)), max_size=20))
def test_a_histogram_is_that_of_the_library(values: list[tuple[float, int]]) -> None:
    registry = prometheus_client.CollectorRegistry()
    bounds = [float(f"{bound:.6g}") for bound in SECONDS]
    theirs = prometheus_client.Histogram("x", "", buckets=bounds, registry=registry)
    ours = Histogram(tuple(bounds))
    for value, count in values:
        ours.add(value, count)
        for _ in range(count):
            theirs.observe(value)
    for bound, count in ours.buckets():
        assert registry.get_sample_value("x_bucket", {"le": bound}) == count
    assert registry.get_sample_value("x_sum") == pytest.approx(ours.total)


@pytest.mark.parametrize("bounds", [SECONDS, GAPS, TOKENS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_a_quantile_is_between_the_bounds_that_hold_it() -> None:
    buckets = {1.0: 0.0, 2.0: 50.0, 4.0: 90.0, float("inf"): 100.0}
    assert [quantile(buckets, q) for q in (0.25, 0.5, 0.7, 0.99)] == [1.5, 2.0, 3.0, 4.0]
    assert str(quantile({1.0: 0.0, float("inf"): 0.0}, 0.5)) == "nan"
    assert str(quantile({}, 0.5)) == "nan"


def test_counts_go_on_when_a_model_takes_over_from_its_namesake(watched: Watched) -> None:
    metrics = Metrics()
    engine = watched.served.engine

    def total() -> float:
        value = metrics.registry.get_sample_value("antiphon_generation_tokens_total", MODEL)
        return value or 0.0

    first = metrics.watch(engine)
    first.counters["generation_tokens"] += 5
    second = metrics.watch(engine)
    second.counters["generation_tokens"] += 2
    assert total() == 7
    metrics.forget(engine)
    assert total() == 7
    metrics.watch(engine).counters["generation_tokens"] += 1
    assert total() == 8


def test_a_port_that_is_taken_is_a_mistake_with_a_hint(watched: Watched) -> None:
    port = int(watched.address.rpartition(":")[2])
    with pytest.raises(ServerError, match=rf"metrics on 127.0.0.1:{port} .*--metrics-port"):
        Watching(WatchSettings(metrics_port=port))


def test_an_observer_that_fails_takes_nobody_with_it(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def stepped(self, *_: object) -> None:
            raise ZeroDivisionError

    class Counting(Observer):
        seen = 0

        def stepped(self, *_: object) -> None:
            self.seen += 1

    counting = Counting()
    several = Several(Broken(), counting, NOBODY)
    several.stepped(1, [], 0.0, 1.0)
    several.stepped(1, [], 0.0, 1.0)
    assert counting.seen == 2
    assert [record.getMessage() for record in caplog.records] == [
        "Broken failed and sees nothing any more"
    ]


def test_nothing_is_served_unless_asked(watched: Watched) -> None:
    with Client(watched.served.server.target) as client:
        assert client.model().name == "scripted"
    assert Watching().port is None
