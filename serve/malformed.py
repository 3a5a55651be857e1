"""Requests whose bytes are no message: answered, not logged with a traceback.

gRPC parses a request before any servicer sees it; if that fails, its default is UNKNOWN and a
traceback in the log for each, with which anybody could fill the disk.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError


@dataclass(frozen=True)
class _Malformed:
    """Stands in for a request that could not be parsed."""

    reason: str


class RefuseMalformed(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Answers INVALID_ARGUMENT to bytes that are not the RPC's request message."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        parse = handler.request_deserializer

        def tolerant(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError as error:
                return _Malformed(str(error))

        async def refuse(request: _Malformed, context: grpc.aio.ServicerContext) -> None:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the bytes are not the request message of this RPC ({request.reason})",
            )

        if handler.request_streaming:
            if not handler.response_streaming:
                return handler  # there is no such RPC here
            talk = handler.stream_stream

            async def answer_talk(
                requests: AsyncIterator[Any], context: grpc.aio.ServicerContext
            ) -> AsyncIterator[Any]:
                async def checked() -> AsyncIterator[Any]:
                    async for request in requests:
                        if isinstance(request, _Malformed):
                            await refuse(request, context)
                        yield request

                async for response in talk(checked(), context):
                    yield response

            return grpc.stream_stream_rpc_method_handler(
                answer_talk, tolerant, handler.response_serializer
            )
        if handler.response_streaming:
            stream = handler.unary_stream

            async def answer_stream(request: Any, context: grpc.aio.ServicerContext) -> None:
                if isinstance(request, _Malformed):
                    await refuse(request, context)
                answering = stream(request, context)
                if inspect.isasyncgen(answering):  # a servicer may yield, or write by itself
                    async for response in answering:
                        await context.write(response)
                else:
                    await answering

            return grpc.unary_stream_rpc_method_handler(
                answer_stream, tolerant, handler.response_serializer
            )
        unary = handler.unary_unary

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            if isinstance(request, _Malformed):
                await refuse(request, context)
            return await unary(request, context)

        return grpc.unary_unary_rpc_method_handler(answer, tolerant, handler.response_serializer)
