"""A Python client for GenerationService.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("ROMEO:", max_tokens=100).text)
        for delta in client.stream("ROMEO:", seed=1):
            print(delta.text, end="", flush=True)

`serve.async_client.AsyncClient` is the same for asyncio. Nothing here imports torch, and gRPC is
imported when a client is made.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from serve.connection import DEFAULT_TARGET, DEFAULT_TIMEOUT, Connection, Tls, limit_of
from serve.errors import RequestError, readable_errors
from serve.results import (
    Choice,
    Completion,
    Delta,
    Detokenization,
    Finish,
    ModelInfo,
    Scores,
    Tokenization,
    TokenScore,
)
from serve.retry import NEVER, Deadline, Retry
from serve.streaming import TextStream

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Unpack

    from serve.operations import Operation
    from serve.wire import RequestSettings

__all__ = [
    "DEFAULT_TARGET",
    "DEFAULT_TIMEOUT",
    "Choice",
    "Client",
    "Completion",
    "CompletionStream",
    "Delta",
    "Detokenization",
    "Finish",
    "ModelInfo",
    "RequestError",
    "Retry",
    "Scores",
    "Tls",
    "TokenScore",
    "Tokenization",
]

T = TypeVar("T")


class CompletionStream(TextStream):
    """An iterator over the `Delta`s of a text that is being made.

    A context manager too: leaving it, or `cancel`, tells the server to stop.
    """

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while True:
            try:
                with readable_errors(self._connection, connected=self.request_id != ""):
                    for response in self._call:
                        if (delta := self._state.take(response)) is not None:
                            return delta
                raise StopIteration
            except RequestError as error:
                time.sleep(self._pause(error))
                self._open(self._deadline.left)

    def __enter__(self) -> CompletionStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


class Client:
    """Talks to one server. Threads may share it.

    Args:
        target: `host:port`.
        timeout: seconds that a whole request may take unless it says otherwise; None: any time.
            Attempts and the waits between them share it.
        retry: when a request that the server could not take is sent again, as `Retry()`; nothing is
            unless that is given. A text of which something has come never is.
        tls: True, or a `Tls` that says by which certificates.
        api_key: who asks, if the server wants to know.

    Raises (from its methods):
        RequestError: see there.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        retry: Retry = NEVER,
        tls: Tls | bool = False,
        api_key: str | None = None,
    ) -> None:
        import grpc

        from serve.v1 import generation_pb2_grpc

        self.target = target
        self.timeout = timeout
        self._retry = retry
        self._connection = Connection(target, Tls() if tls is True else tls or None, api_key)
        self._channel = self._connection.channel(grpc)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        timeout: float | None = None,
        request_id: str | None = None,
        **settings: Unpack[RequestSettings],
    ) -> Completion:
        """Make a text and return it whole.

        Args:
            prompt: text, or token ids; empty starts from end-of-text.
            model: fail unless this is the model served.
            timeout: seconds for this request instead of the client's.
            request_id: what the server's log and traces are to call it.
            settings: the fields of `gpt.params.SamplingParams` and of `serve.wire.RequestSettings`;
                one that is left out, or None, has its default.
        """
        from serve import operations

        return self._call(operations.generate(prompt, settings, model), timeout, request_id)

    def batch(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        model: str = "",
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Iterator[tuple[int, Completion | RequestError]]:
        """Make the texts of many requests; each is handed out when it is done, with its index.

        Args:
            requests: for each the arguments of `generate` by name, `prompt` among them.
            model, timeout, request_id: as in `generate`; for all together.
        """
        from serve import operations

        request = operations.batch_request(requests, model)
        metadata = self._connection.metadata(request_id)
        deadline, failures, begun = Deadline(limit_of(timeout, self.timeout)), 0, False
        while True:
            try:
                with readable_errors(self._connection):
                    call = self._stub.BatchGenerate(
                        request, timeout=deadline.left, metadata=metadata
                    )
                    for response in call:
                        begun = True
                        yield operations.batch_result(response)
                return
            except RequestError as error:
                failures += 1
                seconds = self._retry.wait(error, failures, deadline.left)
                if seconds is None or begun:
                    raise
                time.sleep(seconds)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        timeout: float | None = None,
        request_id: str | None = None,
        **settings: Unpack[RequestSettings],
    ) -> CompletionStream:
        """Make a text and hand it out as it comes. The arguments are those of `generate`."""
        from serve import operations

        request = operations.stream_request(prompt, settings, model)
        metadata = self._connection.metadata(request_id)

        def open_call(left: float | None) -> Any:
            return self._stub.GenerateStream(request, timeout=left, metadata=metadata)

        limit = limit_of(timeout, self.timeout)
        return CompletionStream(open_call, self._connection, self._retry, limit)

    def score(
        self,
        content: str | Sequence[int],
        *,
        top: int = 0,
        model: str = "",
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Scores:
        """How likely the model finds a text.

        Args:
            content: text, or token ids; at least one token, and no more than the context holds.
            top: how many of the most likely tokens are wanted at each place, 0 to 20.
            model, timeout, request_id: as in `generate`.
        """
        from serve import operations

        return self._call(operations.score(content, top, model), timeout, request_id)

    def tokenize(
        self,
        text: str,
        *,
        special: bool = False,
        ids_only: bool = False,
        model: str = "",
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Tokenization:
        """Cut a text into the model's tokens.

        Args:
            text: at most 1 MiB of UTF-8.
            special: take the text of special tokens, as `<|endoftext|>`, as those tokens.
            ids_only: leave the tokens' bytes and places out.
            model, timeout, request_id: as in `generate`.
        """
        from serve import operations

        operation = operations.tokenize(text, special, ids_only, model)
        return self._call(operation, timeout, request_id)

    def detokenize(
        self,
        ids: Iterable[int],
        *,
        model: str = "",
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Detokenization:
        """The text of tokens. The arguments are as in `generate`."""
        from serve import operations

        return self._call(operations.detokenize(ids, model), timeout, request_id)

    def list_models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """What models are served."""
        from serve import operations

        return self._call(operations.list_models(), timeout)

    def model(self, name: str = "", *, timeout: float | None = None) -> ModelInfo:
        """What is told of a model. Empty: of the one that is served."""
        from serve import operations

        return self._call(operations.get_model(name), timeout)

    def await_ready(self, timeout: float) -> None:
        """Wait until the server says that it is serving.

        Raises:
            RequestError: it did not within `timeout` seconds; the message says what it said last.
        """
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        health = health_pb2_grpc.HealthStub(self._channel)
        end = time.monotonic() + timeout
        seen = "it did not answer"
        while (left := end - time.monotonic()) > 0:
            try:
                with readable_errors(self._connection):
                    answer = health.Check(
                        health_pb2.HealthCheckRequest(),
                        timeout=left,
                        metadata=self._connection.metadata(None),
                    )
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                seen = "it is not serving yet"
            except RequestError as error:
                if error.code != "DEADLINE_EXCEEDED":
                    seen = str(error)
            time.sleep(min(0.05, max(0.0, left)))
        raise RequestError(
            f"{self.target} was not ready within {timeout:g} s: {seen}", code="DEADLINE_EXCEEDED"
        )

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(
        self, operation: Operation[T], timeout: float | None, request_id: str | None = None
    ) -> T:
        method = getattr(self._stub, operation.method)
        metadata = self._connection.metadata(request_id)
        deadline, failures = Deadline(limit_of(timeout, self.timeout)), 0
        while True:
            try:
                with readable_errors(self._connection):
                    answer = method(operation.request, timeout=deadline.left, metadata=metadata)
                return operation.read(answer)
            except RequestError as error:
                failures += 1
                seconds = self._retry.wait(error, failures, deadline.left)
                if seconds is None:
                    raise
                time.sleep(seconds)
