"""What `antiphon serve` has loaded runs in few calls over weights in huge pages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from torch import Tensor

from gpt.checkpoint import save_model
from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.native import hugepages
from gpt.native import kernels as native
from gpt.native import linear as products
from gpt.native.blocks import Steps
from gpt.native.build import NotBuiltError, build
from gpt.native.kernels import Kernels
from gpt.native.linear import Routes
from gpt.starter import Starter
from gpt.tokenizer import Tokenizer
from serve import server
from serve.decoding import _make


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    try:
        found = Kernels(build())
    except NotBuiltError as error:
        pytest.skip(f"no kernels here: {error}")
    yield found
    native.use(None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_served_model_runs_in_few_calls_from_memory_of_its_own(
    tmp_path: Path, kernels: Kernels, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (hugepages, products):
        monkeypatch.setattr(module, "WORTH_BYTES", 0)
    monkeypatch.setattr(products, "measure", lambda kernels, dtype: Routes(kernels, 16, wide=False))
    calls: list[int] = []
    whole = Steps.leave

    def counted(self: Steps, y: Tensor, x: Tensor) -> Tensor:
        calls.append(len(x))
        return whole(self, y, x)

    monkeypatch.setattr(Steps, "leave", counted)
    config = GPTConfig(vocab_size=257, block_size=64, n_layer=2, n_head=2, d_model=32)
    save_model(tmp_path / "model", GPT(config).eval(), Tokenizer.bytes())
    flags = ["--deterministic"] * deterministic
    settings = server.parse([f"m={tmp_path / 'model'}", "--dtype", "float32", *flags], "x")
    engine = server.load(settings, settings.models[0])
    places = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    assert (len(places) == 1) == (not deterministic and hugepages.offered())
    engine.start()
    starter = Starter(cast(GPT, engine.model).config, engine.tokenizer)
    texts, _ = asyncio.run(_make(engine, starter, [[1, 2, 3], [4]], 5))
    engine.stop()
    assert [len(text) for text in texts] == [5, 5]
    assert (2 in calls) == (not deterministic), "both texts in a step"
