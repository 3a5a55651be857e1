"""The `antiphon serve` command's settings. The process itself: tests/integration/test_serve.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpt.errors import CheckpointError, ConfigError
from serve.folders import ModelSource
from serve.server import main, parse

PROG = "antiphon serve"


def test_a_server_can_listen_and_answer_probes_before_torch_is_loaded() -> None:
    code = "import sys, serve.life; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_defaults() -> None:
    settings = parse(["folder"], PROG)
    assert settings.models == [ModelSource(Path("folder"))]
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


def test_models_are_named_and_followed_wherever_they_stand_among_the_flags() -> None:
    settings = parse(["a", "--port", "0", "--watch", "x=b", "c=runs/c", "--watch", "./d=d"], PROG)
    assert settings.models == [
        ModelSource(Path("a")),
        ModelSource(Path("runs/c"), "c"),
        ModelSource(Path("b"), "x", watched=True),
        ModelSource(Path("./d=d"), watched=True),
    ]
    assert parse(["a", "--watch", "a"], PROG).models == [ModelSource(Path("a"), watched=True)]
    with pytest.raises(ConfigError, match="two models are to be called 'a'"):
        parse(["a=b", "a=c"], PROG)


def test_a_model_that_is_not_there_is_found_out_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model at"):
        main([str(tmp_path / "none")], PROG)
