"""The wheel holds all that an installed copy needs, and an installed copy finds it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "gpt", "serve", "configs", "protos")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that the tree stays clean, with the setuptools that is here."""
    source = tmp_path_factory.mktemp("source")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*")
            )
        else:
            shutil.copy(ROOT / name, source / name)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # setuptools warns about packages and data that it takes by accident, or soon will not.
    assert "Warning" not in done.stdout + done.stderr
    (built,) = (source / "dist").glob("antiphon-*.whl")
    return zipfile.ZipFile(built)


def test_every_module_config_and_contract_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    wanted = {
        str(file.relative_to(ROOT))
        for package in ("gpt", "serve")
        for pattern in ("*.py", "*.pyi", "py.typed")
        for file in (ROOT / package).rglob(pattern)
    }
    wanted |= {f"gpt/configs/{file.name}" for file in (ROOT / "configs").glob("*.yaml")}
    wanted |= {
        f"serve/protos/{file.relative_to(ROOT / 'protos')}"
        for file in (ROOT / "protos").rglob("*.proto")
    }
    assert {"gpt/model.py", "serve/v1/generation_pb2.pyi"} <= wanted
    assert wanted <= set(wheel.namelist())


def test_nothing_else_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    top = {name.partition("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"gpt", "serve"}


def test_the_metadata_says_what_it_is_and_how_it_may_be_used(wheel: zipfile.ZipFile) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Name"] == "antiphon"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in wheel.namelist())
    entry_points = wheel.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert "antiphon = gpt.cli:main" in entry_points


def test_an_installed_copy_finds_its_configs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    site = tmp_path / "site"
    wheel.extractall(site)
    code = (
        "import gpt; from gpt.training.run import find_config; print(gpt.__file__); "
        "print(find_config('shakespeare-tiny'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    module, config = done.stdout.splitlines()
    assert Path(module) == site / "gpt" / "__init__.py"
    assert Path(config) == site / "gpt" / "configs" / "shakespeare-tiny.yaml"
