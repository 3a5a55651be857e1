"""Where settings come from, in which order, and what is said of those that are wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gpt.errors import ConfigError
from serve.folders import ModelSource
from serve.layers import PREFIX, Layered, read, settings_of, shown, summary
from serve.server import SECRETS, build_parser, main, parse

PROG = "antiphon serve"
KEY = "a-key-that-nobody-may-see"


def layered(argv: list[str], environ: dict[str, str] | None = None) -> Layered:
    return read(build_parser(PROG), argv, environ or {}, secrets=SECRETS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text("model: runs/a\nmax-running: 4\nmax_waiting: 5\nport: 1\ntls_key: ~\n")
    return path


def test_flags_go_before_the_environment_before_the_file_before_defaults(file: Path) -> None:
    found = layered(
        ["--config", str(file), "--port", "3"],
        {f"{PREFIX}PORT": "2", f"{PREFIX}MAX_RUNNING": "6", f"{PREFIX}DEVICE": "", "PORT": "9"},
    )
    values = found.values
    assert (values["port"], values["max_running"], values["max_waiting"]) == (3, 6, 5)
    assert (values["device"], values["tls_key"]) == ("cpu", None)
    assert values["model"] == [ModelSource(Path("runs/a"))]
    assert found.origins == {
        "model": f"{file}:1", "max_waiting": f"{file}:3", "max_running": f"{PREFIX}MAX_RUNNING",
        "port": "flag",
    }  # fmt: skip
    other = layered(["runs/b"], {f"{PREFIX}CONFIG": str(file)}).values["model"]
    assert other == [ModelSource(Path("runs/b"))]


def test_a_flag_that_repeats_a_default_still_goes_first(file: Path) -> None:
    assert layered(["--config", str(file), "--port", "50051"]).values["port"] == 50051
    found = layered(["--config", str(file), "--prefix-cache"], {f"{PREFIX}PREFIX_CACHE": "no"})
    assert found.values["prefix_cache"] is True


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "max_runing: 4",
            r"serve.yaml:1: unknown setting 'max_runing'; did you mean max_running\?",
        ),
        ("a: 1\n", "unknown setting 'a'$"),
        ("port: 1\nport: 2", "serve.yaml:2: port is set twice"),
        ("port: 1\nmax_running: 0", "serve.yaml:2: max_running: 0 must be at least 1"),
        ("port: [1]", "port takes one value"),
        ("port: 'null'", "'null' is not a whole number"),
        ("dtype: int8", "dtype: invalid choice"),
        ("warmup: 2", "warmup is '2', but must be true or false"),
        ("api_keys: x", f"secret and only taken from the environment .{PREFIX}API_KEYS"),
        ("config: other.yaml", "unknown setting 'config'"),
        ("model: [a, {b: c}]", "model takes a list of plain values"),
        ("- port", "must hold NAME: VALUE lines"),
        ("port: {", "is no YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        layered(["--config", str(path)])
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_models_are_lists_in_a_file_and_have_commas_in_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: [runs/a, b=runs/b]\nwatch: runs/c\n")
    two = [ModelSource(Path("runs/a")), ModelSource(Path("runs/b"), "b")]
    values = layered(["--config", str(path)]).values
    assert (values["model"], values["watch"]) == (two, [ModelSource(Path("runs/c"))])
    assert layered([], {f"{PREFIX}MODEL": "runs/a, b=runs/b"}).values["model"] == two
    found = layered(["runs/a", "b=runs/b", "--watch", "x: y", "--watch", "z"])
    path.write_text(shown(build_parser(PROG), found))
    again = layered(["--config", str(path)]).values
    assert (again["model"], again["watch"]) == (two, found.values["watch"])


def test_an_empty_file_sets_nothing_and_a_missing_one_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    assert layered(["--config", str(tmp_path / "empty.yaml")]).origins == {}
    with pytest.raises(ConfigError, match=r"cannot read the settings .*none.yaml: No such file"):
        layered(["--config", str(tmp_path / "none.yaml")])


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MAX_RUNING", "4", f"unknown setting {PREFIX}MAX_RUNING; did you mean {PREFIX}MAX_RUN"),
        ("PORT", "tcp://10.0.0.1:50051", f"{PREFIX}PORT: port: 'tcp://10.0.0.1:50051' is not"),
        ("REFLECTION", "maybe", "reflection is 'maybe', but must be true or false"),
        ("PRINT_CONFIG", "1", "unknown setting"),
    ],
)
def test_what_is_wrong_with_the_environment_is_said(variable: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        layered([], {f"{PREFIX}{variable}": value})


def test_what_kubernetes_puts_there_for_a_service_of_our_name_is_passed_over() -> None:
    found = layered([], {"ANTIPHON_PORT": "tcp://10.0.0.1:1", "ANTIPHON_SERVICE_HOST": "10.0.0.1"})
    assert found.origins == {}


def test_values_are_taken_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("socket_mode: 0660\nhost: no\nreflection: off\nkv_cache_gb: 1e-1\n")
    values = layered(["--config", str(path)]).values
    assert (values["socket_mode"], values["host"]) == (0o660, "no")
    assert (values["reflection"], values["kv_cache_gb"]) == (False, 0.1)


def test_what_is_printed_is_a_file_that_gives_the_same(tmp_path: Path) -> None:
    parser = build_parser(PROG)
    argv = ["a: #b", "--port", "0", "--no-reflection", "--kv-cache-gb", "0.5", "--threads", "2"]
    argv += ["--socket-mode", "660", "--tls-cert", "é.pem", "--host", "::1"]
    found = read(parser, argv, {}, secrets=SECRETS)
    path = tmp_path / "printed.yaml"
    path.write_text(shown(parser, found, SECRETS), encoding="utf-8")
    again = layered(["--config", str(path)]).values
    assert again.keys() - {"config"} == settings_of(parser).keys()
    assert {name: again[name] for name in settings_of(parser)} == {
        name: found.values[name] for name in settings_of(parser)
    }
    assert yaml.safe_load(path.read_text("utf-8"))["port"] == 0


def test_secrets_are_printed_nowhere() -> None:
    parser = build_parser(PROG)
    found = read(parser, ["m"], {f"{PREFIX}API_KEYS": f"me {KEY}"}, secrets=SECRETS)
    assert KEY in found.values["api_keys"]
    for text in (shown(parser, found, SECRETS), summary(parser, found)):
        assert "api_keys" in text
        assert "hidden" in text
        assert KEY not in text


def test_the_command_prints_its_settings_and_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{PREFIX}API_KEYS", f"me {KEY}")
    monkeypatch.setenv(f"{PREFIX}MAX_RUNNING", "7")
    assert main(["--print-config", "--port", "0"], PROG) == 0
    out = capsys.readouterr().out
    assert "max_running: 7  # ANTIPHON_SERVE_MAX_RUNNING\n" in out
    assert "port: 0  # flag\n" in out
    assert KEY not in out
    settings = parse(["m"], PROG)
    assert settings.api_keys == f"me {KEY}"
    assert KEY not in repr(settings)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "no MODEL given"),
        (["m", "--tls-cert", "c"], "--tls-key FILE"),
        (["m", "--tls-key", "k"], "--tls-cert FILE"),
        (["m", "--tls-client-ca", "ca"], "needs --tls-cert and --tls-key"),
        (["m", "--key-concurrent", "1"], "--api-keys-file FILE"),
    ],
)
def test_settings_that_need_others_are_refused(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(argv, PROG)


def test_each_setting_is_documented_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z0-9_]+)` \| ([^|]+) \|", page, re.MULTILINE))
    parser = build_parser(PROG)
    values = layered([]).values
    expected = {}
    for name, action in settings_of(parser).items():
        default = values[name]
        text = f"{default:o}" if name == "socket_mode" else str(default).lower()
        expected[name] = f"`{text}`" if default is not None else "none"
        assert action.help, name
    expected["api_keys"] = "none"
    assert {name: rows.get(name, "missing").strip() for name in expected} == expected
    assert rows.keys() == expected.keys()
