"""What goes wrong at the other end of a connection, in a form that a caller can read and act on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpt.errors import ServerError
from serve.connection import REQUEST_ID

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
def readable_errors(target: str, *, connected: bool = False) -> Iterator[None]:
    """gRPC's errors as RequestErrors."""
    import grpc

    try:
        yield
    except grpc.RpcError as error:
        raise _readable(error, target, connected) from None


def _readable(error: grpc.RpcError, target: str, connected: bool) -> RequestError:
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    code, said = error.code().name, error.details() or ""
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
        what = "lost the connection to" if connected else "no server can be reached at"
        message = f"{what} {target} ({said}); is `antiphon serve` running?"
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
