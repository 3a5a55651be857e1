"""GenerationService: RPCs on one side, the engine on the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc

from gpt.sequence import Sequence
from serve.reply import Delta, EngineStoppedError, Finish, GenerationFailedError, Reply
from serve.requests import InvalidRequestError, SpecReader
from serve.scheduler import PoolTooSmallError, QueueFullError
from serve.status import abort, bad_request, retry_after
from serve.v1 import generation_pb2 as pb
from serve.v1 import generation_pb2_grpc as pb_grpc

if TYPE_CHECKING:  # not at run time: the port is bound before torch, which takes seconds, is loaded
    from serve.engine import Engine

log = logging.getLogger(__name__)

NAME = "serve.v1.GenerationService"

RETRY_SECONDS = 1.0
"""When a refused client should come again: about what a short request takes."""


class GenerationService(pb_grpc.GenerationServiceServicer):  # type: ignore[misc]
    """Answers UNAVAILABLE until `open`, and again after `close`."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._reader: SpecReader | None = None
        self._closed_because = "the server is loading its model"
        # Tokenizing a long prompt takes milliseconds that health checks must not wait for.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="antiphon-tokenize")
        self._reading = 0
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, engine: Engine) -> None:
        """Take requests for this engine."""
        self._reader = SpecReader(engine.tokenizer, engine.model.config)
        self._engine = engine

    def close(self, reason: str) -> None:
        """Take no new requests; running ones go on."""
        self._engine = None
        self._closed_because = reason

    async def idle(self) -> None:
        """Wait until no generation is running."""
        await self._idle.wait()

    async def Generate(  # noqa: N802 - the contract's name
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> pb.GenerateResponse:
        async with self._generation(request, context) as (prompt, reply):
            choice = pb.Choice()
            text = []
            async for event in reply:
                if isinstance(event, Delta):
                    text.append(event.text)
                    choice.token_ids.extend(event.token_ids)
                else:
                    choice.finish.CopyFrom(finish_message(event))
            choice.text = "".join(text)
            return pb.GenerateResponse(prompt=prompt, choices=[choice])

    async def GenerateStream(  # noqa: N802 - the contract's name
        self, request: pb.GenerateStreamRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with self._generation(request, context) as (prompt, reply):
            await context.write(pb.GenerateStreamResponse(prompt=prompt))
            async for event in reply:
                if isinstance(event, Delta):
                    delta = pb.Delta(text=event.text, token_ids=event.token_ids)
                    await context.write(pb.GenerateStreamResponse(delta=delta))
                else:
                    await context.write(pb.GenerateStreamResponse(finish=finish_message(event)))

    async def GetModel(  # noqa: N802 - the contract's name
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelResponse:
        engine, _ = await self._serving(request.model, context)
        return model_message(engine)

    async def _serving(
        self, model: str, context: grpc.aio.ServicerContext
    ) -> tuple[Engine, SpecReader]:
        """The engine, if it takes requests and serves that model; otherwise the RPC ends here."""
        engine, reader = self._engine, self._reader
        if engine is None or reader is None:
            await abort(
                context,
                grpc.StatusCode.UNAVAILABLE,
                self._closed_because,
                retry_after(RETRY_SECONDS),
            )
        if model not in ("", engine.name):
            await abort(
                context,
                grpc.StatusCode.NOT_FOUND,
                f"{engine.name!r} is served here, not {model[:100]!r}",
            )
        return engine, reader

    @contextlib.asynccontextmanager
    async def _generation(
        self,
        request: pb.GenerateRequest | pb.GenerateStreamRequest,
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[tuple[pb.PromptInfo, Reply]]:
        """One request from its check to its end. However it ends, nothing of it is left behind:
        when the client cancels or goes away, gRPC cancels the coroutine that stands in here."""
        engine, reader = await self._serving(request.spec.model, context)
        self._active += 1
        self._idle.clear()
        try:
            sequence = await self._read(engine, reader, request.spec)
            reply = engine.submit(sequence)
            try:
                prompt = pb.PromptInfo(
                    request_id=reply.request_id,
                    model=engine.name,
                    prompt_tokens=reply.prompt_tokens,
                    seed=reply.seed,
                )
                yield prompt, reply
            finally:
                reply.cancel()
        except InvalidRequestError as error:
            details = bad_request(error.violations)
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error), details)
        except PoolTooSmallError as error:
            details = bad_request([("spec.max_tokens", str(error))])
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error), details)
        except QueueFullError as error:
            details = retry_after(RETRY_SECONDS)
            await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), details)
        except EngineStoppedError as error:
            details = retry_after(RETRY_SECONDS)
            await abort(context, grpc.StatusCode.UNAVAILABLE, str(error), details)
        except GenerationFailedError as error:
            await abort(context, grpc.StatusCode.INTERNAL, str(error))
        except grpc.aio.InternalError:
            # A write to a client that went away in that very moment. gRPC would log a traceback.
            log.debug("a client left in mid-write", exc_info=True)
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def _read(self, engine: Engine, reader: SpecReader, spec: pb.GenerationSpec) -> Sequence:
        """Check and tokenize, off the event loop. Requests in here count against the queue's limit:
        else a flood of prompts would pile up in front of it."""
        if self._reading + engine.held >= engine.capacity:
            raise QueueFullError(
                f"the server holds {engine.capacity} requests, as many as it may; try again later"
            )
        self._reading += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, reader.read, spec)
        finally:
            self._reading -= 1


def finish_message(finish: Finish) -> pb.Finish:
    return pb.Finish(
        reason=f"FINISH_REASON_{finish.reason.name}",
        matched_stop=finish.matched_stop,
        usage=pb.Usage(
            prompt_tokens=finish.prompt_tokens, completion_tokens=finish.completion_tokens
        ),
        seed=finish.seed,
        timing=pb.Timing(
            queue_seconds=finish.queue_seconds,
            prefill_seconds=finish.prefill_seconds,
            decode_seconds=finish.decode_seconds,
        ),
    )


def model_message(engine: Engine) -> pb.GetModelResponse:
    config = engine.model.config
    return pb.GetModelResponse(
        name=engine.name,
        block_size=config.block_size,
        vocab_size=engine.tokenizer.n_vocab,
        parameter_count=engine.model.num_params(),
        dtype=str(engine.dtype).removeprefix("torch."),
        architecture=pb.Architecture(
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_kv_head=config.kv_heads,
            d_model=config.d_model,
            head_dim=config.head_width,
            d_ff=config.mlp_width,
            position=config.position,
            pattern=config.pattern,
            norm=config.norm,
            mlp=config.mlp,
        ),
        tokenizer=pb.TokenizerInfo(
            kind=engine.tokenizer.kind, fingerprint=engine.tokenizer.fingerprint
        ),
    )
