"""The process that puts load on a server over gRPC, or on an engine of its own without.

    python -m serve.bench.worker grpc
    python -m serve.bench.worker engine MODEL [options of antiphon serve]

Over gRPC the first line on standard input says how the server is reached; it may hold a key. Takes
jobs there, one JSON object a line, and answers on standard output likewise: first
`ready` with what is served, then `progress` and `seen` for each job, or `error`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from gpt.errors import UserError
from serve.bench.asking import Ask, Lengths, Requests, Row
from serve.bench.drive import AskServer, Drive, Load, Message, RefusedError, Seen
from serve.connection import Connection
from serve.errors import readable_errors
from serve.results import Delta


@asynccontextmanager
async def over_grpc(reached: Connection) -> AsyncIterator[tuple[AskServer, dict[str, Any]]]:
    """What asks a server, and what that serves."""
    import grpc

    from serve.v1 import generation_pb2 as pb
    from serve.v1 import generation_pb2_grpc

    metadata = reached.metadata(None)
    async with reached.channel(grpc.aio) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def ask(asked: Ask) -> AsyncIterator[Message]:
            spec = pb.GenerationSpec(
                max_tokens=asked.output, seed=asked.seed, ignore_end_of_text=True
            )
            if isinstance(asked.prompt, str):
                spec.text = asked.prompt
            else:
                spec.token_ids.ids.extend(asked.prompt)
            request = pb.GenerateStreamRequest(spec=spec)
            try:
                async for event in stub.GenerateStream(request, metadata=metadata):
                    yield Message(event.prompt.prompt_tokens, len(event.delta.token_ids))
            except grpc.aio.AioRpcError as error:
                raise RefusedError(error.code().name) from None

        with readable_errors(reached):
            model = await stub.GetModel(pb.GetModelRequest(), timeout=10, metadata=metadata)
        special = [*model.tokenizer.special_tokens.values()]
        yield ask, _described(model.block_size, model.vocab_size, special)


@asynccontextmanager
async def in_process(arguments: list[str]) -> AsyncIterator[tuple[AskServer, dict[str, Any]]]:
    """What asks an engine in this process, loaded as `antiphon serve` loads it."""
    from gpt.params import SamplingParams
    from gpt.starter import Starter
    from serve.asked import Asked
    from serve.faults import GenerationFailedError
    from serve.ready import self_check, warm_up
    from serve.server import load, parse, start_log

    settings = parse(arguments, "antiphon serve")
    start_log(settings)
    engine = load(settings, settings.models[0])
    starter = Starter(engine.model.config, engine.tokenizer)

    async def ask(asked: Ask) -> AsyncIterator[Message]:
        params = SamplingParams(max_tokens=asked.output, seed=asked.seed, ignore_end_of_text=True)
        try:
            sequence = starter.start(asked.prompt, params)
            with engine.submit(Asked([sequence])) as reply:
                yield Message(reply.prompt_tokens, 0)
                async for event in reply:
                    yield Message(0, len(event.token_ids) if isinstance(event, Delta) else 0)
        except (UserError, GenerationFailedError) as error:
            raise RefusedError(type(error).__name__) from None

    engine.start()
    try:
        await self_check(engine)
        if settings.warmup:
            await warm_up(engine, settings.max_running)
        info = engine.info
        yield ask, _described(info.block_size, info.vocab_size, [*info.special_tokens.values()])
    finally:
        engine.stop()


def _described(block_size: int, vocab_size: int, special: list[int]) -> dict[str, Any]:
    return {"block_size": block_size, "vocab_size": vocab_size, "special": special}


def requests_of(job: dict[str, Any], served: dict[str, Any]) -> tuple[Iterator[Ask], Iterator[Ask]]:
    """The requests of a job, and its long prompts, for what is served."""
    special = set(served["special"])
    ids = [token for token in range(served["vocab_size"]) if token not in special]
    requests = Requests(
        ids,
        Lengths.parse(job["prompts"]),
        Lengths.parse(job["outputs"]),
        seed=job["seed"],
        prefix=job["prefix"],
        prefix_seed=job["prefix_seed"],
        own_prefix=job["own_prefix"],
        rows=[Row(**row) for row in job["rows"]],
    )
    long = Lengths.parse(f"fixed:{job['long_tokens'] or 1}")
    return requests, Requests(ids, long, Lengths.parse("fixed:1"), seed=f"{job['seed']}:long")


def say(kind: str, value: Any) -> None:
    print(json.dumps({kind: value}), flush=True)


async def work(kind: str, arguments: list[str]) -> None:
    """Do jobs until standard input ends."""
    if kind == "grpc":
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong is told once
        place = over_grpc(Connection.of(json.loads(sys.stdin.readline())))
    else:
        place = in_process(arguments)
    async with place as (ask, served):
        say("ready", served)
        loop = asyncio.get_running_loop()

        def progress(seen: Seen, seconds: float) -> None:
            errors = sum(seen.errors.values())
            say("progress", {"seconds": seconds, "tokens": seen.tokens, "errors": errors})

        while line := await loop.run_in_executor(None, sys.stdin.readline):
            job = json.loads(line)
            drive = Drive(Load(**job["load"]), ask, *requests_of(job, served), progress)
            say("seen", (await drive.run()).to_dict())


def main() -> None:
    try:
        asyncio.run(work(sys.argv[1], sys.argv[2:]))
    except UserError as error:
        say("error", str(error))
        sys.exit(1)
    except (KeyboardInterrupt, BrokenPipeError):  # whoever asked is gone
        sys.exit(1)


if __name__ == "__main__":
    main()
