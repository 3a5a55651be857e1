"""Imports point one way, and light things stay light: tried in fresh interpreters."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpt
import serve
from gpt.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]


def modules_of(package: str, path: list[str]) -> list[str]:
    found = [m.name for m in pkgutil.walk_packages(path, f"{package}.")]
    # Importing a __main__ would run it.
    return [package, *(name for name in found if not name.endswith("__main__"))]


GPT_MODULES = modules_of("gpt", list(gpt.__path__))
SERVE_MODULES = modules_of("serve", list(serve.__path__))


def loaded_after(*modules: str) -> set[str]:
    """Top-level and dotted names of all that is loaded once these are imported."""
    code = "\n".join([f"import {name}" for name in modules])
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_all_modules_are_seen() -> None:
    assert {"gpt.model", "gpt.data.prepare", "gpt.training.module"} <= set(GPT_MODULES)
    assert {"serve.engine", "serve.client", "serve.v1.generation_pb2"} <= set(SERVE_MODULES)


def test_the_model_and_the_sampler_load_neither_grpc_nor_the_server_nor_lightning() -> None:
    light = [name for name in GPT_MODULES if not name.startswith("gpt.training")]
    loaded = loaded_after(*light)
    assert not loaded & {"grpc", "serve", "lightning", "pytorch_lightning", "wandb"}


def test_training_loads_no_grpc_and_no_server() -> None:
    loaded = loaded_after(*[name for name in GPT_MODULES if name.startswith("gpt.training")])
    assert "lightning" in loaded
    # wandb may load grpc for itself; the server must not come with it.
    assert "serve" not in loaded


def test_the_server_loads_no_lightning() -> None:
    loaded = loaded_after(*SERVE_MODULES)
    assert {"torch", "grpc"} <= loaded
    assert not loaded & {"lightning", "pytorch_lightning", "gpt.training"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("serve.scheduler", {"torch", "numpy", "grpc", "tiktoken"}),
        ("serve.client", {"torch", "tiktoken", "gpt.model", "grpc", "google.protobuf"}),
        ("serve.async_client", {"torch", "tiktoken", "gpt.model", "grpc", "google.protobuf"}),
        ("serve.top", {"torch", "numpy", "grpc", "google.protobuf", "prometheus_client"}),
        ("serve.logs", {"torch", "numpy", "grpc", "google.protobuf"}),
        ("serve.metrics", {"torch", "numpy", "grpc", "google.protobuf"}),
        ("serve.watching", {"torch", "numpy", "prometheus_client", "opentelemetry"}),
        ("serve.results", {"torch", "numpy", "grpc", "google.protobuf", "tiktoken"}),
        ("serve.wire", {"torch", "numpy", "grpc", "tiktoken"}),
        ("gpt.cli", {"torch", "numpy", "grpc", "lightning", "tiktoken"}),
        ("gpt.config", {"torch", "numpy"}),
        ("gpt.patterns", {"torch", "numpy"}),
        ("gpt.show", {"torch", "numpy", "matplotlib"}),
        ("gpt.stream", {"torch", "numpy", "tiktoken"}),
        ("gpt.pages", {"torch", "numpy"}),
        ("gpt.sequence", {"torch", "numpy"}),
        ("gpt.params", {"torch", "numpy"}),
    ],
)
def test_a_light_module_loads_nothing_heavy(module: str, heavy: set[str]) -> None:
    loaded = loaded_after(module)
    assert module in loaded
    assert not loaded & heavy


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_loads_neither_torch_nor_grpc(command: str) -> None:
    code = (
        "import sys\nfrom gpt.cli import main\n"
        "try:\n    main([sys.argv[1], '--help'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print([m for m in ('torch', 'grpc', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def imported_by(file: Path) -> set[str]:
    """Top-level names that a file imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import; this project uses absolute ones"
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_no_file_of_gpt_imports_grpc_or_the_server() -> None:
    files = sorted((ROOT / "gpt").rglob("*.py"))
    assert files
    for file in files:
        assert not imported_by(file) & {"grpc", "serve"}, file


def test_only_training_imports_lightning() -> None:
    for file in sorted([*(ROOT / "gpt").rglob("*.py"), *(ROOT / "serve").rglob("*.py")]):
        if not file.is_relative_to(ROOT / "gpt" / "training"):
            assert not imported_by(file) & {"lightning", "pytorch_lightning", "wandb"}, file
