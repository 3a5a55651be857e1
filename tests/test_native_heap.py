"""Freed memory stays with the process, so that a step finds it again."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from gpt.native.heap import SET_BY, keep_freed_memory

GLIBC = hasattr(ctypes.CDLL(None), "mallopt")

PAGES = """
import resource, sys
import torch
from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.native.heap import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    assert keep_freed_memory()
model = GPT(GPTConfig(vocab_size=65, n_layer=4, n_head=4, d_model=128, mlp="relu2"))
ids = torch.randint(65, (3, 256))
def step():
    model(ids, targets=ids).backward()
    model.zero_grad()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(not GLIBC, reason="another C library")
def test_a_step_finds_the_pages_of_the_one_before() -> None:
    """Beside the same without: what the system hands out again is counted, not timed."""
    environment = {name: value for name, value in os.environ.items() if name not in SET_BY}
    found = {}
    for how in ("kept", "given back"):
        done = subprocess.run(
            [sys.executable, "-c", PAGES, how],
            capture_output=True, text=True, check=True, env=environment,
        )  # fmt: skip
        found[how] = int(done.stdout)
    assert found["kept"] < 0.2 * found["given back"]


@pytest.mark.parametrize("name", SET_BY)
def test_what_the_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "131072")
    assert not keep_freed_memory()
