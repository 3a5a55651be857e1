"""Interactive sampling, on a real terminal (a pty) and from a pipe."""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
import torch

from gpt.checkpoint import load_model
from gpt.interactive import COMMANDS, Continuation, whole_characters
from gpt.params import SamplingParams
from gpt.sample import main
from gpt.settings import SETTINGS
from gpt.tokenizer import Tokenizer
from tests.terminal import hearing, interrupt

ROOT = Path(__file__).resolve().parents[1]
END = "\r\n> "


def environment(home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    kept["INPUTRC"] = os.devnull
    return kept | {"XDG_STATE_HOME": str(home / "state"), "TERM": "xterm"}


@contextlib.contextmanager
def session(model: Path, home: Path, *flags: str) -> Iterator[pexpect.spawn]:
    """The command on a terminal; it has asked for the first line."""
    # Not forked as other commands are: readline would miss many a Ctrl-C.
    words = ["-m", "gpt", "sample", str(model), "--threads", "1", *flags]
    child = pexpect.spawn(
        sys.executable, words,
        cwd=str(ROOT), env=environment(home), encoding="utf-8", codec_errors="replace",
        timeout=100, dimensions=(50, 120), preexec_fn=hearing,
    )  # fmt: skip
    child.delaybeforesend = None
    try:
        child.expect(END)
        yield child
    finally:
        child.close(force=True)


def say(child: pexpect.spawn, line: str) -> str:
    """Type a line; what comes up to the next prompt, the line's own echo left out."""
    child.sendline(line)
    child.expect_exact(END)
    shown = re.sub(r"\x1b\[\?2004[hl]\r?", "", child.before)  # bracketed paste, on and off
    return str(shown).replace("\r\n", "\n").removeprefix(line).lstrip("\r\n")


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its context is long enough to press Ctrl-C in the middle of a text."""
    import torch

    from gpt.checkpoint import save_model
    from gpt.config import GPTConfig
    from gpt.model import GPT

    tokenizer = Tokenizer.bytes()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(
            GPTConfig(
                vocab_size=tokenizer.n_vocab, block_size=8192, n_layer=2, n_head=2, d_model=16
            )
        )
    folder = tmp_path_factory.mktemp("models") / "slow"
    save_model(folder, model, tokenizer)
    return folder


@pytest.mark.integration
def test_a_session_on_a_terminal(model_folder: Path, tmp_path: Path) -> None:
    with session(model_folder, tmp_path, "--max-tokens", "8", "--seed", "3") as child:
        first = say(child, "To be")
        assert first.startswith("\x1b[2mTo be\x1b[0m")  # the prompt is dimmed, the text is not
        assert say(child, "/again") == first  # the seed is fixed
        assert say(child, "/seed 4").strip() == "seed = 4"
        assert say(child, "/again") != first
        assert say(child, "/seed 3").strip() == "seed = 3"

        # Settings: changed, refused with what is allowed, and reset.
        assert say(child, "/set temperature 0.7").strip() == "temperature = 0.7"
        refused = say(child, "/set temperature -1")
        assert "temperature: -1.0 is not a finite number >= 0; it stays 0.7" in refused
        assert "did you mean temperature?" in say(child, "/set temprature 1")
        assert "a whole number from 0 up" in say(child, "/set top_k")
        assert say(child, "/show").split() == [
            *("max_tokens", "=", "8"), *("temperature", "=", "0.7"), *("seed", "=", "3"),
        ]  # fmt: skip
        assert say(child, "To be") != first
        assert "as they were at the start" in say(child, "/reset")
        assert say(child, "To be") == first

        # Mistakes end nothing.
        assert "did you mean /show?" in say(child, "/shwo")
        too_long = say(child, "y" * 70)
        assert "the prompt has 70 tokens but the model's context holds 64" in too_long
        assert say(child, "To be") == first

        # Ctrl-C at the prompt drops the line, and does not leave.
        child.send("half a li")
        interrupt(child)
        child.expect_exact(END)
        assert say(child, "To be") == first
        # History: up twice and Enter.
        say(child, "/seed")
        child.send("\x1b[A\x1b[A\r")
        child.expect_exact(END)
        assert first.rstrip() in child.before.replace("\r\n", "\n")
        # Tab completes.
        child.send("/rese\t\r")
        child.expect_exact("as they were at the start")
        child.expect_exact(END)
        child.sendeof()
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0

    history = tmp_path / "state" / "antiphon" / "sample_history"
    assert "To be" in history.read_text().splitlines()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    with session(model_folder, tmp_path, "--max-tokens", "1") as child:
        child.send("\x1b[A")  # what was typed last time
        child.expect_exact("/reset")


@pytest.mark.integration
def test_ctrl_c_stops_the_text_and_not_the_program(slow_model: Path, tmp_path: Path) -> None:
    with session(slow_model, tmp_path, "--seed", "1") as child:
        child.sendline("To be")
        child.expect_exact("To be\x1b[0m")
        child.expect(".{20}")  # it streams
        child.sendintr()
        child.expect_exact("(stopped; /more goes on")
        child.expect_exact(END)
        assert say(child, "/set max_tokens 5").strip() == "max_tokens = 5"
        assert "stopped" not in say(child, "/more")
        child.sendline("/quit")
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0


@pytest.fixture
def piped(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[str, str]]:
    """What a session prints to stdout and stderr if its lines come from a pipe."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(lines: str | io.StringIO, *flags: str) -> tuple[str, str]:
        stdin = io.StringIO(lines) if isinstance(lines, str) else lines
        monkeypatch.setattr("sys.stdin", stdin)
        assert main([str(model_folder), "--interactive", *flags]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


def test_a_session_from_a_pipe_prints_texts_alone(
    piped: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    lines = [
        "/set temperature 0", "/set max_tokens 6", "//slash", "/more", "/new",
        "/multi", "one", "two", ".", "/set num_samples 2", "/set logprobs 1", "x", "/nonsense",
    ]  # fmt: skip
    out, err = piped("\n".join(lines))
    assert "\x1b" not in out + err
    assert "> " not in out
    assert out.startswith("temperature = 0\nmax_tokens = 6\n/slash")
    assert "\none\ntwo" in out
    assert "--- 1 of 2 ---\nx" in out
    assert out.count("most likely") == 2
    assert "unknown command '/nonsense'" in err
    assert not (tmp_path / "state").exists()  # a script's lines are nobody's history


def test_more_goes_on_where_the_text_was_cut(piped: Callable[..., tuple[str, str]]) -> None:
    """Greedy: four tokens and four more are eight."""
    flags = ("--temperature", "0", "--dtype", "float64")
    halves, _ = piped("/set max_tokens 4\nab\n/more\n", *flags)
    whole, _ = piped("/set max_tokens 8\nab\n", *flags)
    assert halves.replace("\n", "").removeprefix("max_tokens = 4") == whole.replace(
        "\n", ""
    ).removeprefix("max_tokens = 8")


def test_every_setting_can_be_set_and_shown(piped: Callable[..., tuple[str, str]]) -> None:
    values = {
        "max_tokens": "3", "temperature": "0.5", "top_k": "9", "top_p": "0.9", "min_p": "0.1",
        "typical_p": "0.8", "repetition_penalty": "1.2", "frequency_penalty": "-0.5",
        "presence_penalty": "0.25", "stop": '"x"', "seed": "9", "logprobs": "2", "num_samples": "2",
        "min_tokens": "1", "stop_tokens": "3,4", "ignore_end_of_text": "true",
        "logit_bias": "5:-1.5,6:2", "allowed_tokens": "5,6", "grammar": 'start: "a"',
    }  # fmt: skip
    # A text has one constraint.
    assert set(values) == {*SETTINGS, "num_samples"} - {"json_schema", "regex"}
    wanted = [f"{name} = {value}" for name, value in values.items()]
    lines = [f"/set {name} {value}" for name, value in values.items()]
    out, err = piped("\n".join([*lines, "/show", "/reset", "/show", "/help", "/set"]))
    assert err == ""
    assert out.splitlines()[: len(wanted)] == wanted
    assert sorted(out.splitlines()[len(wanted) : 2 * len(wanted)]) == sorted(wanted)
    assert "all settings are at their defaults" in out
    assert all(command in out for command in COMMANDS)


def test_mistakes_in_settings_change_nothing(piped: Callable[..., tuple[str, str]]) -> None:
    lines = ["/set seed -1", "/set num_samples 0", "/set top_p 2", "/seed x", "/more", "/show"]
    out, err = piped("\n".join(lines))
    assert [line.split()[1] for line in err.splitlines()] == [
        "seed:", "num_samples:", "top_p:", "seed:", "nothing",
    ]  # fmt: skip
    assert "all settings are at their defaults" in out


def test_commands_and_settings_complete(model_folder: Path) -> None:
    loaded = load_model(model_folder)
    session = Continuation(loaded, SamplingParams(), None, 1, torch.float32, "cpu")
    completions = session.completions
    assert completions("/se") == ["/set", "/seed", *[c for c in completions("/set ") if c]]
    assert completions("/set temp") == ["/set temperature "]
    assert completions("/set num") == ["/set num_samples "]
    assert completions("To") == []


def test_a_character_that_was_cut_is_begun_again() -> None:
    tokenizer = Tokenizer.bytes()
    ids = tokenizer.encode("a文")
    assert whole_characters(ids, tokenizer) == ids
    assert whole_characters(ids[:-1], tokenizer) == ids[:1]
    assert whole_characters(ids[:-2], tokenizer) == ids[:1]
    # Malformed bytes complete nothing, however many there are; they stay.
    assert whole_characters([97, 0x80, 0x80], tokenizer) == [97, 0x80, 0x80]


def test_no_mistake_ends_the_session(piped: Callable[..., tuple[str, str]]) -> None:
    lines = [
        '/set stop ""', '/set stop ["a", ""]', r'/set stop "\ud800"', "/set stop [1e999]",
        "/set stop " + "[" * 100_000, "/set seed " + "9" * 5000, "/seed " + "9" * 4000,
        "/set temperature " + "9" * 5000, "/set num_samples " + "9" * 5000,
        "/set num_samples 0000000019", "\ud800", "/\ud800", "/set \ud800 1", "/set stop \ud800",
    ]  # fmt: skip
    out, err = piped("\n".join([*lines, "/show"]))
    assert len(err.splitlines()) == len(lines)
    assert all(line.startswith("error: ") and len(line) < 250 for line in err.splitlines())
    assert "stop[1]: 0 characters long, 1 to 1024 allowed; it stays none" in err
    assert out == "(all settings are at their defaults; /set lists them)\n"


def test_a_value_that_python_refuses_is_shown(
    piped: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is forgotten in the checks must not end the session."""
    monkeypatch.setattr("gpt.session.from_text", lambda name, text: int("x" + text))
    out, err = piped("/set top_k 1\n/seed 1\n/seed\n")
    assert [line.startswith("error: that cannot be done: ") for line in err.splitlines()] == [
        True, True,
    ]  # fmt: skip
    assert out == "seed = random\n"


class Decoding(io.StringIO):
    """Bytes, decoded line by line as a terminal's are; a pipe's are decoded many at a time."""

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        return super().readline(size).encode("latin-1").decode("utf-8")


@pytest.mark.parametrize("line", [b"/multi\na\xff\n", b"\xff\n"])
def test_a_line_that_is_not_utf8_is_complained_of(
    piped: Callable[..., tuple[str, str]], line: bytes
) -> None:
    out, err = piped(Decoding(line.decode("latin-1") + "/seed\n"))
    assert "the line is not UTF-8" in err
    assert out == "seed = random\n"
