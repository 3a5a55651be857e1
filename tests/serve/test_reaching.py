"""How commands reach a server by TLS and with a key, and what they say if they do not."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
import yaml

from gpt.bench import command as bench
from gpt.cli import main as antiphon
from gpt.errors import UserError
from gpt.tokenizer import Tokenizer
from serve import chat, generate, probe
from serve.background import BackgroundServer
from serve.client import Client, RequestError, Tls
from serve.engine import Engine
from serve.reaching import KEY_VARIABLE, target
from serve.server import parse
from serve.settings import ListenSettings
from tests.serve.scripted import ScriptedModel

ROOT = Path(__file__).resolve().parents[2]
KEY = "the-secret-of-the-website"
BYTES = Tokenizer.bytes()


@dataclass
class Secured:
    """A server that wants a certificate and a key, and where its clients' files lie."""

    target: str
    folder: Path

    def file(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def tls(self) -> list[str]:
        pair = [f"--tls-cert={self.file('me.pem')}", f"--tls-key={self.file('me.key')}"]
        return [f"--tls-ca={self.file('ca.pem')}", *pair]

    @property
    def at(self) -> list[str]:
        return ["--target", self.target, *self.tls]


def write(folder: Path, name: str, cert: trustme.LeafCert) -> None:
    chain = b"".join(each.bytes() for each in cert.cert_chain_pems)
    (folder / f"{name}.pem").write_bytes(chain)
    (folder / f"{name}.key").write_bytes(cert.private_key_pem.bytes())


def engine() -> Engine:
    model = ScriptedModel(BYTES.n_vocab, lambda position, token: ord("a"))
    return Engine(model, BYTES, name="scripted")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    own, other = trustme.CA(), trustme.CA()
    own.cert_pem.write_to_path(folder / "ca.pem")
    other.cert_pem.write_to_path(folder / "other.pem")
    write(folder, "server", own.issue_cert("127.0.0.1", "antiphon"))
    write(folder, "me", own.issue_cert("me@example.org"))
    write(folder, "stranger", other.issue_cert("me@example.org"))
    (folder / "key").write_text(f"{KEY}\n")
    settings = ListenSettings(
        tls_cert=folder / "server.pem",
        tls_key=folder / "server.key",
        tls_client_ca=folder / "ca.pem",
        api_keys=f"website {KEY}",
    )
    with BackgroundServer(engine(), settings) as server:
        yield Secured(server.target, folder)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


ASK = ["--prompt", "x", "--max-tokens", "3"]


def test_text_comes_by_tls_with_the_key_of_a_file_or_of_the_environment(
    secured: Secured, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*secured.at, *ASK]
    assert generate.main([*flags, "--api-key-file", secured.file("key")]) == 0
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert generate.main([*flags, "--tls-server-name", "antiphon"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "xaaa\n" * 2
    assert captured.err == ""
    monkeypatch.setenv(KEY_VARIABLE, "another-key-than-the-files")
    assert generate.main([*flags, "--api-key-file", secured.file("key")]) == 0


def test_a_chat_goes_by_tls_with_a_key(
    secured: Secured,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    template = tmp_path / "template"
    template.write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    flags = ["bytes", "--template", str(template), "--max-tokens", "2", *secured.at]
    assert chat.main(flags) == 0
    assert capsys.readouterr().out == "aa\n"


def test_a_load_goes_by_tls_with_a_key_that_is_not_written_down(
    secured: Secured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    started: list[str] = []

    class Noted(subprocess.Popen[str]):
        def __init__(self, arguments: list[str], **options: object) -> None:
            started.extend(arguments)
            super().__init__(arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", Noted)
    told = tmp_path / "told.json"
    flags = ["--streams=2", "--seconds=1", "--warm-up=0", "--rounds=1", f"--json={told}"]
    flags += ["--prompt-tokens=fixed:3", "--output-tokens=fixed:3"]
    assert bench.main(["serve", "--address", secured.target, *secured.tls, *flags]) == 0
    (row,) = json.loads(told.read_text())["results"]
    assert row["errors"] == {}
    assert row["tokens_per_s"]["median"] > 0
    assert "grpc" in started
    assert not any(KEY in each for each in [*started, told.read_text()])
    monkeypatch.setenv(KEY_VARIABLE, "the-secret-of-nobody")
    with pytest.raises(UserError, match="the API key that was sent is none of those"):
        bench.main(["serve", "--address", secured.target, *secured.tls, *flags])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("{tls}", "wants an API key, and none was sent; put the key into the variable ANTIPHON_"),
        ("{tls} --api-key-file={dir}/wrong", "the API key that was sent is none of those that it"),
        ("", "closed the connection at once; if it speaks TLS, so must the client: --tls or"),
        ("--tls", "none of the usual authorities has signed it; .* --tls-ca FILE"),
        ("--tls-ca={dir}/other.pem", "none of those in .*other.pem has signed it"),
        ("{tls} --tls-server-name=models.example.org", "not made for models.example.org; .*--tls-"),
        ("--tls-ca={dir}/ca.pem", "certificates of clients, give one: --tls-cert FILE"),
        (
            "--tls-ca={dir}/ca.pem --tls-cert={dir}/stranger.pem --tls-key={dir}/stranger.key",
            "certificate .*stranger.pem signed by an authority that the server trusts",
        ),
    ],
)
def test_what_a_server_refuses_is_explained(secured: Secured, flags: str, said: str) -> None:
    (secured.folder / "wrong").write_text("the-secret-of-nobody")
    given = flags.format(tls=" ".join(secured.tls), dir=secured.folder).split()
    with pytest.raises(RequestError, match=said) as caught:
        generate.main(["--target", secured.target, *given, *ASK, "--timeout", "20"])
    assert "\n" not in str(caught.value)
    assert "nobody" not in str(caught.value)


def test_tls_with_a_server_that_has_none_is_explained(secured: Secured) -> None:
    with BackgroundServer(None) as plain:
        flags = ["--target", plain.target, f"--tls-ca={secured.file('ca.pem')}", *ASK]
        with pytest.raises(RequestError, match="does not speak TLS; leave out --tls"):
            generate.main(flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tls-ca={dir}/none", "cannot read the TLS CA .*none: No such file .*; give a PEM file"),
        ("--tls-ca={dir}/key", "key holds no certificates in PEM"),
        ("--tls-cert={dir}/me.pem", "--tls-cert is given alone; .* --tls-cert FILE --tls-key FILE"),
        ("--tls-cert={dir}/me.pem --tls-key={dir}/server.key", "server.key does not belong to"),
        ("--tls-cert={dir}/key --tls-key={dir}/me.key", "key holds nothing usable in PEM"),
        ("--api-key-file={dir}/none", "cannot read the API key file .*none: No such file"),
        ("--api-key-file={dir}", "cannot read the API key file .*: Is a directory"),
        ("--api-key-file={dir}/keys", "keys holds 2 words and must hold one, the API key"),
        ("--api-key-file={dir}/empty", "empty holds no words and must hold one"),
        ("--api-key-file={dir}/digest", "digest holds the digest that the server keeps"),
        ("--api-key-file={dir}/umlaut", "umlaut has characters that no header can carry"),
        ("--api-key-file={dir}/model", "more than 8192 bytes, so it is no API key"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_before_anybody_is_asked(
    secured: Secured, flags: str, said: str
) -> None:
    for name, text in [
        ("keys", f"website {KEY}\n"), ("empty", " \n"), ("digest", f"sha256:{'0f' * 32}"),
        ("umlaut", "geheimnis-für-ünser"), ("model", "x" * 9000),
    ]:  # fmt: skip
        (secured.folder / name).write_text(text, encoding="utf-8")
    given = flags.format(dir=secured.folder).split()
    for main in (
        lambda: generate.main([*given, "--target", "127.0.0.1:1", *ASK]),
        lambda: chat.main(["bytes", *given, "--target", "127.0.0.1:1"]),
        lambda: bench.main(["serve", "--preset", "nano", *given]),
        lambda: probe.main([*given, "--target", "127.0.0.1:1"]),
    ):
        with pytest.raises(UserError, match=said) as caught:
            main()
        assert KEY not in str(caught.value)


def test_a_key_on_the_command_line_is_refused_and_not_repeated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for given in (["--api-key", KEY], [f"--api-key={KEY}"]):
        with pytest.raises(SystemExit) as caught:
            generate.main([*given, *ASK])
        assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "put it into a file (--api-key-file FILE) or the variable ANTIPHON_API_KEY" in said
    with pytest.raises(SystemExit):
        parse(["model", "--api-keys", f"website {KEY}"], "antiphon serve")
    said += capsys.readouterr().err
    assert "or the variable ANTIPHON_SERVE_API_KEYS" in said
    assert KEY not in said


def test_a_key_without_tls_to_another_machine_is_told_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    for place, told in (("127.0.0.1:1", False), ("0.0.0.0:1", True)):
        with pytest.raises(RequestError):
            generate.main(["--target", place, *ASK])
        assert ("travels in the clear" in capsys.readouterr().err) == told


def test_a_chat_here_takes_no_flags_of_a_connection(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chat.main(["bytes", "--tls-ca", "ca.pem"])
    assert "--tls-ca says how a server is reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    "good", ["localhost:50051", "[::1]:1", "unix:/run/a.sock", "dns:///antiphon.default:50051",
             "ipv4:10.0.0.1:1,10.0.0.2:1"],
)  # fmt: skip
def test_addresses_of_every_kind_are_taken(good: str) -> None:
    assert target(good) == good


# --- Probes ---------------------------------------------------------------------------------------


def test_the_probe_of_the_pod_is_answered_by_tls(
    secured: Secured, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command in the manifest, word by word but for place and port, as a process."""
    text = (ROOT / "deploy/kubernetes/tls/kustomization.yaml").read_text(encoding="utf-8")
    (patch,) = yaml.safe_load(text)["patches"]
    (server,) = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]["containers"]
    _, *words = server["readinessProbe"]["exec"]["command"]
    line = " ".join(words).replace("127.0.0.1:50051", secured.target)
    words = line.replace("/etc/antiphon/tls/ca.crt", secured.file("ca.pem")).split()
    pair = secured.tls[1:]  # this server wants a certificate, too
    done = subprocess.run(
        [sys.executable, "-m", "gpt", *words, *pair],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{secured.target} is serving\n"), done.stderr
    assert done.stderr == ""
    assert antiphon([*words, "--timeout", "3"]) == 1, "without the certificate"
    assert "if it wants certificates of clients, give one" in capfd.readouterr().err


def test_who_is_not_serving_is_not_ready(capfd: pytest.CaptureFixture[str]) -> None:
    with BackgroundServer(None) as loading:
        assert antiphon(["ready", "--target", loading.target, "--timeout", "2"]) == 1
    said = capfd.readouterr().err
    assert "was not ready within 2 s: it is not serving yet" in said
    assert "Traceback" not in said


def test_the_client_in_python_says_the_same(secured: Secured) -> None:
    tls = Tls(secured.file("ca.pem"), secured.file("me.pem"), secured.file("me.key"))
    with Client(secured.target, tls=tls, timeout=20) as client:
        client.await_ready(20)
        with pytest.raises(RequestError, match=r"none was sent; .* api_key=") as caught:
            client.generate("x")
    assert caught.value.code == "UNAUTHENTICATED"
