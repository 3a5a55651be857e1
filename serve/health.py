"""grpc.health.v1: whether this server can answer, for load balancers and probes.

Written out because a probe must stay right under bad company: a watcher that stops reading blocks
nobody else, and one that leaves takes nothing with it.
Source: the gRPC health checking protocol, grpc/grpc doc/health-checking.md.
"""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """One status for all of the server's services, and for the server as a whole (`""`).

    Args:
        services: full names of the services.
    """

    def __init__(self, *services: str) -> None:
        self._services = {"", *services}
        self._serving = False
        self._ended = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Flip the status and tell every watcher. NOT_SERVING at first."""
        self._serving = serving
        self._tell()

    def end(self) -> None:
        """Let all watchers go: the server ends. gRPC would cut them off, with a traceback each."""
        self._ended = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(SERVICE_UNKNOWN)
        return int(SERVING if self._serving else NOT_SERVING)

    async def Check(  # noqa: N802 - the protocol's name
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            names = ", ".join(sorted(name for name in self._services if name))
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no such service here; there are: {names}"
            )
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(  # noqa: N802 - the protocol's name
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        told: int | None = None
        while not self._ended:
            changed = self._changed
            status = self._status(request.service)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            await changed.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server has ended")
