"""GenerationService: RPCs on one side, the engine on the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from serve.auth import CALLER
from serve.faults import GenerationFailedError, OutOfMemoryFaultError
from serve.lane import Lane, LaneFullError
from serve.models import Models, Served, UnknownModelError
from serve.reply import (
    EngineStoppedError,
    ImpossibleError,
    Scored,
    TextReply,
)
from serve.requests import InvalidRequestError
from serve.results import Delta, token_score
from serve.scheduler import PoolTooSmallError, QueueFullError
from serve.status import abort, bad_request, one_line, retry_after
from serve.v1 import generation_pb2 as pb
from serve.v1 import generation_pb2_grpc as pb_grpc
from serve.wire import delta_message, finish_message, model_fields, score_message

if TYPE_CHECKING:  # not at run time: the port is bound before torch, which takes seconds, is loaded
    from serve.engine import Engine

log = logging.getLogger(__name__)

T = TypeVar("T")

NAME = "serve.v1.GenerationService"

RETRY_SECONDS = 1.0
"""When a refused client should come again: about what a short request takes."""

MAX_BATCH = 1024
"""Requests in one BatchGenerate."""

MAX_TOKENIZING = 16
"""Tokenize and Detokenize held at once; each may take a second and 20 MB."""


class GenerationService(pb_grpc.GenerationServiceServicer):  # type: ignore[misc]
    """Answers UNAVAILABLE until `open`, and again after `close`.

    Args:
        models: what it answers with.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._open = False
        self._closed_because = "the server is loading its model"
        # Each takes milliseconds to a second that health checks must not wait for; and texts that
        # are only tokenized must not hold up those that are to be generated from (`Served`).
        self._tokenizing = Lane("antiphon-tokenize", MAX_TOKENIZING)
        self._writing = Lane("antiphon-write")
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self) -> None:
        """Take requests for the models that there are, now or later; there must be one."""
        self._open = True

    def close(self, reason: str) -> None:
        """Take no new requests of any kind; running ones go on."""
        self._open = False
        self._closed_because = reason

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        await self._idle.wait()

    async def Generate(  # noqa: N802 - the contract's name
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> pb.GenerateResponse:
        async with self._generation(request, context) as (prompt, reply):
            return await _whole(prompt, reply)

    async def GenerateStream(  # noqa: N802 - the contract's name
        self, request: pb.GenerateStreamRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with self._generation(request, context) as (prompt, reply):
            await context.write(pb.GenerateStreamResponse(prompt=prompt))
            async for event in reply:
                if isinstance(event, Delta):
                    delta = delta_message(event)
                    await context.write(pb.GenerateStreamResponse(delta=delta))
                else:
                    await context.write(pb.GenerateStreamResponse(finish=finish_message(event)))

    async def BatchGenerate(  # noqa: N802 - the contract's name
        self, request: pb.BatchGenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        count = len(request.specs)
        if not 1 <= count <= MAX_BATCH:
            text = f"{count} requests given, 1 to {MAX_BATCH} allowed"
            details = bad_request([("specs", text)])
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, text, details)
        async with self._answering(context):
            at_once = max(1, min(engine.capacity for engine in self._models.engines) // 2)
            if (caller := CALLER.get()) is not None:
                at_once = min(at_once, caller.places)
            turns = asyncio.Semaphore(at_once)
            writing = asyncio.Lock()

            async def one(index: int) -> None:
                async with turns:
                    response = await self._outcome(request.specs[index])
                response.index = index
                async with writing:
                    await context.write(response)

            tasks = [asyncio.ensure_future(one(index)) for index in range(count)]
            try:
                await asyncio.gather(*tasks)
            finally:  # the client left, or a write failed: nobody waits for the others
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _outcome(self, spec: pb.GenerationSpec) -> pb.BatchGenerateResponse:
        """One request of several: its texts, or why there are none. It gets the model that is
        served when its turn comes: a batch may take longer than a model is served."""
        while True:
            try:
                served = self._models.find(spec.model)
                seen = served.engine.departures
                with served.used():
                    async with self._texts(served, spec) as (prompt, reply):
                        whole = await _whole(prompt, reply)
                return pb.BatchGenerateResponse(completion=whole)
            except Exception as error:
                if isinstance(error, QueueFullError) and await self._room(served, seen):
                    continue
                refusal = _refusal(error, too_large="spec.max_tokens")
                if refusal is None:
                    raise
                failure = pb.Failure(code=refusal.code.value[0], message=one_line(refusal.message))
                for field, text in refusal.violations:
                    failure.violations.add(field=field, description=one_line(text))
                return pb.BatchGenerateResponse(failure=failure)

    async def _room(self, served: Served, seen: int) -> bool:
        """Wait until a place in the full queue may have come free; False: none ever will, as nobody
        is there who could leave (more texts are asked for than the queue holds).

        Args:
            seen: the engine's departures before the place was refused.
        """
        if served.reading.held:
            await served.reading.one_ends()
            return True
        return await served.engine.departure(seen)

    async def Score(  # noqa: N802 - the contract's name
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> pb.ScoreResponse:
        field = request.WhichOneof("content") or "content"
        async with self._model(request.model, context, too_large=field) as served:
            sequence = await self._read(served, served.sequences.to_score, request)
            with served.engine.score(sequence) as reply:
                scored = await reply.scored()
            # With 20 alternatives for each of thousands of tokens this takes a while.
            response = await self._writing.run(scores_message, served.engine, scored)
            response.request_id = reply.request_id
            return response

    async def Tokenize(  # noqa: N802 - the contract's name
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        async with self._model(request.model, context) as served:
            return await self._tokenizing.run(served.tokens.tokenize, request)

    async def Detokenize(  # noqa: N802 - the contract's name
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        async with self._model(request.model, context) as served:
            return await self._tokenizing.run(served.tokens.detokenize, request)

    async def ListModels(  # noqa: N802 - the contract's name
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        async with self._answering(context):
            infos = [engine.info for engine in self._models.engines]
            return pb.ListModelsResponse(models=[pb.Model(**model_fields(info)) for info in infos])

    async def GetModel(  # noqa: N802 - the contract's name
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelResponse:
        async with self._model(request.model, context) as served:
            return pb.GetModelResponse(**model_fields(served.engine.info))

    @contextlib.asynccontextmanager
    async def _generation(
        self,
        request: pb.GenerateRequest | pb.GenerateStreamRequest,
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[tuple[pb.PromptInfo, TextReply]]:
        """One text from its request to its end. However it ends, nothing of it is left behind."""
        spec = request.spec
        async with (
            self._model(spec.model, context, too_large="spec.max_tokens") as served,
            self._texts(served, spec) as texts,
        ):
            yield texts

    @contextlib.asynccontextmanager
    async def _texts(
        self, served: Served, spec: pb.GenerationSpec
    ) -> AsyncIterator[tuple[pb.PromptInfo, TextReply]]:
        asked = await self._read(served, served.sequences.to_generate, spec)
        with served.engine.submit(asked) as reply:
            prompt = pb.PromptInfo(
                request_id=reply.request_id,
                model=served.engine.name,
                prompt_tokens=reply.prompt_tokens,
                seed=reply.seed,
                model_version=served.engine.version,
            )
            if spec.HasField("prompt_logprobs"):
                await reply.prompt_read()
                prompt.scores.extend(map(score_message, reply.prompt_scores))
            yield prompt, reply

    @contextlib.asynccontextmanager
    async def _model(
        self, name: str, context: grpc.aio.ServicerContext, *, too_large: str = ""
    ) -> AsyncIterator[Served]:
        """One request for a model, which stays until it is answered."""
        async with self._answering(context, too_large=too_large):
            served = self._models.find(name)
            with served.used():
                yield served

    @contextlib.asynccontextmanager
    async def _answering(
        self, context: grpc.aio.ServicerContext, *, too_large: str = ""
    ) -> AsyncIterator[None]:
        """One request, with a status for all that can go wrong with it. When the client cancels or
        goes away, gRPC cancels the coroutine that stands in here.

        Args:
            too_large: the field to name if the request does not fit into the cache.
        """
        if not self._open:
            details = retry_after(RETRY_SECONDS)
            await abort(context, grpc.StatusCode.UNAVAILABLE, self._closed_because, details)
        self._active += 1
        self._idle.clear()
        try:
            yield
        except grpc.aio.InternalError:
            # A write to a client that went away in that very moment. gRPC would log a traceback.
            log.debug("a client left in mid-write", exc_info=True)
        except Exception as error:
            refusal = _refusal(error, too_large=too_large)
            if refusal is None:
                raise
            details = [bad_request(refusal.violations)] if refusal.violations else []
            details += [retry_after(RETRY_SECONDS)] if refusal.retry else []
            await abort(context, refusal.code, refusal.message, *details)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def _read(self, served: Served, read: Callable[[Any], T], request: Any) -> T:
        """Check and tokenize, off the event loop. Requests in here count against the queue's limit:
        else a flood of prompts would pile up in front of it."""
        engine = served.engine
        if served.reading.held + engine.held >= engine.capacity:
            raise QueueFullError(
                f"the server holds {engine.capacity} requests, as many as it may; try again later"
            )
        return await served.reading.run(read, request)


async def _whole(prompt: pb.PromptInfo, reply: TextReply) -> pb.GenerateResponse:
    """Read the texts to their ends."""
    texts: dict[int, list[str]] = {}
    choices: dict[int, pb.Choice] = {}
    async for event in reply:
        choice = choices.setdefault(event.choice, pb.Choice())
        if isinstance(event, Delta):
            texts.setdefault(event.choice, []).append(event.text)
            choice.token_ids.extend(event.token_ids)
            choice.scores.extend(map(score_message, event.scores))
        else:
            choice.finish.CopyFrom(finish_message(event))
    for index, choice in choices.items():
        choice.text = "".join(texts.get(index, []))
    return pb.GenerateResponse(prompt=prompt, choices=[choices[index] for index in sorted(choices)])


@dataclass(frozen=True)
class _Refusal:
    """What a client is told of an error."""

    code: grpc.StatusCode
    message: str
    violations: list[tuple[str, str]] = field(default_factory=list)
    retry: bool = False


def _refusal(error: Exception, *, too_large: str) -> _Refusal | None:
    """None: it is no request's fault, and none that is known.

    Args:
        too_large: the field to name if the request does not fit into the cache.
    """
    text, code = str(error), grpc.StatusCode
    if isinstance(error, InvalidRequestError | ImpossibleError):
        return _Refusal(code.INVALID_ARGUMENT, text, error.violations)
    if isinstance(error, PoolTooSmallError):
        return _Refusal(code.INVALID_ARGUMENT, text, [(too_large, text)])
    if isinstance(error, UnknownModelError):
        return _Refusal(code.NOT_FOUND, text)
    if isinstance(error, QueueFullError | LaneFullError):
        return _Refusal(code.RESOURCE_EXHAUSTED, text, retry=True)
    if isinstance(error, EngineStoppedError):
        return _Refusal(code.UNAVAILABLE, text, retry=True)
    if isinstance(error, OutOfMemoryFaultError):
        return _Refusal(code.RESOURCE_EXHAUSTED, text, retry=True)
    if isinstance(error, GenerationFailedError):
        return _Refusal(code.INTERNAL, text)
    return None


def scores_message(engine: Engine, scored: Scored) -> pb.ScoreResponse:
    """All but the request's id."""
    scores = [token_score(engine.tokenizer, made) for made in scored.made]
    nats = 0.0 - math.fsum(score.logprob for score in scores)  # no negative zero
    count = sum(len(score.piece) for score in scores)
    return pb.ScoreResponse(
        model=engine.name,
        model_version=engine.version,
        scores=map(score_message, scores),
        total_nats=nats,
        bits_per_byte=nats / math.log(2) / count if count else None,
        byte_count=count,
        timing=pb.Timing(
            queue_seconds=scored.queue_seconds, prefill_seconds=scored.prefill_seconds
        ),
    )
