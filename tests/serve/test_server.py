"""The `antiphon serve` command's settings. The process itself: tests/integration/test_serve.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpt.errors import CheckpointError
from serve.server import main, parse

PROG = "antiphon serve"


def test_a_server_can_listen_and_answer_probes_before_torch_is_loaded() -> None:
    code = "import sys, serve.life; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_defaults() -> None:
    settings = parse(["folder"], PROG)
    assert settings.model == Path("folder")
    assert (settings.host, settings.port) == ("127.0.0.1", 50051)
    assert (settings.max_running, settings.max_waiting) == (32, 256)
    assert settings.max_waiting_tokens == 2**20
    assert settings.kv_cache_gb is None
    assert settings.drain_seconds == 30
    assert settings.prefix_cache
    assert not parse(["folder", "--no-prefix-cache"], PROG).prefix_cache
    assert settings.step_timeout == 300


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "65536"],
        ["--port", "x"],
        ["--max-running", "0"],
        ["--max-waiting", "-1"],
        ["--kv-cache-gb", "nan"],
        ["--kv-cache-gb", "inf"],
        ["--threads", "0"],
        ["--drain-seconds", "-1"],
        ["--step-timeout", "-1"],
        ["--dtype", "float16"],
        ["--model", "x"],
    ],
)
def test_a_flag_out_of_range_is_a_usage_error(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["folder", *flags], PROG)
    assert end.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_a_model_that_is_not_there_is_found_out_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model at"):
        main([str(tmp_path / "none")], PROG)
