"""Connections that have come of age: the settings, and what becomes of a call that runs too long.

That a stream outlives its connection's age is tried out in `tests/integration/test_serve_door.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt.errors import ConfigError
from gpt.tokenizer import Tokenizer
from serve.background import BackgroundServer
from serve.client import Client, RequestError
from serve.engine import Engine
from serve.server import parse
from serve.settings import ListenSettings
from tests.serve.scripted import ScriptedModel


def test_the_age_comes_from_flag_environment_and_file_and_is_off_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*flags: str) -> tuple[float, float]:
        settings = parse(["model", *flags], "antiphon serve")
        return settings.max_connection_age, settings.max_connection_age_grace

    assert found() == (0.0, 0.0)
    file = tmp_path / "serve.yaml"
    file.write_text("max_connection_age: 300\nmax_connection_age_grace: 60\n")
    assert found("--config", str(file)) == (300.0, 60.0)
    monkeypatch.setenv("ANTIPHON_SERVE_MAX_CONNECTION_AGE", "200")
    assert found("--config", str(file)) == (200.0, 60.0)
    assert found("--config", str(file), "--max-connection-age", "100.5") == (100.5, 60.0)
    monkeypatch.delenv("ANTIPHON_SERVE_MAX_CONNECTION_AGE")
    with pytest.raises(ConfigError, match="counts from an age: give --max-connection-age S"):
        found("--max-connection-age-grace", "5")


def test_a_call_that_outlives_the_grace_is_cut_off() -> None:
    model = ScriptedModel(Tokenizer.bytes().n_vocab, lambda position, token: ord("a"))
    engine = Engine(model, Tokenizer.bytes(), name="scripted")
    settings = ListenSettings(max_connection_age=0.5, max_connection_age_grace=0.5)
    with (
        BackgroundServer(engine, settings) as server,
        Client(server.target, timeout=60) as client,
    ):
        model.hold()
        stream = client.stream("x", max_tokens=5)
        model.allow()
        assert next(stream).text == "a"
        with pytest.raises(RequestError) as caught:
            list(stream)
        model.release()
        assert caught.value.code == "UNAVAILABLE"
        assert client.generate("x", max_tokens=2).text == "aa", "over another connection"
