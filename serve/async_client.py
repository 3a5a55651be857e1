"""The client for asyncio. It asks what `serve.client.Client` asks, and waits without a thread.

async with AsyncClient("127.0.0.1:50051") as client:
    print((await client.generate("ROMEO:", max_tokens=100)).text)
    async for delta in client.stream("ROMEO:", seed=1):
        print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from serve.connection import DEFAULT_TARGET, DEFAULT_TIMEOUT, Connection, Tls, limit_of
from serve.errors import RequestError, readable_errors
from serve.results import (
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

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Unpack

    from serve.operations import Operation
    from serve.wire import RequestSettings

__all__ = ["AsyncClient", "AsyncCompletionStream", "RequestError", "Retry", "Tls"]

T = TypeVar("T")


class AsyncCompletionStream:
    """An async iterator over the `Delta`s of a text that is being made.

    An async context manager too: leaving it, or `cancel`, tells the server to stop; so does the
    cancelling of the task that reads it.

    Attributes:
        request_id, model, prompt_tokens, seed: known once the first delta, or the end, has come.
        finishes: how the texts ended, by their choice.
        prompt_scores: how likely the tokens of the prompt were, if that was asked for.
    """

    def __init__(
        self,
        open_call: Callable[[float | None], Any],
        target: str,
        retry: Retry,
        limit: float | None,
    ) -> None:
        from serve.operations import StreamState

        self._open = open_call
        self._target = target
        self._retry = retry
        self._deadline = Deadline(limit)
        self._failures = 0
        self._cancelled = False
        self._state = StreamState()
        self._call = open_call(limit)
        self._responses = aiter_of(self._call)

    @property
    def request_id(self) -> str:
        return self._state.request_id

    @property
    def model(self) -> str:
        return self._state.model

    @property
    def prompt_tokens(self) -> int:
        return self._state.prompt_tokens

    @property
    def seed(self) -> int:
        return self._state.seed

    @property
    def finishes(self) -> dict[int, Finish]:
        return self._state.finishes

    @property
    def prompt_scores(self) -> list[TokenScore]:
        return self._state.prompt_scores

    @property
    def finish(self) -> Finish | None:
        """How the first text ended; None until then."""
        return self._state.finish

    def __aiter__(self) -> AsyncCompletionStream:
        return self

    async def __anext__(self) -> Delta:
        while True:
            try:
                with readable_errors(self._target, connected=self.request_id != ""):
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
                self._failures += 1
                seconds = self._retry.wait(error, self._failures, self._deadline.left)
                if seconds is None or self._state.begun or self._cancelled:
                    raise
                await asyncio.sleep(seconds)
                self._state = type(self._state)()
                self._call = self._open(self._deadline.left)
                self._responses = aiter_of(self._call)

    def cancel(self) -> None:
        """Tell the server to stop. Harmless when the text is over."""
        self._cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> AsyncCompletionStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


def aiter_of(call: Any) -> AsyncIterator[Any]:
    """The one iterator over a call's answers."""
    return call.__aiter__()  # type: ignore[no-any-return]


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
                with readable_errors(self.target):
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
        return AsyncCompletionStream(open_call, self.target, self._retry, limit)

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
            with contextlib.suppress(RequestError), readable_errors(self.target):
                answer = await health.Check(
                    health_pb2.HealthCheckRequest(),
                    timeout=left,
                    wait_for_ready=True,
                    metadata=self._connection.metadata(None),
                )
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                seen = "it is not serving yet"
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
                with readable_errors(self.target):
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
