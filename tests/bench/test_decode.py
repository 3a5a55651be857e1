"""`antiphon bench decode`: the engine runs, peers beside it too, and mistakes are told before any
work. Tiny models: what is measured here is whether it measures, not how fast anything is."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from gpt.bench.command import main
from gpt.bench.decode import MOST_OFF, Result, shortfall, show
from gpt.bench.peers.protocol import while_all_run
from gpt.bench.subjects import PEERS, variable
from gpt.checkpoint import save_model
from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.model import GPT
from gpt.tokenizer import Tokenizer
from serve.asked import Asked
from serve.decoding import open_model
from serve.engine import Engine
from serve.reply import TextReply

SMALL = ["--prompt", "8", "--tokens", "4", "--rounds", "1", "--threads", "1"]
MODULES = {"llama.cpp": "llama_cpp"}

WRONG = """
import sys, time
sys.path.insert(0, {peers!r})
from protocol import serve

def make(prompts, tokens):
    now = time.perf_counter()
    return [[(7 * i) % 300 for i in range(tokens)] for _ in prompts], [
        now + 1e-3 * i for i in range(tokens + 1)
    ]

serve(lambda folder, dtype, threads: ("1", make))
"""


@pytest.fixture(scope="module")
def gpt2() -> GPT:
    """Large weights, so that texts say something else at every step."""
    torch.manual_seed(1)
    config = GPTConfig(
        vocab_size=300, block_size=64, n_layer=2, n_head=2, d_model=32, position="learned",
        norm="layernorm", mlp="gelu", bias=True, qk_norm=False, tie_embeddings=False, init_std=0.3,
    )  # fmt: skip
    return GPT(config).eval()


@pytest.fixture(scope="module")
def model(gpt2: GPT, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    save_model(folder, gpt2, Tokenizer.bytes())
    return str(folder)


def greedy(model: GPT, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def program(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


@pytest.mark.integration
def test_who_is_not_there_is_left_out_and_who_is_wrong_is_named(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpt.bench.peers.protocol as protocol

    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG.format(peers=str(Path(protocol.__file__).parent)))
    pythons = {
        "llama.cpp": "/nowhere/python",
        "ctranslate2": program(tmp_path / "bare", f'exec "{sys.executable}" -S "$@"'),
        "vllm": program(tmp_path / "old", "kill -ILL $$"),
        "transformers": program(tmp_path / "wrong", f'exec "{sys.executable}" "{wrong}"'),
    }
    given = [word for peer, python in pythons.items() for word in
             ("--peer-python", f"{peer}={python}")]  # fmt: skip
    found = tmp_path / "found.json"
    files = ["--json", str(found), "--plot", str(tmp_path / "found.png")]
    options = ["--model", model, "--batch", "3", "--dtypes", "float32"]
    assert main(["decode", *SMALL, *options, *files, "--peers", ",".join(pythons), *given]) == 1
    said = capsys.readouterr()
    assert "left out: llama.cpp float32: /nowhere/python does not run" in said.out
    assert "left out: ctranslate2 float32: No module named 'ctranslate2' for" in said.out
    assert "--peer-python ctranslate2=PYTHON" in said.out
    assert "left out: vllm float32: it needs instructions that this processor" in said.out
    assert "transformers in float32 with 3 texts makes tokens that lie" in said.err
    content = json.loads(found.read_text())
    assert set(content["left_out"]) == {"llama.cpp float32", "ctranslate2 float32", "vllm float32"}
    rows = content["results"]
    assert [row["subject"] for row in rows] == ["antiphon", "transformers"]
    for row in rows:
        assert all(len(row[name]) == 1 and row[name][0] > 0 for name in ("decode", "prefill"))
        if row["subject"] == "antiphon":
            assert row["same"] == row["batch"]
            assert row["off"] <= MOST_OFF["float32"]
        else:
            assert row["same"] == 0
            assert row["off"] > 0.5
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.integration
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_makes_the_texts_that_we_make(peer: str, tmp_path: Path, model: str) -> None:
    """Where its package is: here, or in an environment of its own that a variable names."""
    if variable(peer) not in os.environ and not importlib.util.find_spec(MODULES.get(peer, peer)):
        pytest.skip(f"{PEERS[peer].package} is not installed, and {variable(peer)} is not set")
    found = tmp_path / "found.json"
    options = ["--model", model, "--batch", "1,3", "--dtypes", "float32", "--json", str(found)]
    assert main(["decode", *SMALL, *options, "--peers", peer]) == 0
    content = json.loads(found.read_text())
    assert content["left_out"] == {}
    rows = [row for row in content["results"] if row["subject"] == peer]
    assert [(row["batch"], row["same"]) for row in rows] == [(1, 1), (3, 3)]
    assert all(row["off"] <= MOST_OFF["float32"] for row in rows)


def test_a_text_is_held_to_the_likeliest_tokens(gpt2: GPT) -> None:
    prompt = [5, 6, 7]
    text = greedy(gpt2, prompt, 8)
    assert len(set(text)) > 2  # or it would say little
    assert shortfall(gpt2, prompt, text) == 0
    other = [*text[:5], (text[5] + 1) % 300, *text[6:]]
    assert shortfall(gpt2, prompt, other) > MOST_OFF["bfloat16"]


def test_times_count_while_all_texts_run() -> None:
    moments = [[1.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.0, 5.0, 6.0], [3.0, 4.0, 5.0, 7.0]]
    assert while_all_run(0.5, moments) == [0.5, 3.0, 4.0, 5.0]
    # All were read, but the first was over by then: no step in which all ran.
    assert while_all_run(0.5, [[1.0, 1.5], [2.0, 2.5]]) == [0.5, 2.0]


def test_each_step_has_a_moment_of_its_own_however_late_the_tokens_are_read(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Engine.submit

    def read_late(self: Engine, asked: Asked) -> TextReply:
        reply = submit(self, asked)
        while (load := self.load).running or load.waiting:
            time.sleep(0.001)
        return reply

    monkeypatch.setattr(Engine, "submit", read_late)
    _, make = open_model(model, "float32", torch.get_num_threads())
    texts, times = make([[1, 2, 3]], 5)
    assert len(texts[0]) == 5
    assert len(times) == len(set(times)) == 6
    assert times == sorted(times)


def test_prompts_have_a_speed_where_texts_never_ran_together() -> None:
    both = {"dtype": "float32", "batch": 2, "version": "1", "same": 2}
    rows = [
        Result("antiphon", **both, prefill=[300.0, 500.0, 400.0]),
        Result("vllm", **both, prefill=[200.0], decode=[10.0], share=[0.5]),
    ]  # fmt: skip
    head, ours, theirs, *_ = show(rows)
    assert "prefill tok/s" in head
    assert " ".join(ours.split()) == "antiphon 1 float32 2 400 (300, 500) 2/2 0.000"
    assert " ".join(theirs.split()) == (
        "vllm 1 float32 2 10.0 (10.0, 10.0) 50% 200 (200, 200) 2.00 2/2 0.000"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peers", "vllama"], "unknown peer 'vllama'"),
        (["--peer-python", "llama.cpp"], "NAME=PYTHON"),
        (["--prompt", "128"], "do not fit into the context of 128"),
        (["--tokens", "1"], "at least 2"),
    ],
)
def test_mistakes_are_told_before_any_work(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["decode", "--preset", "nano", *SMALL, *options])
