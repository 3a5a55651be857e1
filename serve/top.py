"""The `antiphon top` command: what a server does at this moment, in the terminal.

It reads the port that Prometheus scrapes, and not an RPC: that needs no key for the model, adds
nothing to the wire contract, works while the model is loading, and shows what dashboards will show.
"""

from __future__ import annotations

import http.client
import math
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpt.arguments import CommandParser, examples
from gpt.errors import ServerError
from gpt.terminal import dim, padded, printable, shows_colour

DEFAULT_ADDRESS = "127.0.0.1:9464"
PREFIX = "antiphon_"
TIMEOUT = 10.0
CLEAR, HOME, ALTERNATE, BACK = "\x1b[J", "\x1b[H", "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
BAR = 20

QUANTILES = (0.5, 0.9, 0.99)
TIMES = {
    "first token": "time_to_first_token_seconds",
    "between tokens": "inter_token_latency_seconds",
    "in the queue": "request_queue_time_seconds",
    "whole text": "e2e_request_latency_seconds",
}

EXAMPLES = examples(
    "antiphon top",
    "antiphon top 10.0.0.7:9464 --interval 5",
    "antiphon top http://10.0.0.7:9464/metrics --once",
)


def build_parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Show what a server does, as it does it: who runs and who waits, the KV cache, "
        "tokens a second, and how long things take. The server must have been started with "
        "--metrics-port.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "address",
        nargs="?",
        default=DEFAULT_ADDRESS,
        metavar="ADDRESS",
        help=f"its metrics: HOST:PORT or a URL (default: {DEFAULT_ADDRESS})",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds between two looks, over which rates are taken (default: 2)",
    )
    parser.add_argument("--once", action="store_true", help="look once (one interval), and end")
    return parser


def main(argv: list[str], prog: str = "antiphon top") -> int:
    """Show a server until Ctrl-C; returns the exit status.

    Raises:
        UserError: nobody answers there, or no server of ours.
    """
    parser = build_parser(prog)
    args = parser.parse_args(argv)
    if not 0 < args.interval <= 3600:
        parser.error(f"--interval is {args.interval:g}, but must be above 0 and at most 3600")
    url = url_of(args.address)
    before = look(url)
    live = sys.stdout.isatty() and not args.once
    colour = shows_colour(sys.stdout)
    if live:
        _write(ALTERNATE)
    try:
        while True:
            time.sleep(args.interval)
            now = look(url)
            shown = "\n".join(view(before, now, args.address, colour)) + "\n"
            _write(HOME + shown.replace("\n", "\x1b[K\n") + CLEAR if live else shown)
            if args.once:
                return 0
            before = now
    except KeyboardInterrupt:
        return 0
    finally:
        if live:
            _write(BACK)


def url_of(address: str) -> str:
    if address.startswith(("http://", "https://")):
        return address if address.count("/") > 2 else f"{address}/metrics"
    return f"http://{address}/metrics"


Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Look:
    """What a server told at one moment.

    Attributes:
        at: when, by `time.monotonic`.
        values: by name without prefix, and labels.
    """

    at: float
    values: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float:
        """The sum over all series that have these labels."""
        wanted = set(labels.items())
        return sum(value for found, value in self.values.get(name, {}).items() if wanted <= found)

    def label_values(self, name: str, label: str) -> list[str]:
        """What a label takes on in a metric, sorted."""
        return sorted({dict(labels)[label] for labels in self.values.get(name, {})})

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """A histogram's cumulative counts by their bound."""
        wanted, found = set(labels.items()), defaultdict[float, float](float)
        for series, value in self.values.get(f"{name}_bucket", {}).items():
            if wanted <= series:
                found[float(dict(series)["le"])] += value
        return found


