"""What a client needs to reach a server: where it is, whether by TLS, and by which key."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.errors import ServerError

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT = 300.0
LONGEST_TIMEOUT = 1e8
"""Three years; more than that is for ever."""

MAX_ANSWER_BYTES = 256 * 2**20
"""What the client takes in one message; gRPC's own limit of 4 MiB is less than a long text's scores
may have."""

SEVERAL = ("dns:", "ipv4:", "ipv6:")
"""How targets begin that may have several addresses: each call goes to the next one in turn."""

SPREAD = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        # A server that drains, or fails, is left before it refuses a call.
        "healthCheckConfig": {"serviceName": "serve.v1.GenerationService"},
    }
)
"""gRPC's service config for them. Source: grpc/grpc, load-balancing.md and health-checking.md."""

REQUEST_ID = "x-request-id"
"""Metadata that names a call: from its caller, and back in the trailers."""


@dataclass(frozen=True)
class Tls:
    """How to be sure of the server, and it of the client.

    Attributes:
        ca: file with the certificates (PEM) that the server's is to be signed by; None: those that
            gRPC brings along.
        certificate, key: files with the client's own (PEM), if the server asks for one (mTLS).
        server_name: the name in the server's certificate, if it is reached by another.
    """

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None
    server_name: str | None = None

    def credentials(self) -> Any:
        """Raises ServerError: a file cannot be read, or one of the two is missing."""
        import grpc

        if (self.certificate is None) != (self.key is None):
            given, lacks = ("key", "certificate") if self.key else ("certificate", "key")
            raise ServerError(f"the client's TLS {given} is given without its {lacks}; give both")
        return grpc.ssl_channel_credentials(
            _read(self.ca, "CA"), _read(self.key, "key"), _read(self.certificate, "certificate")
        )


def _read(path: str | Path | None, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ServerError(f"cannot read the TLS {what} {path}: {error.strerror}") from None


@dataclass(frozen=True)
class Connection:
    """A server and how it is reached.

    Attributes:
        target: `host:port`, or `unix:PATH`; with `dns:///NAME:PORT` or `ipv4:A:PORT,B:PORT` calls
            are spread over all addresses that are serving.
        tls: None: without.
        api_key: sent with each request. Without TLS whoever can listen in reads it.
    """

    target: str
    tls: Tls | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ServerError("the API key has characters that no header can carry")

    def channel(self, grpc: Any) -> Any:
        """A channel to it.

        Args:
            grpc: the module `grpc`, or `grpc.aio`.
        """
        # A server that is being started should be found soon after it is there.
        backoff = {"initial": 100, "min": 100, "max": 5000}
        options: list[tuple[str, int | str]] = [
            (f"grpc.{name}_reconnect_backoff_ms", value) for name, value in backoff.items()
        ]
        options.append(("grpc.max_receive_message_length", MAX_ANSWER_BYTES))
        if self.target.startswith(SEVERAL):
            options.append(("grpc.service_config", SPREAD))
        if self.tls is None:
            return grpc.insecure_channel(self.target, options=options)
        if self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return grpc.secure_channel(self.target, self.tls.credentials(), options=options)

    def metadata(self, request_id: str | None) -> list[tuple[str, str]]:
        """What goes with a request.

        Args:
            request_id: what it is to be called in the server's log; None: what the server likes.
        """
        found = []
        if self.api_key is not None:
            found.append(("authorization", f"Bearer {self.api_key}"))
        if request_id is not None:
            if not (
                0 < len(request_id) <= 128 and request_id.isascii() and request_id.isprintable()
            ):
                raise ServerError(
                    f"the request id {request_id!r} is not 1 to 128 printable ASCII characters"
                )
            found.append((REQUEST_ID, request_id))
        return found


def limit_of(timeout: float | None, default: float | None) -> float | None:
    """Seconds that a request may take; None: any time."""
    seconds = default if timeout is None else timeout
    # What gRPC cannot add to its clock it takes for a time that is over.
    return None if seconds is None or seconds > LONGEST_TIMEOUT else seconds
