"""The commands of `benchmarks/`: each can be asked what it measures."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

import pytest

import benchmarks

COMMANDS = [
    module.name
    for module in pkgutil.iter_modules(benchmarks.__path__)
    if module.name != "llama_cpp_worker"  # it runs where llama.cpp is
]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_says_what_it_measures(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")
