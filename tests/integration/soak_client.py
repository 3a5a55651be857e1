"""A client process of the soak: many requests side by side, each held to the text it must get.

What a text must be follows from its prompt (`following`), so one that got a token of another's, or
was computed from another's pages, is seen. A line of JSON goes to standard output for each request
that is over. Imports no torch: many of these are started, and some killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from serve.v1 import generation_pb2 as pb
from serve.v1 import generation_pb2_grpc as pb_grpc

END = 256
"""The id of end-of-text in the vocabulary of bytes."""
BLOCK_SIZE = 128
CANCELLED, INVALID = 0.20, 0.05
"""Shares of the requests that are cancelled, and that are no valid requests."""

PREFIXES = [random.Random(f"prefix {i}").choices(range(256), k=40) for i in range(5)]
"""What half of the prompts begin with, as chats share their system prompt."""


def following(ids: Sequence[int], shift: int = 0) -> int:
    """The token after these: a letter, or now and then the end, that depends on each of them.

    Args:
        shift: makes another model of it.
    """
    mark = zlib.crc32(array("I", ids).tobytes())
    return END if mark % 50 == 0 else ord("a") + (mark // 50 + shift) % 26


def text_after(prompt: Sequence[int], max_tokens: int, shift: int = 0) -> tuple[str, int]:
    """The text that the server must make, and why it ends."""
    ids = list(prompt)
    for _ in range(max_tokens):
        token = following(ids, shift)
        if token == END:
            return bytes(ids[len(prompt) :]).decode(), pb.FINISH_REASON_END_OF_TEXT
        ids.append(token)
    return bytes(ids[len(prompt) :]).decode(), pb.FINISH_REASON_LENGTH


@dataclass(frozen=True)
class Job:
    """One request. Everything in it follows from the seed and its index."""

    prompt: list[int]
    max_tokens: int
    kind: str
    rng: random.Random

    @classmethod
    def of(cls, seed: int, index: int) -> Job:
        rng = random.Random(f"{seed} {index}")
        shared = rng.choice(PREFIXES) if rng.random() < 0.5 else []
        prompt = [*shared, *rng.choices(range(256), k=rng.randint(1, 40))]
        share = rng.random()
        kind = "invalid" if share < INVALID else "whole"
        if INVALID <= share < INVALID + CANCELLED:
            kind = "cancelled"
        return cls(prompt, rng.randint(1, 24), kind, rng)

    def spec(self) -> pb.GenerationSpec:
        spec = pb.GenerationSpec(max_tokens=self.max_tokens, seed=self.rng.getrandbits(63))
        spec.token_ids.ids.extend(self.prompt)
        if self.rng.random() < 0.5:
            spec.temperature = self.rng.choice([0.0, 0.7, 1.3])
        if self.rng.random() < 0.3:
            spec.priority = self.rng.randint(-3, 3)
        return spec

    def wrong(self, text: str, reason: int | None) -> str:
        """What is wrong with a text, or "". No reason: it was broken off, and may be a part."""
        expected, why = text_after(self.prompt, self.max_tokens)
        if reason is None and expected.startswith(text):
            return ""
        if (text, reason) == (expected, why):
            return ""
        return f"{self.prompt} gave {text!r} ({reason}), not {expected!r} ({why})"


class Asker:
    """Sends jobs to a server and says what came of each."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = pb_grpc.GenerationServiceStub(channel)

    async def ask(self, job: Job) -> str:
        """What was wrong, or "". Who is refused for want of a place comes again."""
        while True:
            try:
                return await getattr(self, job.kind)(job)  # type: ignore[no-any-return]
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    return f"{job.kind}: {error.code().name}: {error.details()}"
            await asyncio.sleep(job.rng.uniform(0.02, 0.2))

    async def whole(self, job: Job) -> str:
        spec, way = job.spec(), job.rng.random()
        if way < 0.6:
            text, reason = await self._stream(job, spec, None)
            return job.wrong(text, reason)
        if way < 0.8:
            greedy = spec.HasField("temperature") and spec.temperature == 0
            spec.n = 1 if greedy else job.rng.randint(1, 3)
            answer = await self._stub.Generate(pb.GenerateRequest(spec=spec))
            choices = answer.choices
            found = {job.wrong(choice.text, choice.finish.reason) for choice in choices}
            return "; ".join(found) if len(choices) == spec.n else f"{len(choices)} of {spec.n}"
        request = pb.BatchGenerateRequest(specs=[spec] * job.rng.randint(1, 3))
        found = set()
        async for response in self._stub.BatchGenerate(request):
            if response.HasField("failure"):
                return f"batch: {response.failure.message}"
            for choice in response.completion.choices:
                found.add(job.wrong(choice.text, choice.finish.reason))
        return "; ".join(found)

    async def cancelled(self, job: Job) -> str:
        """Broken off after some deltas, after some time, or by its deadline."""
        way, spec = job.rng.random(), job.spec()
        timeout = job.rng.uniform(0.001, 0.3) if way < 0.2 else None
        after = job.rng.uniform(0, 0.3) if way > 0.6 else None
        deltas = job.rng.randint(0, 8) if timeout is None and after is None else None
        try:
            text, reason = await self._stream(job, spec, deltas, timeout, after)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            return ""
        return job.wrong(text, reason)

    async def _stream(
        self,
        job: Job,
        spec: pb.GenerationSpec,
        deltas: int | None,
        timeout: float | None = None,
        after: float | None = None,
    ) -> tuple[str, int | None]:
        call = self._stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), timeout=timeout)
        if after is not None:
            asyncio.get_running_loop().call_later(after, call.cancel)
        text, reason = "", None
        try:
            async for response in call:
                if response.HasField("finish"):
                    reason = response.finish.reason
                elif response.HasField("delta"):
                    text += response.delta.text
                    deltas = None if deltas is None else deltas - 1
                if deltas is not None and deltas <= 0:
                    break
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
        call.cancel()
        return text, reason

    async def invalid(self, job: Job) -> str:
        spec, fault = job.spec(), job.rng.randrange(6)
        expected = grpc.StatusCode.INVALID_ARGUMENT
        if fault == 0:
            spec.temperature = float("nan")
        elif fault == 1:
            spec.token_ids.ids.append(999)
        elif fault == 2:
            spec.max_tokens = 0
        elif fault == 3:
            spec.token_ids.ids.extend([1] * BLOCK_SIZE)
        elif fault == 4:
            spec.model, expected = "another", grpc.StatusCode.NOT_FOUND
        data = pb.GenerateRequest(spec=spec).SerializeToString()
        if fault == 5:
            data = b"\xff" + job.rng.randbytes(20)
        send = self._channel.unary_unary("/serve.v1.GenerationService/Generate")
        try:
            await send(data)
        except grpc.aio.AioRpcError as error:
            if error.code() == expected:
                return ""
            raise
        return f"fault {fault} was taken for a request"


async def run(target: str, seed: int, first: int, count: int, streams: int) -> None:
    turns = asyncio.Semaphore(streams)
    async with grpc.aio.insecure_channel(target) as channel:
        asker = Asker(channel)

        async def one(index: int) -> None:
            async with turns:
                job = Job.of(seed, index)
                wrong = await asker.ask(job)
            print(json.dumps({"kind": job.kind, "wrong": wrong}), flush=True)

        await asyncio.gather(*map(one, range(first, first + count)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    for name in ("seed", "first", "count", "streams"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    asyncio.run(run(options.target, options.seed, options.first, options.count, options.streams))
