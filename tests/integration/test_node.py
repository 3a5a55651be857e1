"""The client for Node.js, run for real. Skipped where Node or its packages cannot be had."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpt.tokenizer import Tokenizer
from serve.metrics import Metrics
from serve.watching import Watching
from tests.serve.scripted import ScriptedModel
from tests.serve.served import Served, eventually

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "clients" / "node"
BYTES = Tokenizer.bytes()
PACKAGES = ("@grpc/grpc-js", "@grpc/proto-loader")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with the packages that it needs, as a checkout has it."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    root = tmp_path_factory.mktemp("node")
    folder = root / "clients" / "node"
    shutil.copytree(SOURCE, folder)
    shutil.copytree(ROOT / "protos", root / "protos")
    if not (folder / "node_modules").exists():
        flags = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        try:
            done = subprocess.run(
                ["npm", "install", *flags, "--fetch-retries", "0"],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=90,
            )
        except subprocess.TimeoutExpired:
            pytest.skip("npm took too long to fetch the packages")
        if done.returncode != 0:
            pytest.skip(f"npm could not fetch {', '.join(PACKAGES)}: {done.stderr[-300:]}")
    return folder


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    model = ScriptedModel(BYTES.n_vocab, lambda *_: ord("a"), block_size=512)
    with Served(model) as served:
        yield served


def node(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["node", *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_the_command_streams_a_text_and_explains_a_refusal(folder: Path, served: Served) -> None:
    done = node(folder, "generate.mjs", served.server.target, "ab", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "aaaaa"
    assert "FINISH_REASON_LENGTH, 5 tokens" in done.stderr
    done = node(folder, "generate.mjs", served.server.target, "x" * 600, "5")
    assert done.returncode == 1
    assert done.stderr.startswith("INVALID_ARGUMENT: ")
    assert "(request " in done.stderr


PROGRAM = """
import { Client, explain } from "./antiphon.mjs";
const client = new Client(process.argv[2], { timeout: 30 });
const found = {};
const whole = await client.generate({ text: "ab", maxTokens: 3, seed: 7, temperature: 0 });
found.text = whole.choices[0].text;
found.seed = whole.prompt.seed;
found.batch = {};
for await (const { index, outcome, completion } of client.batch([
  { text: "ab", maxTokens: 1 },
  { text: "ab", maxTokens: 2 },
]))
  found.batch[index] = outcome === "completion" ? completion.choices[0].text : outcome;
found.scored = (await client.score({ text: "abc" })).scores.length;
found.ids = (await client.tokenize("ab")).ids;
found.back = (await client.detokenize(found.ids)).text;
found.models = (await client.listModels()).map((model) => model.name);
try {
  await client.generate({ text: "ab", topP: 2 }, { requestId: "node-1" });
} catch (error) {
  found.refused = explain(error);
}
for await (const { event } of client.stream({ text: "ab" })) if (event === "delta") break;
console.log(JSON.stringify(found));
client.close();
"""


def test_it_asks_all_that_the_service_answers_and_stops_what_it_leaves(
    folder: Path, served: Served
) -> None:
    (folder / "program.mjs").write_text(PROGRAM)
    done = node(folder, "program.mjs", served.server.target)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("refused").endswith("(request node-1)")
    assert found == {
        "text": "aaa",
        "seed": 7,
        "batch": {"0": "a", "1": "aa"},
        "scored": 3,
        "ids": [97, 98],
        "back": "ab",
        "models": ["scripted"],
    }
    served.check_for_leaks()


def test_it_comes_again_when_the_server_has_no_room(folder: Path) -> None:
    model = ScriptedModel(BYTES.n_vocab, lambda *_: ord("a"))
    metrics = Metrics()
    refused = {"method": "GenerateStream", "code": "RESOURCE_EXHAUSTED"}

    def make_room() -> None:
        """As soon as one attempt has been refused."""
        eventually(lambda: metrics.registry.get_sample_value("antiphon_rpcs_total", refused))
        model.release()

    watching = Watching(metrics=metrics)
    with Served(model, watching=watching, max_running=1, max_waiting=0) as served:
        model.hold()
        with served.client.stream("ab", max_tokens=1) as first:
            eventually(lambda: served.engine.held == 1)
            threading.Thread(target=make_room).start()
            done = node(folder, "generate.mjs", served.server.target, "ab", "2")
            assert done.returncode == 0, done.stderr
            assert done.stdout == "aa"
            list(first)
