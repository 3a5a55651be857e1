"""The wire contract: lint clean, and the committed stubs are what it compiles to."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serve.v1 import generation_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
PROTO = "serve/v1/generation.proto"
STUBS = ("generation_pb2.py", "generation_pb2.pyi", "generation_pb2_grpc.py")


def test_the_committed_stubs_are_what_the_proto_compiles_to(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", *outputs, PROTO],
        cwd=ROOT,
        check=True,
    )
    for name in STUBS:
        committed = (ROOT / "serve" / "v1" / name).read_text(encoding="utf-8")
        made = (tmp_path / "serve" / "v1" / name).read_text(encoding="utf-8")
        assert committed == made, f"{name} is out of date: run `make proto`"


def test_the_contract_is_lint_clean_and_every_field_is_commented() -> None:
    beside = Path(sys.executable).with_name("buf")
    buf = str(beside) if beside.exists() else shutil.which("buf")
    if buf is None:
        pytest.skip("buf is not installed (package buf-bin)")
    done = subprocess.run(
        [buf, "lint"], cwd=ROOT / "protos", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_zero_could_mean_is_told_apart_from_not_given() -> None:  # S14
    fields = pb.GenerationSpec.DESCRIPTOR.fields
    scalars = {f.name for f in fields if f.message_type is None and not f.is_repeated}
    with_presence = {f.name for f in fields if f.has_presence}
    # Only an empty model name means that none is given, and false that it is not asked for.
    assert scalars - with_presence == {"model", "echo", "ignore_end_of_text"}
