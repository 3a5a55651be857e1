"""What watches over a server: made from its settings, and tied to its calls and engines."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from serve import logs
from serve.calls import WatchCalls, Watchers
from serve.observing import Several
from serve.watchflags import WatchSettings

if TYPE_CHECKING:
    from serve.engine import Engine
    from serve.metrics import Metrics, MetricsPort, Tally
    from serve.tracing import Tracing

log = logging.getLogger(__name__)


class Watching:
    """Metrics, traces and what is logged of calls.

    Raises:
        ServerError: the metrics' port is taken, or what traces need is not there.
    """

    def __init__(
        self,
        settings: WatchSettings | None = None,
        *,
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        settings = settings or WatchSettings()
        if tracing is None:
            from serve.tracing import tracing_of

            tracing = tracing_of(settings.otlp_traces_endpoint)
        self.tracing = tracing
        self.port: MetricsPort | None = None
        if settings.metrics_port is not None:
            from serve.metrics import Metrics

            metrics = metrics or Metrics()
            metrics.count_dropped_lines(logs.dropped)
            self.port = metrics.serve(settings.metrics_host, settings.metrics_port)
            log.info("metrics on http://%s/metrics", self.port.address)
        self.metrics = metrics
        self.calls = WatchCalls(
            Watchers(metrics, tracing, settings.slow_request, settings.log_prompts)
        )

    def attach(self, engine: Engine) -> None:
        """Watch this engine from here on."""
        observers: list[Any] = [] if self.tracing is None else [self.tracing]
        if self.metrics is not None:
            tally: Tally = self.metrics.watch(engine)
            observers.append(tally)
        engine.observer = Several(*observers)

    def detach(self, engine: Engine) -> None:
        """This engine has ended. What was counted of it stays."""
        if self.metrics is not None:
            self.metrics.forget(engine)

    def close(self) -> None:
        """Send what is still to be sent, and close the port. It may take seconds."""
        if self.tracing is not None:
            self.tracing.close()
        if self.port is not None:
            self.port.close()
