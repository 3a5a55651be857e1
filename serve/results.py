"""What the client hands back: texts as plain data, and gRPC's errors in a readable form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt.errors import ServerError

if TYPE_CHECKING:
    import grpc

    from serve.v1 import generation_pb2 as pb

RETRYABLE = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")


class RequestError(ServerError):
    """The server refused or failed, or could not be reached.

    Attributes:
        code: name of the gRPC status, for example `INVALID_ARGUMENT`.
        violations: `(field, description)` of each fault of the request, if that was the reason.
        retry_after: seconds after which the server wants to be asked again, if it said so.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        violations: Sequence[tuple[str, str]] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.violations = list(violations)
        self.retry_after = retry_after

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.code in RETRYABLE


@dataclass(frozen=True)
class Delta:
    """A piece of a text, and the tokens made since the last one."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Finish:
    """How a text ended.

    Attributes:
        reason: `stop`, `end_of_text` or `length`.
        matched_stop: the stop string that ended it.
        completion_tokens: tokens made, end-of-text and those of a stop string included.
        seed: makes the same text again.
        queue_seconds, prefill_seconds, decode_seconds: where the server's time went.
    """

    reason: str
    matched_stop: str | None
    prompt_tokens: int
    completion_tokens: int
    seed: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Completion:
    """A whole text.

    Attributes:
        request_id: the server's id of the request; its log uses it.
        model: name of the model that made it.
    """

    text: str
    token_ids: list[int]
    finish: Finish
    request_id: str
    model: str


@dataclass(frozen=True)
class ModelInfo:
    """The model that is served. `architecture` holds plain values by their field's name."""

    name: str
    block_size: int
    vocab_size: int
    parameter_count: int
    dtype: str
    architecture: Mapping[str, int | str]
    tokenizer_kind: str
    tokenizer_fingerprint: str


def finish_of(message: pb.Finish) -> Finish:
    from serve.v1 import generation_pb2 as pb

    name: str = pb.FinishReason.Name(message.reason)
    return Finish(
        reason=name.removeprefix("FINISH_REASON_").lower(),
        matched_stop=message.matched_stop if message.HasField("matched_stop") else None,
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        seed=message.seed,
        queue_seconds=message.timing.queue_seconds,
        prefill_seconds=message.timing.prefill_seconds,
        decode_seconds=message.timing.decode_seconds,
    )


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
    return RequestError(message, code=code, violations=violations, retry_after=retry_after)
