"""What an interceptor does around an RPC, whichever of the four kinds it is."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc

Around = Callable[[Any, grpc.aio.ServicerContext], AbstractAsyncContextManager[None]]


def within(handler: grpc.RpcMethodHandler, around: Around) -> grpc.RpcMethodHandler:
    """The handler, run inside of what `around` gives for its request (None if that is a stream)."""
    behavior = _behavior(handler)

    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with around(None if handler.request_streaming else request, context):
            return await behavior(request, context)

    async def answer_stream(request: Any, context: grpc.aio.ServicerContext) -> None:
        async with around(None if handler.request_streaming else request, context):
            answering = behavior(request, context)
            if inspect.isasyncgen(answering):  # a servicer may yield, or write by itself
                async for response in answering:
                    await context.write(response)
            else:
                await answering

    return _like(handler, answer_stream if handler.response_streaming else answer)


def refusing(
    handler: grpc.RpcMethodHandler, refuse: Callable[[grpc.aio.ServicerContext], Awaitable[None]]
) -> grpc.RpcMethodHandler:
    """A handler of the same kind that does nothing but abort. It parses nothing."""

    async def answer(request: Any, context: grpc.aio.ServicerContext) -> None:
        await refuse(context)

    return _like(handler, answer, parse=False)


def _behavior(handler: grpc.RpcMethodHandler) -> Callable[..., Any]:
    found: Callable[..., Any] = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    return found


def _like(
    handler: grpc.RpcMethodHandler, behavior: Callable[..., Any], *, parse: bool = True
) -> grpc.RpcMethodHandler:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    deserializer = handler.request_deserializer if parse else None
    return make(behavior, deserializer, handler.response_serializer)
