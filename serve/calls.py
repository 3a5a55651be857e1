"""Every call from its beginning to its status: named, counted, timed, traced and logged.

The outermost interceptor. Prompts are looked at only with `--log-prompts`, and no status message is
logged: it may quote from a prompt.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import Token
from typing import Any

import grpc

from serve.connection import REQUEST_ID
from serve.observing import CALL, Call, TextEnd

log = logging.getLogger(__name__)

SERVICE_PREFIX = "/serve.v1.GenerationService/"
MAX_ID = 128
MAX_PROMPT = 10_000
"""Characters of a prompt, or tokens, that are logged if prompts are."""

CODES = {code.value[0]: code.name for code in grpc.StatusCode}
NUMBERS = {name: number for number, name in CODES.items()}


class Watchers:
    """Whom the calls tell; what is not wanted is None.

    Args:
        metrics: counts calls (`serve.metrics.Metrics`).
        tracing: makes spans (`serve.tracing.Tracing`).
        slow_seconds: calls that take longer have a line of their own; 0: none has.
        log_prompts: log what was asked.
    """

    def __init__(
        self,
        metrics: Any = None,
        tracing: Any = None,
        slow_seconds: float = 0,
        log_prompts: bool = False,
    ) -> None:
        self.metrics = metrics
        self.tracing = tracing
        self.slow_seconds = slow_seconds
        self.log_prompts = log_prompts


class WatchCalls(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Tells the watchers of every call, and the caller its `x-request-id`: in the trailers, since
    what comes before a refusal would keep gRPC's own clients from trying again."""

    def __init__(self, watchers: Watchers) -> None:
        self._to = watchers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            if self._to.metrics is not None:
                self._to.metrics.called("unknown", "UNIMPLEMENTED", 0.0)
            return None
        if handler.request_streaming:
            return handler  # reflection alone
        path: str = handler_call_details.method
        metadata = {
            key: value
            for key, value in handler_call_details.invocation_metadata or ()
            if isinstance(value, str)
        }
        if handler.response_streaming:
            stream = handler.unary_stream

            async def answer_stream(request: Any, context: grpc.aio.ServicerContext) -> None:
                call, token = self._begin(path, metadata, context)
                try:
                    answering = stream(request, context)
                    if inspect.isasyncgen(answering):
                        async for response in answering:
                            await context.write(response)
                    else:
                        await answering
                finally:
                    self._end(path, call, token, request, context)

            return grpc.unary_stream_rpc_method_handler(
                answer_stream, handler.request_deserializer, handler.response_serializer
            )
        unary = handler.unary_unary

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            call, token = self._begin(path, metadata, context)
            try:
                return await unary(request, context)
            finally:
                self._end(path, call, token, request, context)

        return grpc.unary_unary_rpc_method_handler(
            answer, handler.request_deserializer, handler.response_serializer
        )

    def _begin(
        self, path: str, metadata: dict[str, str], context: grpc.aio.ServicerContext
    ) -> tuple[Call, Token[Call | None]]:
        given = metadata.get(REQUEST_ID, "")
        fit = 0 < len(given) <= MAX_ID and given.isascii() and given.isprintable()
        call = Call(given if fit else secrets.token_hex(8), path.rpartition("/")[2])
        if log.isEnabledFor(logging.INFO) or self._to.slow_seconds:
            call.peer = context.peer()  # now: later the connection may be gone
        context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
        if self._to.tracing is not None and path.startswith(SERVICE_PREFIX):
            self._to.tracing.begin(call, metadata)
        return call, CALL.set(call)

    def _end(
        self,
        path: str,
        call: Call,
        token: Token[Call | None],
        request: Any,
        context: grpc.aio.ServicerContext,
    ) -> None:
        seconds = time.monotonic() - call.started
        name = code_of(sys.exc_info()[1], context)
        if self._to.metrics is not None:
            self._to.metrics.called(call.method, name, seconds)
        if call.parent is not None:
            self._to.tracing.end(call, NUMBERS[name], name)
        level = logging.INFO if path.startswith(SERVICE_PREFIX) else logging.DEBUG
        slow = 0 < self._to.slow_seconds < seconds and level == logging.INFO
        if slow or log.isEnabledFor(level):
            fields: dict[str, Any] = {"method": call.method, "code": name, "seconds": seconds}
            fields["peer"] = call.peer
            if call.label:
                fields["key"] = call.label
            fields |= _about(call.texts)
            if self._to.log_prompts:
                fields["prompt"] = _prompt(request)
            if slow:
                log.warning("slow: over %g s", self._to.slow_seconds, extra={"fields": fields})
            else:
                log.log(level, "answered", extra={"fields": fields})
        CALL.reset(token)


def code_of(error: BaseException | None, context: grpc.aio.ServicerContext) -> str:
    """The status with which a call ends, by what its handler raised."""
    if isinstance(error, asyncio.CancelledError):
        left = context.time_remaining()
        return "DEADLINE_EXCEEDED" if left is not None and left <= 0 else "CANCELLED"
    code = context.code()
    number = code.value[0] if isinstance(code, grpc.StatusCode) else int(code or 0)
    if error is not None and not number:
        return "UNKNOWN"
    name: str = CODES.get(number, "UNKNOWN")
    return name


def _about(texts: list[TextEnd]) -> dict[str, Any]:
    """What a line says of a call's texts: sums, and the longest of the times."""
    if not texts:
        return {}
    reasons = Counter(text.reason for text in texts)
    ids = list(dict.fromkeys(text.request_id for text in texts))
    return {
        "model": texts[0].model,
        "id": ids[0] if len(ids) == 1 else f"{ids[0]}…{ids[-1]}",
        "texts": len(texts),
        "finish": ",".join(f"{r}:{n}" if len(texts) > 1 else r for r, n in reasons.items()),
        "prompt_tokens": sum(text.prompt_tokens for text in texts),
        "cached_tokens": sum(text.cached_tokens for text in texts),
        "completion_tokens": sum(text.completion_tokens for text in texts),
        "queue_seconds": max(text.queue_seconds for text in texts),
        "prefill_seconds": max(text.prefill_seconds for text in texts),
        "decode_seconds": max(text.decode_seconds for text in texts),
    }


def _prompt(request: Any) -> Any:
    """What was asked: the prompt of a text, or of each of several."""
    if hasattr(request, "specs"):
        return [_prompt(spec) for spec in request.specs]
    spec = getattr(request, "spec", request)
    if ids := getattr(getattr(spec, "token_ids", None), "ids", None):
        return list(ids[:MAX_PROMPT])
    return getattr(spec, "text", "")[:MAX_PROMPT]
