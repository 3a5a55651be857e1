"""What goes wrong at the other end of a connection, in a form that a caller can read and act on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpt.errors import ServerError
from serve.connection import REQUEST_ID, Connection

if TYPE_CHECKING:
    import grpc

RETRYABLE = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")


class RequestError(ServerError):
    """The server refused or failed, or could not be reached.

    Attributes:
        code: name of the gRPC status, for example `INVALID_ARGUMENT`.
        violations: `(field, description)` of each fault of the request, if that was the reason.
        retry_after: seconds after which the server wants to be asked again, if it said so.
        request_id: what the server's log calls the request, if it came that far.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        violations: Sequence[tuple[str, str]] = (),
        retry_after: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.violations = list(violations)
        self.retry_after = retry_after
        self.request_id = request_id

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.code in RETRYABLE


@contextlib.contextmanager
def readable_errors(connection: Connection, *, connected: bool = False) -> Iterator[None]:
    """gRPC's errors as RequestErrors.

    Args:
        connected: whether something has come over it for this call.
    """
    import grpc

    try:
        yield
    except grpc.RpcError as error:
        raise _readable(error, connection, connected) from None


def _readable(error: grpc.RpcError, connection: Connection, connected: bool) -> RequestError:
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    code, said, target = error.code().name, error.details() or "", connection.target
    violations: list[tuple[str, str]] = []
    retry_after = None
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            violations += [(fault.field, fault.description) for fault in bad.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info = error_details_pb2.RetryInfo()
            detail.Unpack(info)
            retry_after = info.retry_delay.ToNanoseconds() / 1e9
    if code == "UNAVAILABLE" and status is None:
        # No status of the service's own: the connection itself failed.
        # What ends a connection that was there is told without the words "failed to connect".
        if connected or (_closed(said) and "failed to connect" not in said):
            message = f"lost the connection to {target} ({said}); is `antiphon serve` running?"
        else:
            message = _unreached(connection, said)
    elif code == "UNAUTHENTICATED":
        message = _unknown(connection)
    elif code == "DEADLINE_EXCEEDED":
        message = f"{target} did not finish within the time limit; allow more with a longer timeout"
    else:
        message = f"{target} answered {code}: {said}"
    named = [value for key, value in error.trailing_metadata() or () if key == REQUEST_ID]
    return RequestError(
        message,
        code=code,
        violations=violations,
        retry_after=retry_after,
        request_id=named[-1] if named else "",
    )


def _unknown(connection: Connection) -> str:
    """What to say of a server that wants another key, or one at all."""
    if connection.api_key is None:
        return (
            f"{connection.target} answered UNAUTHENTICATED: it wants an API key, and none was "
            f"sent; {GIVE_KEY}"
        )
    return (
        f"{connection.target} answered UNAUTHENTICATED: the API key that was sent is none of those "
        f"that it knows; ask whoever runs it for one, and {GIVE_KEY}"
    )


GIVE_KEY = (
    "put the key into the variable ANTIPHON_API_KEY or a file (--api-key-file), or give the client "
    "api_key="
)
GIVE_CA = "give the file with it: --tls-ca FILE, or Tls(ca=...)"


def _unreached(connection: Connection, said: str) -> str:
    """What to say of a server to which there is no connection.

    Args:
        said: gRPC's words. They are no interface, so what is not known by them is shown as it is.
    """
    target, tls = connection.target, connection.tls
    if tls is None:
        if _closed(said):
            return (
                f"{target} closed the connection at once; if it speaks TLS, so must the client: "
                "--tls or --tls-ca FILE, or tls="
            )
        return f"no server can be reached at {target} ({said}); is `antiphon serve` running?"
    if "CERTIFICATE_VERIFY_FAILED" in said:
        if "expired" in said:
            return f"the certificate of {target} has expired; whoever runs the server must renew it"
        if tls.ca is None:
            return (
                f"the certificate of {target} is not trusted: none of the usual authorities has "
                f"signed it; if its authority is another, {GIVE_CA}"
            )
        return (
            f"the certificate of {target} is not trusted: none of those in {tls.ca} has signed it; "
            f"ask whoever runs the server for its authority's certificate and {GIVE_CA}"
        )
    if "Hostname Verification" in said or "not in peer certificate" in said:
        return (
            f"the certificate of {target} is not made for "
            f"{tls.server_name or target.rpartition(':')[0]}; if the server is the right one, give "
            "a name that is in it: --tls-server-name NAME, or Tls(server_name=...)"
        )
    if "WRONG_VERSION_NUMBER" in said:
        return f"{target} does not speak TLS; leave out --tls and what begins with it, or tls="
    if _closed(said):
        if tls.certificate is None:
            return (
                f"{target} closed the connection at once; if it wants certificates of clients, "
                "give one: --tls-cert FILE --tls-key FILE, or Tls(certificate=..., key=...)"
            )
        return (
            f"{target} closed the connection at once; is the client's certificate "
            f"{tls.certificate} signed by an authority that the server trusts, and still valid?"
        )
    return f"no server can be reached at {target} ({said}); is `antiphon serve` running?"


def _closed(said: str) -> bool:
    return any(words in said for words in CLOSED)


CLOSED = ("Socket closed", "reset by peer", "Broken pipe", "EOF")
"""gRPC's words for a connection that is over before anything came."""
