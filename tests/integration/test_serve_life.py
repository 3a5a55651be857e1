"""The life of a server process, told apart second by second with a scripted model."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serve.client import Client, RequestError
from tests import warm
from tests.integration.serving import ENVIRONMENT, PATIENCE, ROOT, SCRIPTED, ServerProcess

pytestmark = pytest.mark.integration

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that is ready to be loaded; see scripted_server.py."""
    (tmp_path / "loaded").touch()
    return tmp_path


class Watch:
    """What a health probe sees, one status after the other."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target)
        stub = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service="serve.v1.GenerationService")
        self.statuses: Iterator[int] = (
            answer.status for answer in stub.Watch(request, timeout=PATIENCE)
        )

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()


def test_loading_serving_draining_and_the_end(tmp_path: Path) -> None:
    with ServerProcess(SCRIPTED, tmp_path) as server:
        target = server.await_bound()
        with Watch(target) as watch, Client(target, timeout=PATIENCE) as client:
            assert next(watch.statuses) == NOT_SERVING
            with pytest.raises(RequestError, match="loading") as refused:
                client.generate("x")
            assert refused.value.code == "UNAVAILABLE"

            (tmp_path / "loaded").touch()
            assert next(watch.statuses) == SERVING
            assert server.await_ready() == f"serving scripted on {target}"

            stream = client.stream("x", max_tokens=300)
            text = next(stream).text
            server.process.send_signal(signal.SIGTERM)
            assert next(watch.statuses) == NOT_SERVING, "before the stream ends"
            assert stream.finish is None
            with pytest.raises(RequestError, match="shutting down") as refused:
                client.generate("x")
            assert refused.value.code == "UNAVAILABLE"
            text += "".join(delta.text for delta in stream)
            assert text == "a" * 300
            assert stream.finish is not None
            assert stream.finish.reason == "length"
        assert server.wait() == 0


def test_what_does_not_end_within_the_limit_is_cut_off_with_a_status(model: Path) -> None:
    with ServerProcess(SCRIPTED, model, "--drain-seconds", "0.1") as server:
        server.await_ready()
        with Client(server.target, timeout=PATIENCE) as client:
            stream = client.stream("x")
            next(stream)
            server.process.send_signal(signal.SIGINT)
            with pytest.raises(RequestError, match="shut down") as cut:
                list(stream)
            assert cut.value.code == "UNAVAILABLE"
        assert server.wait() == 0


def test_a_second_signal_ends_it_at_once(model: Path) -> None:
    with ServerProcess(SCRIPTED, model) as server:
        server.await_ready()
        with Client(server.target, timeout=PATIENCE) as client, Watch(server.target) as watch:
            assert next(watch.statuses) == SERVING
            stream = client.stream("x")
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            assert next(watch.statuses) == NOT_SERVING
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 128 + signal.SIGTERM
            with pytest.raises(RequestError, match="lost the connection"):
                list(stream)


def test_told_to_stop_while_loading_it_stops(tmp_path: Path) -> None:
    with ServerProcess(SCRIPTED, tmp_path) as server:
        server.await_bound()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert server.out == []


def test_an_open_watch_does_not_hold_up_the_end(model: Path) -> None:
    with ServerProcess(SCRIPTED, model) as server:
        server.await_ready()
        with Watch(server.target) as watch:
            assert next(watch.statuses) == SERVING
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0


def test_a_killed_client_leaves_its_place_to_others(model: Path) -> None:  # S10
    with ServerProcess(SCRIPTED, model, "--max-running", "1", "--max-waiting", "0") as server:
        server.await_ready()
        command = [sys.executable, "-m", "gpt", "generate", "--target", server.target]
        doomed = warm.Popen(
            [*command, "--prompt", "x"], stdout=subprocess.PIPE, env=ENVIRONMENT, cwd=ROOT
        )
        assert doomed.stdout is not None
        assert doomed.stdout.read(3) == b"xaa"
        with Client(server.target, timeout=PATIENCE) as client:
            with pytest.raises(RequestError) as full:
                client.generate("x", max_tokens=1)
            assert full.value.code == "RESOURCE_EXHAUSTED"
            doomed.kill()
            doomed.wait()
            doomed.stdout.close()
            # Left alone it would go on for 100 s.
            end = time.monotonic() + PATIENCE
            text = ""
            while not text and time.monotonic() < end:
                with contextlib.suppress(RequestError):  # full still
                    text = client.generate("x", max_tokens=1).text
                time.sleep(0.05)
            assert text == "a"


def test_a_killed_server_is_told_to_its_clients(model: Path) -> None:
    with ServerProcess(SCRIPTED, model) as server:
        server.await_ready()
        with Client(server.target, timeout=PATIENCE) as client:
            stream = client.stream("x")
            next(stream)
            server.process.kill()
            with pytest.raises(RequestError, match=f"lost the connection to {server.target}"):
                list(stream)


def test_an_engine_that_fails_ends_the_process_with_a_failure(model: Path) -> None:
    with ServerProcess(SCRIPTED, model) as server:
        server.await_ready()
        with Client(server.target, timeout=PATIENCE) as client, Watch(server.target) as watch:
            assert next(watch.statuses) == SERVING
            (model / "break").touch()
            with pytest.raises(RequestError, match="the engine failed") as failed:
                client.generate("x")
            assert failed.value.code == "INTERNAL"
            assert next(watch.statuses) == NOT_SERVING
        assert server.wait() != 0
        assert any("the engine failed" in line for line in server.log)


def test_a_step_that_does_not_end_fails_its_requests_and_ends_the_process(model: Path) -> None:
    with ServerProcess(SCRIPTED, model, "--step-timeout", "1") as server:
        server.await_ready()
        with Client(server.target, timeout=PATIENCE) as client, Watch(server.target) as watch:
            assert next(watch.statuses) == SERVING
            (model / "stuck").touch()
            with pytest.raises(RequestError, match="took longer than 1 s") as failed:
                client.generate("x")
            assert failed.value.code == "INTERNAL"
            assert next(watch.statuses) == NOT_SERVING
        assert server.wait() == 1
    log = "\n".join(server.log)
    assert "CRITICAL serve.faults: a step has taken longer than 1 s" in log
    assert "scripted_server.py" in log, "where it is stuck"
    assert "error: the engine failed" in server.log[-1]
    assert "--step-timeout" in server.log[-1]


def test_a_step_that_does_not_end_does_not_keep_the_process_from_ending(model: Path) -> None:
    flags = ("--step-timeout", "0", "--drain-seconds", "0.1")
    with ServerProcess(SCRIPTED, model, *flags) as server:
        server.await_ready()
        with Client(server.target, timeout=PATIENCE) as client:
            stream = client.stream("x")
            next(stream)
            (model / "stuck").touch()
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(RequestError, match="shut down") as cut:
                list(stream)
            assert cut.value.code == "UNAVAILABLE"
        assert server.wait() == 1
        assert "its last step did not end" in server.log[-1]


def test_a_model_that_fails_whatever_it_is_asked_ends_the_process(model: Path) -> None:
    with ServerProcess(SCRIPTED, model) as server:
        server.await_ready()
        with Client(server.target, timeout=PATIENCE) as client, Watch(server.target) as watch:
            assert next(watch.statuses) == SERVING
            (model / "fail").touch()
            with pytest.raises(RequestError, match="failed in a step") as failed:
                client.generate("x")
            assert failed.value.code == "INTERNAL"
            assert next(watch.statuses) == NOT_SERVING
        assert server.wait() == 1
        assert "the accelerator is gone" in server.log[-1]