def look(url: str) -> Look:
    """Ask a server for its metrics.

    Raises:
        ServerError: there are none.
    """
    from prometheus_client.parser import text_string_to_metric_families

    hint = "is `antiphon serve` running there with --metrics-port?"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            text = answer.read().decode("utf-8", errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ServerError(f"no metrics at {url} ({reason}); {hint}") from None
    values: dict[str, dict[Labels, float]] = defaultdict(dict)
    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except ValueError as error:
        raise ServerError(f"what {url} answers are no metrics ({error}); {hint}") from None
    for sample in samples:
        labels = frozenset((name, printable(value)) for name, value in sample.labels.items())
        values[sample.name.removeprefix(PREFIX)][labels] = sample.value
    if "build_info" not in values:
        raise ServerError(f"{url} is no server of antiphon's; {hint}")
    return Look(time.monotonic(), dict(values))


def quantile(buckets: Mapping[float, float], q: float) -> float:
    """The value that a share `q` of what is in the buckets does not pass, spread evenly within a
    bucket, as Prometheus' `histogram_quantile` has it. NaN if there is nothing.

    Args:
        buckets: cumulative counts by upper bound, the infinite one among them.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]] > 0:
        return math.nan
    rank, low, below = q * buckets[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if (count := buckets[bound]) >= rank and count > below:
            return (
                low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
            )
        low, below = bound, count
    return low


def view(before: Look, now: Look, address: str, colour: bool = False) -> list[str]:
    """The lines that show what happened between two looks."""
    seconds = max(now.at - before.at, 1e-9)

    def rate(name: str, **labels: str) -> float:
        # A server that was started anew counts from 0.
        return max(0.0, now.value(name, **labels) - before.value(name, **labels)) / seconds

    versions = now.label_values("build_info", "version")
    up = time.time() - now.value("process_start_time_seconds")
    memory = now.value("process_resident_memory_bytes") / 2**20
    lines = [
        (
            f"antiphon {versions[0]} at {address}   up {duration(up)}   "
            f"cpu {rate('process_cpu_seconds_total'):.0%}   memory {memory:,.0f} MiB"
        )
    ]
    calls = [
        (method, code, rate("rpcs_total", method=method, code=code))
        for method in now.label_values("rpcs_total", "method")
        for code in now.label_values("rpcs_total", "code")
    ]
    told = [f"{method} {code} {each:.1f}" for method, code, each in calls if each > 0]
    lines += [f"calls/s   {', '.join(told) or 'none'}"]
    models = now.label_values("num_requests_running", "model_name")
    if not models:
        lines += ["", "no model is served yet"]
    for model in models:
        lines += ["", *_model_lines(before, now, model, rate, colour)]
    return lines


def _model_lines(before: Look, now: Look, model: str, rate: object, colour: bool) -> list[str]:
    assert callable(rate)
    here = {"model_name": model}
    usage = now.value("kv_cache_usage_perc", **here)
    full = min(BAR, round(usage * BAR))
    asked = now.value("prefix_cache_queries_total", **here)
    hits = now.value("prefix_cache_hits_total", **here) / asked if asked else 0.0
    lines = [
        model,
        (
            f"  running {now.value('num_requests_running', **here):.0f}   "
            f"waiting {now.value('num_requests_waiting', **here):.0f} "
            f"({now.value('num_tokens_waiting', **here):,.0f} tokens)   "
            f"KV cache {'█' * full}{dim('░' * (BAR - full), colour)} {usage:.0%}"
        ),
        (
            f"  tokens/s: prompt {rate('prompt_tokens_total', **here):,.1f}, "
            f"made {rate('generation_tokens_total', **here):,.1f}   "
            f"texts/s {rate('request_success_total', **here):,.1f}   "
            f"prefix hits {hits:.0%}   preemptions {now.value('num_preemptions_total', **here):.0f}"
        ),
    ]
    for title, name in TIMES.items():
        total, earlier = now.buckets(name, **here), before.buckets(name, **here)
        recent = {bound: count - earlier.get(bound, 0.0) for bound, count in total.items()}
        new = recent.get(math.inf, 0.0) > 0
        shown = recent if new else total
        points = "   ".join(
            f"p{q * 100:.0f} {padded(milliseconds(quantile(shown, q)), 9)}" for q in QUANTILES
        )
        lines.append(
            f"  {padded(title, 16)}{points}{'' if new else dim('since the start', colour)}"
        )
    return lines


def milliseconds(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.{0 if seconds >= 0.1 else 1}f} ms"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
