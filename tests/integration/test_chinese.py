"""A Chinese corpus and prompt go the whole way like an English one: train, save, sample, serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt.checkpoint import load_model, save_model
from gpt.errors import InexpressibleTextError
from gpt.generate import generate
from gpt.params import SamplingParams
from serve.background import BackgroundServer
from serve.client import Client
from serve.engine import Engine
from tests.training.small import fit, make_data, make_module

LINE = "白日依山尽，黄河入海流。欲穷千里目，更上一层楼。\n"
PROMPT = "白日依山尽，"
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=6)


@pytest.mark.integration
@pytest.mark.parametrize("tokenizer", ["bpe", "chars", "bytes"])
def test_chinese_goes_the_whole_way(tmp_path: Path, tokenizer: str) -> None:
    corpus = tmp_path / "诗.txt"
    corpus.write_text(LINE * 40, encoding="utf-8")
    data = make_data(corpus, tokenizer=tokenizer, vocab_size=300, block_size=48)
    module = make_module(
        config={"block_size": 48, "d_model": 32, "tie_embeddings": False},
        optimizer={"lr": 1e-2},
    )
    module = fit(tmp_path, corpus, 120, module=module, data=data)
    save_model(tmp_path / "model", module.gpt, data.tokenizer)

    loaded = load_model(tmp_path / "model")
    pieces = list(generate(loaded.model, loaded.tokenizer, PROMPT, GREEDY))
    text = "".join(piece.text for piece in pieces)
    # It knows the verse by heart; bytes are cut inside a character, or at its end, by max_tokens.
    verse = LINE.removeprefix(PROMPT)
    assert verse.startswith(text.rstrip("\ufffd"))
    assert len(text) >= 2

    engine = Engine(loaded.model, loaded.tokenizer, name="诗", n_pages=16)
    with BackgroundServer(engine) as server, Client(server.target) as client:
        assert client.generate(PROMPT, temperature=0, max_tokens=6).text == text
        deltas = [d.text for d in client.stream(PROMPT, temperature=0, max_tokens=6)]
        assert "".join(deltas) == text
        stopped = client.generate(PROMPT, temperature=0, max_tokens=40, stop=["河"])
        assert stopped.text == "黄"
        assert client.model().name == "诗"

    if tokenizer == "chars":
        with pytest.raises(InexpressibleTextError, match=r"'!' .* offset 2"):
            list(generate(loaded.model, loaded.tokenizer, "白日!", GREEDY))
