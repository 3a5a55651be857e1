"""What a client needs to reach a server: where it is, whether by TLS, and by which key."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
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

NEAR = ("127.", "localhost", "[::1]", "::1", "unix:")
"""Where nothing leaves the machine."""

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

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """What is in the files: CA, key, certificate.

        Raises:
            ServerError: one cannot be read or used, or one of the two is missing.
        """
        if (self.certificate is None) != (self.key is None):
            given, lacks = ("key", "certificate") if self.key else ("certificate", "key")
            raise ServerError(f"the client's TLS {given} is given without its {lacks}; give both")
        import ssl

        from serve import pem

        authority = key = chain = None
        if self.ca is not None:
            path = Path(self.ca).expanduser()
            authority = pem.read(path, "TLS CA")
            pem.trusting(path, authority)
        if self.certificate is not None and self.key is not None:
            files = (Path(self.certificate).expanduser(), Path(self.key).expanduser())
            _, chain, key = pem.read_pair(*files, ssl.PROTOCOL_TLS_CLIENT)
        return authority, key, chain

    def credentials(self) -> Any:
        """Raises ServerError, as `read` does."""
        import grpc

        return grpc.ssl_channel_credentials(*self.read())


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
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ServerError("the API key has characters that no header can carry")

    def told(self) -> dict[str, Any]:
        """It as JSON can hold it, the key included, for another process of this machine."""
        return json.loads(json.dumps(asdict(self), default=str))  # type: ignore[no-any-return]

    @classmethod
    def of(cls, told: dict[str, Any]) -> Connection:
        """The one that was told."""
        return cls(told["target"], told["tls"] and Tls(**told["tls"]), told["api_key"])

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
