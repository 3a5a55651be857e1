"""Fixtures for more than one package."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import warm

if TYPE_CHECKING:
    from gpt.native.kernels import Kernels

# No test fails because the machine is busy with something else, and each run tries the same
# examples, so that a change fails by its own fault. `ANTIPHON_EXAMPLES=new` looks for new ones.
settings.register_profile(
    "steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("new", settings.get_profile("steady"), derandomize=False)
settings.load_profile("new" if os.environ.get("ANTIPHON_EXAMPLES") == "new" else "steady")


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """What a test, or what it runs, leaves of handlers is no affair of the next one's: programs
    that are started inherit what is ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_kernels() -> Iterator[None]:
    """A test begins without our own kernels, whatever one before, or a fixture for many, loaded."""
    from gpt.native import kernels

    kernels._current = kernels._refused = None
    yield
    kernels._current = kernels._refused = None


@pytest.fixture(scope="session")
def native_library() -> Path:
    """Our own kernels, kept between runs in the user's cache, as the program itself keeps them."""
    from gpt.native.build import build

    return build()


@pytest.fixture(scope="module", params=["plain", "AVX2", "AVX-512"])
def kernels(request: pytest.FixtureRequest, native_library: Path) -> Kernels:
    """The kernels by each kind of instructions that this processor has."""
    from gpt.native.kernels import Kernels

    found = Kernels(native_library, request.param_index)
    if found.level != request.param_index:
        pytest.skip("not on this processor")
    return found


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as training leaves it: tiny, untrained, over bytes, the same every time."""
    import torch

    from gpt.checkpoint import save_model
    from gpt.config import GPTConfig
    from gpt.model import GPT
    from gpt.tokenizer import Tokenizer

    tokenizer = Tokenizer.bytes()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(GPTConfig.preset("nano", vocab_size=tokenizer.n_vocab, block_size=64))
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(folder, model, tokenizer)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _measured_once() -> Iterator[None]:
    """How fast this CPU is, each run of the trainer finds out anew; here, the first."""
    from gpt import machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "measured", functools.cache(machine.measured))
        yield


def pytest_sessionfinish() -> None:
    warm.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts processes comes first: begun last, the longest would run alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("integration") is None)
