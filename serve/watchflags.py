"""The settings of what watches over a server. Apart from it, so that `--help` loads no gRPC."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass

from gpt.arguments import add_switch, number
from serve import logs


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """What watches over a server.

    Attributes:
        metrics_port: None: no metrics. 0 takes a free one.
        otlp_traces_endpoint: URL of a collector; None: what the environment says.
        log_format, log_level: see `serve.logs`.
        log_prompts: whether what is asked is logged.
        slow_request: seconds; 0: no request counts as slow.
    """

    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    otlp_traces_endpoint: str | None = None
    log_format: str = "text"
    log_level: str = "info"
    log_prompts: bool = False
    slow_request: float = 0.0


def add_watch_arguments(parser: ArgumentParser) -> None:
    """The flags of `WatchSettings`."""
    group = parser.add_argument_group("seeing what it does")
    group.add_argument(
        "--metrics-port",
        type=number(int, 0, 65535),
        metavar="N",
        help="serve metrics for Prometheus on this port, at /metrics; 0 takes a free one "
        "(default: no metrics)",
    )
    group.add_argument(
        "--metrics-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address for that port (default: 127.0.0.1, this machine only)",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send traces to this collector, as http://localhost:4318/v1/traces; needs "
        "antiphon[tracing] (default: what OTEL_EXPORTER_OTLP_ENDPOINT says)",
    )
    group.add_argument(
        "--log-format",
        choices=logs.FORMATS,
        default="text",
        help="lines for people or for programs (default: text)",
    )
    group.add_argument("--log-level", choices=logs.LEVELS, default="info", help="(default: info)")
    add_switch(
        group,
        "--log-prompts",
        default=False,
        help="log what is asked, too; without it no prompt text is in the log (default: off)",
    )
    group.add_argument(
        "--slow-request",
        type=number(float, 0),
        default=0.0,
        metavar="S",
        help="log each request that takes longer as a warning, with where its time went "
        "(default: 0, none)",
    )
