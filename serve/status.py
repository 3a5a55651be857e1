"""gRPC errors that a program can act on: google.rpc.Status with its standard details.

Source: the error model of google/rpc/status.proto and google/rpc/error_details.proto; the richer
form travels in the `grpc-status-details-bin` trailer.
"""

from __future__ import annotations

from typing import NoReturn

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from serve.connection import REQUEST_ID
from serve.observing import CALL

MAX_TEXT = 400
MAX_VIOLATIONS = 10
"""Trailers are limited to 8 KiB by most peers, and a request may hold thousands of faults."""


async def abort(
    context: grpc.aio.ServicerContext,
    code: grpc.StatusCode,
    message: str,
    *details: Message,
) -> NoReturn:
    """End the RPC with a status, its message in one line, and details."""
    status = status_pb2.Status(code=code.value[0], message=one_line(message))
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    told = rpc_status.to_status(status)
    if (call := CALL.get()) is not None:  # these trailers replace those that were set
        named = (*told.trailing_metadata, (REQUEST_ID, call.request_id))
        told = told._replace(trailing_metadata=named)
    await context.abort_with_status(told)
    raise AssertionError("abort does not return")


def bad_request(violations: list[tuple[str, str]]) -> error_details_pb2.BadRequest:
    """All violations, up to `MAX_VIOLATIONS` in full and the number of the others."""
    shown = [(field, one_line(text)) for field, text in violations[:MAX_VIOLATIONS]]
    if rest := len(violations) - len(shown):
        shown.append((shown[0][0].partition(".")[0], f"and {rest} more"))
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=field, description=text)
            for field, text in shown
        ]
    )


def retry_after(seconds: float) -> error_details_pb2.RetryInfo:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(int(seconds * 1e9))
    return info


def one_line(text: str) -> str:
    """Printable, on one line, and of bounded length."""
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_TEXT else flat[: MAX_TEXT - 1] + "…"
