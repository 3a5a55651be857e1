"""Unix sockets as files: taken over, guarded, removed."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import grpc
import pytest

from gpt.errors import ServerError
from gpt.tokenizer import Tokenizer
from serve.address import host_of
from serve.background import BackgroundServer
from serve.client import Client
from serve.engine import Engine
from serve.settings import ListenSettings
from tests.serve.scripted import ScriptedModel


def server(path: Path, **options: object) -> BackgroundServer:
    model = ScriptedModel.of(Tokenizer.bytes(), list(b"heard"))
    engine = Engine(model, Tokenizer.bytes(), name="scripted")
    return BackgroundServer(engine, ListenSettings(host=f"unix:{path}", **options))


def test_a_server_on_a_socket_is_its_users_alone_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with server(path) as running:
        assert running.target == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with Client(running.target, timeout=20) as client:
            assert client.generate("x").text == "heard"
        with pytest.raises(ServerError, match="another server does"):
            server(path).__enter__()
        with Client(running.target, timeout=20) as client:
            assert client.generate("x").text == "heard"
    assert not path.exists()


def test_a_socket_that_nobody_listens_on_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.is_socket()
    with server(path, socket_mode=0o660) as running:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with grpc.insecure_channel(running.target) as channel:
            grpc.channel_ready_future(channel).result(20)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "is no socket"),
        ("none/s", "there is no folder .*none for the socket"),
        ("x" * 108, "cannot be a socket's path"),
        ("%41", "cannot be a socket's path"),
    ],
)
def test_what_cannot_be_a_socket_is_told_and_left_alone(
    tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ServerError, match=said):
        server(tmp_path / name).__enter__()
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("host", ["unix-abstract:x", "ipv4:1.2.3.4", "dns:localhost", "vsock:1"])
def test_other_kinds_of_address_are_refused(host: str) -> None:
    with pytest.raises(ServerError, match="no address to listen on"):
        host_of(host)


def test_addresses_with_colons_get_brackets() -> None:
    assert (host_of("::1"), host_of("localhost")) == ("[::1]", "localhost")
