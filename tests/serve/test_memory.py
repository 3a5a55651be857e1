"""How large the KV cache becomes."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpt.cache import KVCache
from gpt.checkpoint import save_model
from gpt.config import GPTConfig
from gpt.errors import ServerError
from gpt.model import GPT
from gpt.tokenizer import Tokenizer
from serve import engine, memory, server
from serve.memory import size_pool

CONFIG = GPTConfig(vocab_size=10, block_size=100, n_layer=2, n_head=2, d_model=8)
CPU = torch.device("cpu")


def pool(budget: int | None, max_running: int = 4, config: GPTConfig = CONFIG) -> memory.Pool:
    return size_pool(
        config,
        page_size=16,
        dtype=torch.float32,
        device=CPU,
        max_running=max_running,
        prefill_chunk=64,
        budget=budget,
    )


def test_enough_for_every_running_context_and_no_more() -> None:
    assert pool(2**30).n_pages == [1 + 4 * 7]  # 100 tokens fill 7 pages of 16


def test_each_group_gets_what_its_layers_remember() -> None:
    """Full: whole contexts. A window of 20: 3 pages at most a text, whatever its length, and those
    of one chunk of 64 besides."""
    mixed = CONFIG.replace(block_size=400, n_layer=4, pattern=["window:20", "causal"])
    sized = pool(2**30, config=mixed)
    assert sized.n_pages == [1 + 4 * 3 + 4, 1 + 4 * 25]
    assert sized.page_bytes == [2 * 2 * 8 * 4 * 16] * 2
    text = str(sized)
    assert "16 for 2 layers with the last 20 positions, 0.0 MiB;" in text
    assert "100 for 2 layers with every position" in text
    assert f"{sized.bytes / 2**20:.1f} MiB in all" in text
    least = pool(2**30, 1, config=mixed)
    assert least.n_pages == [1 + 3 + 4, 1 + 25]
    short = pool(least.bytes * 2, config=mixed)
    assert 2 * least.bytes - 2 * sized.page_bytes[0] < short.bytes <= 2 * least.bytes
    with pytest.raises(ServerError, match="one full context of 400 tokens"):
        pool(least.bytes - 1, config=mixed)


def test_a_text_without_end_needs_its_window_whatever_the_context() -> None:
    endless = CONFIG.replace(pattern="window:200")
    assert pool(2**30, config=endless).n_pages == [1 + 4 * 14 + 4]
    assert pool(2**30, config=endless.replace(position="learned")).n_pages == [1 + 4 * 7]


def test_no_more_than_the_budget() -> None:
    (page,) = KVCache.page_bytes(CONFIG, 16, torch.float32)
    assert page == 2 * 2 * 8 * 4 * 16  # keys and values, layers, width, bytes, tokens
    assert pool(12 * page + 5).n_pages == [12]
    cache = KVCache(CONFIG, 12, 16)
    held = sum(t.nbytes for i in range(2) for t in (cache.layer(i).keys, cache.layer(i).values))
    assert held == 12 * page


def test_a_budget_below_one_context_is_an_error_with_the_number() -> None:
    with pytest.raises(ServerError, match=r"100 tokens takes .* GiB; set --kv-cache-gb"):
        pool(1000)
    assert pool(8 * KVCache.page_bytes(CONFIG, 16)[0]).n_pages == [8]


def test_a_share_of_the_free_memory_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    (page,) = KVCache.page_bytes(CONFIG, 16)
    monkeypatch.setattr(memory, "free_memory", lambda device: 40 * page)
    assert pool(None).n_pages == [10]
    assert "9 pages of 16 tokens" in str(pool(None))


# --- Two models in one server ---------------------------------------------------------------------

MIB = 2**20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models: a text's context takes 2 MiB of cache, the weights next to nothing."""
    path = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer.bytes()
    config = GPTConfig(
        vocab_size=tokenizer.n_vocab, block_size=2048, n_layer=2, n_head=2, d_model=64,
        position="rotary",
    )  # fmt: skip
    for name in ("one", "two"):
        save_model(path / name, GPT(config), tokenizer)
    return [f"one={path / 'one'}", f"two={path / 'two'}"]


def load_both(folders: list[str], *flags: str) -> list[memory.Pool]:
    """Their pools, both held at once, as `antiphon serve` loads them."""
    settings = server.parse([*folders, "--max-running", "32", *flags], "antiphon serve")
    engines = [server.load(settings, source) for source in settings.models]
    pools = [engine.pool for engine in engines if engine.pool is not None]
    assert len(pools) == 2
    return pools


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that lets the machine have so many bytes for caches. Those that live are taken
    off, as a machine does, but not what an allocator keeps of earlier ones: that differs by run."""
    caches: weakref.WeakSet[Counted] = weakref.WeakSet()

    class Counted(KVCache):
        def __init__(self, config: GPTConfig, *rest: Any, **named: Any) -> None:
            super().__init__(config, *rest, **named)
            self.layers = [self.layer(i) for i in range(config.n_layer)]
            caches.add(self)

    def leave(size: int) -> None:
        def free(device: torch.device) -> int:
            layers = [layer for cache in caches for layer in cache.layers]
            return size - sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

        monkeypatch.setattr(memory, "free_memory", free)

    monkeypatch.setattr(engine, "KVCache", Counted)
    return leave


def test_two_models_get_half_each_and_fit_together(
    folders: list[str], left: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    left(96 * MIB)
    pools = load_both(folders, "--kv-cache-gb", str(64 / 1024))
    assert [each.budget for each in pools] == [32 * MIB] * 2
    assert all(31 * MIB < each.bytes <= 32 * MIB for each in pools)
    told = [record.getMessage() for record in caplog.records if "budget" in record.getMessage()]
    assert len(told) == 2
    assert all("(budget 32.0 MiB)" in each for each in told)


def test_two_models_of_which_either_would_fit_alone_do_not_start(
    folders: list[str], left: Callable[[int], None]
) -> None:
    left(96 * MIB)
    with pytest.raises(ServerError) as caught:
        load_both(folders, "--kv-cache-gb", str(128 / 1024))  # 64 MiB each
    found = re.fullmatch(
        r"the KV cache of 0\.0\d+ GiB does not fit: ([\d.]+) GiB are free; "
        "set --kv-cache-gb or --max-running lower",
        str(caught.value),
    )
    assert found is not None, caught.value
    assert float(found[1]) < 40 / 1024, "the first one's cache counts as taken"


def test_without_a_budget_two_models_share_a_quarter_of_what_is_free(
    folders: list[str], left: Callable[[int], None]
) -> None:
    left(160 * MIB)
    first, second = load_both(folders)
    assert 18 * MIB < first.budget <= 20 * MIB, "an eighth"
    assert second.budget < first.budget, "of what the first has left"
    assert first.bytes + second.bytes <= 40 * MIB
