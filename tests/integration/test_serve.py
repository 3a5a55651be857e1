"""`antiphon serve` as a process with a real model: it says what `antiphon sample` says."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gpt.checkpoint import load_model, save_model
from gpt.config import GPTConfig
from gpt.generate import generate
from gpt.model import GPT
from gpt.params import SamplingParams
from gpt.score import score
from gpt.tokenizer import Tokenizer
from serve.client import Client, RequestError
from tests import warm
from tests.integration.serving import ENVIRONMENT, REAL, ROOT, ServerProcess

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights that are large enough to have opinions."""
    tokenizer = Tokenizer.bytes()
    torch.manual_seed(0)
    model = GPT(GPTConfig.preset("nano", vocab_size=tokenizer.n_vocab, init_std=0.3))
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_model(path, model.eval(), tokenizer)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> ServerProcess:
    with ServerProcess(REAL, folder) as process:
        process.await_ready()
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Client:
    with Client(server.target, timeout=60) as client:
        yield client


def sampled(folder: Path, prompt: str, **settings: object) -> str:
    loaded = load_model(folder)
    pieces = generate(loaded.model, loaded.tokenizer, prompt, SamplingParams(**settings))
    return "".join(piece.text for piece in pieces)


def test_it_says_when_and_where_it_is_ready(
    folder: Path, server: ServerProcess, client: Client
) -> None:
    assert server.out == [f"serving tiny on {server.target}"]
    server.await_log("KV cache: 256 pages of 16 tokens")
    client.await_ready(10)
    model = client.model()
    assert (model.name, model.block_size, model.vocab_size) == ("tiny", 128, 257)
    assert model.parameter_count == load_model(folder).model.num_params() > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 0, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"seed": 2, "max_tokens": 7},
        {"seed": 3, "min_p": 0.05, "typical_p": 0.9, "repetition_penalty": 1.3},
        {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    ],
)
def test_the_served_text_is_the_sampled_text(
    folder: Path, client: Client, settings: dict[str, float]
) -> None:
    expected = sampled(folder, "ROMEO:", **{"seed": 0, **settings})
    assert client.generate("ROMEO:", **settings).text == expected
    assert "".join(delta.text for delta in client.stream("ROMEO:", **settings)) == expected


def test_the_served_scores_are_the_local_ones(folder: Path, client: Client) -> None:
    loaded = load_model(folder)
    expected = score(loaded.model, loaded.tokenizer, "JULIET: no", top=2)
    found = client.score("JULIET: no", top=2)
    assert [each.logprob for each in found.scores] == pytest.approx(
        [made.logprob for made in expected], rel=1e-5
    )
    assert [[t.token for t in each.top] for each in found.scores] == [
        [t.token for t in made.top] for made in expected
    ]
    assert client.tokenize("JULIET: no").ids == [each.token for each in found.scores]
    assert client.detokenize([each.token for each in found.scores]).text == "JULIET: no"
    assert client.list_models() == [client.model()]


def test_company_changes_nothing(folder: Path, client: Client) -> None:  # S5
    prompts = [("ROMEO:", 42), ("JULIET: no, ", 43), ("", 44), ("x" * 90, 45), ("ROMEO:", 46)]
    alone = [client.generate(prompt, seed=seed, max_tokens=30).text for prompt, seed in prompts]
    assert len(set(alone)) == len(alone)
    with ThreadPoolExecutor(20) as pool:
        calls = [
            pool.submit(client.generate, prompt, seed=seed if i % 2 else None, max_tokens=30)
            for i in range(4)
            for prompt, seed in prompts
        ]
        for i, call in enumerate(calls):
            if (i // len(prompts)) % 2:
                assert call.result().text == alone[i % len(prompts)]
            else:
                call.result()


def test_a_too_long_prompt_is_refused_with_the_numbers(client: Client) -> None:  # S12
    with pytest.raises(RequestError, match=r"129 .* 128") as caught:
        client.generate("x" * 129)
    assert caught.value.code == "INVALID_ARGUMENT"


def test_the_command_line_from_end_to_end(folder: Path, server: ServerProcess) -> None:
    command = [sys.executable, "-m", "gpt", "generate", "--target", server.target]
    done = warm.run(
        [*command, "--prompt", "ROMEO:", "--seed", "1", "--max-tokens", "20"],
        env=ENVIRONMENT,
        cwd=ROOT,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    text = sampled(folder, "ROMEO:", seed=1, max_tokens=20)
    assert done.stdout.decode() == f"ROMEO:{text}\n"


def test_a_taken_port_is_an_error_not_a_shared_port(
    folder: Path, server: ServerProcess, client: Client
) -> None:  # S23
    port = int(server.target.rpartition(":")[2])
    with ServerProcess(REAL, folder, port=port) as second:
        assert second.wait() == 1
    assert second.out == []
    line = second.log[-1]
    assert line.startswith(f"antiphon serve: error: cannot listen on 127.0.0.1:{port}: the port is")
    assert client.generate("still here", max_tokens=2).finish.completion_tokens == 2


@pytest.mark.parametrize("kind", ["missing", "empty folder", "garbage"])
def test_what_is_no_model_is_one_line_and_a_failure(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model"
    if kind == "empty folder":
        path.mkdir()
    elif kind == "garbage":
        path.write_bytes(b"no checkpoint")
    with ServerProcess(REAL, path) as process:
        assert process.wait() == 1
    assert process.out == []
    assert process.log[-1].startswith("antiphon serve: error: ")
    assert str(path) in process.log[-1]
    assert not any("Traceback" in line for line in process.log)
