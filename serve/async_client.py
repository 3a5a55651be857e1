"""The client for asyncio. It asks what `serve.client.Client` asks, and waits without a thread.

async with AsyncClient("127.0.0.1:50051") as client:
    print((await client.generate("ROMEO:", max_tokens=100)).text)
    async for delta in client.stream("ROMEO:", seed=1):
        print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from serve.connection import DEFAULT_TARGET, DEFAULT_TIMEOUT, Connection, Tls, limit_of
from serve.errors import RequestError, readable_errors
from serve.results import (
    Completion,
    Delta,
    Detokenization,
    ModelInfo,
    Scores,
    Tokenization,
)
from serve.retry import NEVER, Deadline, Retry
from serve.streaming import TextStream

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Unpack

    from serve.operations import Operation
    from serve.wire import RequestSettings

__all__ = ["AsyncClient", "AsyncCompletionStream", "RequestError", "Retry", "Tls"]

T = TypeVar("T")


class AsyncCompletionStream(TextStream):
    """An async iterator over the `Delta`s of a text that is being made.

    An async context manager too: leaving it, or `cancel`, tells the server to stop; so does the
    cancelling of the task that reads it.
    """

    def _open(self, limit: float | None) -> None:
        super()._open(limit)
        self._responses: AsyncIterator[Any] = self._call.__aiter__()  # a call has one

    def __aiter__(self) -> AsyncCompletionStream:
        return self

    async def __anext__(self) -> Delta:
        while True:
            try:
                with readable_errors(self._connection, connected=self.request_id != ""):
                    async for response in self._responses:
                        if (delta := self._state.take(response)) is not None:
                            return delta
                raise StopAsyncIteration
            except asyncio.CancelledError:
                # gRPC tells in this way, too, of a call that its own side has cancelled.
                if not self._cancelled:
                    self.cancel()
                    raise
                raise RequestError("the stream was cancelled", code="CANCELLED") from None
            except RequestError as error:
                await asyncio.sleep(self._pause(error))
                self._open(self._deadline.left)

    async def __aenter__(self) -> AsyncCompletionStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


class AsyncClient:
    """Talks to one server from one event loop, in which it is made. Tasks may share it.

    The arguments, and those of its methods, are those of `serve.client.Client`.

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
        self._channel = self._connection.channel(grpc.aio)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        timeout: float | None = None,
        request_id: str | None = None,
        **settings: Unpack[RequestSettings],
    ) -> Completion:
        """Make a text and return it whole."""
        from serve import operations

        return await self._call(operations.generate(prompt, settings, model), timeout, request_id)

    async def batch(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        model: str = "",
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[tuple[int, Completion | RequestError]]:
        """Make the texts of many requests; each is handed out when it is done, with its index."""
        from serve import operations

        request = operations.batch_request(requests, model)
        metadata = self._connection.metadata(request_id)
        deadline, failures, begun = Deadline(limit_of(timeout, self.timeout)), 0, False
        while True:
            call = self._stub.BatchGenerate(request, timeout=deadline.left, metadata=metadata)
            try:
                with readable_errors(self._connection):
                    async for response in call:
                        begun = True
                        yield operations.batch_result(response)
                return
            except RequestError as error:
                failures += 1
                seconds = self._retry.wait(error, failures, deadline.left)
                if seconds is None or begun:
                    raise
                await asyncio.sleep(seconds)
            finally:
                call.cancel()

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        timeout: float | None = None,
        request_id: str | None = None,
        **settings: Unpack[RequestSettings],
    ) -> AsyncCompletionStream:
        """Make a text and hand it out as it comes."""
        from serve import operations

        request = operations.stream_request(prompt, settings, model)
        metadata = self._connection.metadata(request_id)

        def open_call(left: float | None) -> Any:
            return self._stub.GenerateStream(request, timeout=left, metadata=metadata)

        limit = limit_of(timeout, self.timeout)
        return AsyncCompletionStream(open_call, self._connection, self._retry, limit)

    async def score(
        self,
        content: str | Sequence[int],
        *,
        top: int = 0,
        model: str = "",
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Scores:
        """How likely the model finds a text."""
        from serve import operations

        return await self._call(operations.score(content, top, model), timeout, request_id)

    async def tokenize(
        self,
        text: str,
        *,
        special: bool = False,
        ids_only: bool = False,
        model: str = "",
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Tokenization:
        """Cut a text into the model's tokens."""
        from serve import operations

        operation = operations.tokenize(text, special, ids_only, model)
        return await self._call(operation, timeout, request_id)

    async def detokenize(
        self,
        ids: Iterable[int],
        *,
        model: str = "",
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Detokenization:
        """The text of tokens."""
        from serve import operations

        return await self._call(operations.detokenize(ids, model), timeout, request_id)

    async def list_models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """What models are served."""
        from serve import operations

        return await self._call(operations.list_models(), timeout)

    async def model(self, name: str = "", *, timeout: float | None = None) -> ModelInfo:
        """What is told of a model. Empty: of the one that is served."""
        from serve import operations

        return await self._call(operations.get_model(name), timeout)

    async def await_ready(self, timeout: float) -> None:
        """Wait until the server says that it is serving.

        Raises:
            RequestError: it did not within `timeout` seconds; the message says what it said last.
        """
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        health = health_pb2_grpc.HealthStub(self._channel)
        deadline, seen = Deadline(timeout), "it did not answer"
        while left := deadline.left:
            try:
                with readable_errors(self._connection):
                    answer = await health.Check(
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
            await asyncio.sleep(0.05)
        raise RequestError(
            f"{self.target} was not ready within {timeout:g} s: {seen}", code="DEADLINE_EXCEEDED"
        )

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _call(
        self, operation: Operation[T], timeout: float | None, request_id: str | None = None
    ) -> T:
        method = getattr(self._stub, operation.method)
        metadata = self._connection.metadata(request_id)
        deadline, failures = Deadline(limit_of(timeout, self.timeout)), 0
        while True:
            try:
                with readable_errors(self._connection):
                    answer = await method(
                        operation.request, timeout=deadline.left, metadata=metadata
                    )
                return operation.read(answer)
            except RequestError as error:
                failures += 1
                seconds = self._retry.wait(error, failures, deadline.left)
                if seconds is None:
                    raise
                await asyncio.sleep(seconds)
