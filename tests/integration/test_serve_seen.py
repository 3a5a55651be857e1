"""What a server process says of itself: its log, its metrics, and the end of both."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from serve.client import Client
from serve.top import look
from tests import warm
from tests.integration.serving import ENVIRONMENT, PATIENCE, ROOT, SCRIPTED, ServerProcess

pytestmark = pytest.mark.integration

SECRET = "the password is xyzzy"


def test_a_log_of_objects_metrics_and_a_slow_request(tmp_path: Path) -> None:
    (tmp_path / "loaded").touch()
    flags = ("--log-format", "json", "--metrics-port", "0", "--slow-request", "0.5")
    with ServerProcess(SCRIPTED, tmp_path, *flags) as server:
        server.await_ready()
        with Client(server.target, timeout=PATIENCE) as client:
            client.generate(SECRET, max_tokens=1, request_id="quick")
            client.generate(SECRET, max_tokens=60, request_id="slow")  # 10 ms a token
        told = [json.loads(line)["message"] for line in server.log]
        [where] = [line.partition(" on ")[2] for line in told if line.startswith("metrics on ")]
        found = look(where)
        assert found.value("generation_tokens_total", model_name="scripted") == 61
        assert found.value("rpcs_total", method="Generate", code="OK") == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    lines = [json.loads(line) for line in server.log]
    assert lines[-1]["message"] == "stopped"
    calls = {line["request_id"]: line for line in lines if line.get("request_id")}
    assert (calls["quick"]["level"], calls["slow"]["level"]) == ("info", "warning")
    assert calls["slow"]["completion_tokens"] == 60
    assert "xyzzy" not in "".join(server.log)


def test_a_log_that_nobody_reads_holds_up_neither_requests_nor_the_end(tmp_path: Path) -> None:
    (tmp_path / "loaded").touch()
    with warm.Popen(
        [*SCRIPTED, str(tmp_path), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,  # 64 KiB fit into it
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
    ) as process:
        try:
            assert process.stdout is not None
            target = process.stdout.readline().rpartition(" on ")[2].strip()
            with Client(target, timeout=PATIENCE) as client:
                for _ in range(700):
                    client.model()
                assert client.generate("x", max_tokens=2).text == "aa"
            process.terminate()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
