"""New models into a server's folder, one after the other, under load, and what must hold.

    make reloads
    python -m tests.integration.reloads --reloads 40 --no-bounds

Each model continues its prompts in a way of its own, so a text that is not wholly of the version
that it says it is of is seen; so is a page of another's. Streams, whole texts and batches go on all
the time.

It fails if a text is wrong or mixed, a call fails, a page is still held when an engine ends, an
engine that was replaced stays in memory, or the log has an error; and, unless told not to look, if
memory grows by more than 5 % after the first tenth of the reloads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from serve.folders import Found, ModelSource
from serve.v1 import generation_pb2 as pb
from serve.v1 import generation_pb2_grpc as pb_grpc
from tests.integration.endurance import Endurance
from tests.integration.serving import PATIENCE, ROOT, ServerProcess
from tests.integration.soak_client import text_after

SERVER = (sys.executable, str(ROOT / "tests" / "integration" / "reload_server.py"))
LONGEST = 80


@dataclass(kw_only=True)
class Reloads(Endurance):
    """One run of it.

    Attributes:
        versions: what each version adds to its letters.
        crossed: streams that began with one version and ended when another was served.
        serving: the version that is served now.
    """

    reloads: int
    streams: int
    versions: dict[str, int] = field(default_factory=dict)
    crossed: int = 0
    serving: str = ""
    most_growth = 0.05

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def write(self, values: dict[str, Any]) -> str:
        """Put a model at the place of the one before, as `gpt.checkpoint` does; its version."""
        new, old = self.folder / "new", self.folder / "old"
        new.mkdir()
        (new / "config.json").write_text(json.dumps(values))
        if self.model.exists():
            self.model.rename(old)
        new.rename(self.model)
        shutil.rmtree(old, ignore_errors=True)
        return Found.at(ModelSource(self.model)).version()

    def run(self) -> None:
        self.serving = self.write({"shift": 0})
        self.versions[self.serving] = 0
        flags = ("--max-running", "16", "--max-waiting", "64")
        with ServerProcess(SERVER, self.model, *flags) as server:
            server.await_ready()
            began = time.monotonic()
            asyncio.run(self._load(server))
            self.seconds = time.monotonic() - began
            self.settle()
            self.end(server)
            ended = sum(line.endswith(" has ended") for line in server.log)
            if ended != self.reloads:
                self.faults.append(f"{ended} engines have ended, not {self.reloads}")

    async def _load(self, server: ServerProcess) -> None:
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            over = asyncio.Event()
            asking = [asyncio.ensure_future(self._ask(stub, i, over)) for i in range(self.streams)]
            try:
                for number in range(1, self.reloads + 1):
                    await self._reload(server, stub, number)
            finally:
                over.set()
                await asyncio.gather(*asking)

    async def _reload(
        self, server: ServerProcess, stub: pb_grpc.GenerationServiceStub, number: int
    ) -> None:
        version = self.write({"shift": number})
        self.versions[version] = number
        server.process.send_signal(signal.SIGHUP)
        end = time.monotonic() + PATIENCE
        while (await stub.GetModel(pb.GetModelRequest())).version != version:
            assert time.monotonic() < end, server.log[-5:]
            await asyncio.sleep(0.002)
        self.serving = version
        if number == max(1, self.reloads // 10) and "bytes" in self.read():
            self.memory.append(self.state["bytes"])

    async def _ask(
        self, stub: pb_grpc.GenerationServiceStub, index: int, over: asyncio.Event
    ) -> None:
        """One call after the other."""
        rng = random.Random(f"{self.seed} {index}")
        while not over.is_set():
            prompt = rng.choices(range(256), k=rng.randint(1, 40))
            spec = pb.GenerationSpec(max_tokens=rng.choice([1, 8, 24, LONGEST]), seed=1)
            spec.token_ids.ids.extend(prompt)
            way = rng.choice([self._stream, self._stream, self._whole, self._batch])
            try:
                await way(stub, spec, prompt)
                self.counts[way.__name__[1:]] += 1
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    self.faults.append(f"{error.code().name}: {error.details()}")
                await asyncio.sleep(0.02)

    async def _stream(
        self, stub: pb_grpc.GenerationServiceStub, spec: pb.GenerationSpec, prompt: list[int]
    ) -> None:
        text, version, began = "", "", self.serving
        async for event in stub.GenerateStream(pb.GenerateStreamRequest(spec=spec)):
            version = event.prompt.model_version or version
            text += event.delta.text
            if event.HasField("finish"):
                self._check(prompt, spec.max_tokens, version, text, event.finish.reason)
                self.crossed += version == began != self.serving

    async def _whole(
        self, stub: pb_grpc.GenerationServiceStub, spec: pb.GenerationSpec, prompt: list[int]
    ) -> None:
        self._check_whole(prompt, spec, await stub.Generate(pb.GenerateRequest(spec=spec)))

    async def _batch(
        self, stub: pb_grpc.GenerationServiceStub, spec: pb.GenerationSpec, prompt: list[int]
    ) -> None:
        request = pb.BatchGenerateRequest(specs=[spec] * 3)
        async for response in stub.BatchGenerate(request):
            if response.HasField("failure"):
                self.faults.append(f"in a batch: {response.failure.message}")
            else:
                self._check_whole(prompt, spec, response.completion)

    def _check_whole(
        self, prompt: list[int], spec: pb.GenerationSpec, answer: pb.GenerateResponse
    ) -> None:
        [choice] = answer.choices
        version = answer.prompt.model_version
        self._check(prompt, spec.max_tokens, version, choice.text, choice.finish.reason)

    def _check(
        self, prompt: list[int], max_tokens: int, version: str, text: str, reason: int
    ) -> None:
        if version not in self.versions:
            self.faults.append(f"a text of an unknown version {version!r}")
            return
        expected = text_after(prompt, max_tokens, self.versions[version])
        if (text, reason) != expected:
            self.faults.append(f"{prompt} gave {(text, reason)}, not {expected} ({version})")

    def figures(self) -> dict[str, object]:
        return {
            **super().figures(),
            "reloads": self.reloads,
            "streams_across_a_reload": self.crossed,
        }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reloads", type=int, default=1000, metavar="N")
    parser.add_argument("--streams", type=int, default=16, metavar="N", help="calls at once")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--no-bounds", action="store_true", help="do not judge memory")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        reloads = Reloads(
            reloads=options.reloads,
            streams=options.streams,
            seed=options.seed,
            folder=Path(folder),
        )
        reloads.run()
    return reloads.report(bounds=not options.no_bounds)


if __name__ == "__main__":
    sys.exit(main())
