"""`antiphon chat`: from a pipe, at a terminal, and with a server that answers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pexpect
import pytest
import torch

from gpt.chat.command import Local, find_template
from gpt.chat.session import COMMANDS, Chat
from gpt.chat.turns import Turn
from gpt.checkpoint import LoadedModel, save_model
from gpt.cli import main as cli
from gpt.config import GPTConfig
from gpt.errors import ChatTemplateError, UserError
from gpt.model import GPT
from gpt.params import SamplingParams
from serve.background import BackgroundServer
from serve.chat import main
from serve.engine import Engine
from tests.chat.chatml import CHATML, tokenizer
from tests.serve.scripted import ScriptedModel
from tests.terminal import hearing, interrupt

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = tokenizer()
SPECIAL = TOKENIZER.special
END = "\r\n> "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was never trained; its answers go on until they are stopped."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPTConfig(
            vocab_size=TOKENIZER.n_vocab, block_size=4096, n_layer=2, n_head=2, d_model=16
        )
        model = GPT(config)
    path = tmp_path_factory.mktemp("models") / "parrot"
    save_model(path, model, TOKENIZER, chat_template=CHATML)
    return path


@pytest.fixture
def piped(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[str, str]]:
    """What is printed to stdout and stderr if the lines come from a pipe."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(lines: str, *flags: str) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert main([str(folder), *flags]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run


SAYS = {ord("\n"): ord("o"), ord("o"): ord("k"), ord("k"): SPECIAL["<|im_end|>"]}


def chat(
    following: Callable[[int, int], int], *, block_size: int = 256, **options: object
) -> tuple[Chat, list[list[Turn]]]:
    """A chat with a model that says what it is told to; and the turns that it was given, for each
    answer. Its prompts are the bytes of the last turn and a line end."""
    seen: list[list[Turn]] = []

    def encode(turns: Sequence[Turn]) -> list[int]:
        seen.append(list(turns))
        return TOKENIZER.encode("".join(turn.content for turn in turns) + "\n")

    model = ScriptedModel(TOKENIZER.n_vocab, following, block_size=block_size)
    loaded = LoadedModel(model, TOKENIZER, "scripted", Path(), {})  # type: ignore[arg-type]
    speaker = Local(loaded, torch.float32, "cpu")
    params = SamplingParams(temperature=0)
    ends = [SPECIAL["<|im_end|>"]]
    return Chat(speaker, encode, TOKENIZER, params, None, ends=ends, **options), seen  # type: ignore[arg-type]


def nothing() -> str:
    raise EOFError


def test_answers_end_with_the_turn_and_are_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    talk, seen = chat(lambda _, token: SAYS.get(token, ord("?")), system="s")
    for line in ("one", "//two", "/again"):
        assert talk.take(line, nothing)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("ok\nok\nok\n", "")
    said = [[(turn.role, turn.content) for turn in turns] for turns in seen]
    before = [("system", "s"), ("user", "one")]
    assert said == [
        before,
        [*before, ("assistant", "ok"), ("user", "/two")],
        [*before, ("assistant", "ok"), ("user", "/two")],
    ]
    talk.take("/history", nothing)
    assert capsys.readouterr().out == (
        "system: s\nuser: one\nassistant: ok\nuser: /two\nassistant: ok\n"
    )
    assert not talk.take("/quit", nothing)


def test_the_conversation_can_be_begun_again(capsys: pytest.CaptureFixture[str]) -> None:
    talk, seen = chat(lambda _, token: SAYS.get(token, ord("?")))
    for line in ("one", "/new", "two", "/system Be nice.", "three", "/system", "/system none", "x"):
        talk.take(line, nothing)
    assert [[turn.content for turn in turns] for turns in seen] == [
        ["one"], ["two"], ["Be nice.", "three"], ["x"],
    ]  # fmt: skip
    assert "\nBe nice.\n" in capsys.readouterr().out


def test_special_tokens_that_the_model_makes_are_its_own() -> None:
    think, no_more = SPECIAL["<think>"], SPECIAL["</think>"]
    says = {ord("\n"): think, think: ord("h"), ord("h"): no_more, no_more: SPECIAL["<|im_end|>"]}
    talk, seen = chat(lambda _, token: says.get(token, ord("?")))
    talk.take("a", nothing)
    talk.take("b", nothing)
    answer = seen[-1][1]
    assert (answer.content, answer.own) == ("<think>h</think>", {"<think>", "</think>"})
    # Where it also spells one, nobody can tell afterwards which is which.
    spells = iter([*b"<think>", think, SPECIAL["<|im_end|>"]])
    talk, seen = chat(lambda _, token: next(spells, SPECIAL["<|im_end|>"]))
    talk.take("a", nothing)
    talk.take("b", nothing)
    assert (seen[-1][1].content, seen[-1][1].own) == ("<think><think>", frozenset())


def test_old_turns_are_forgotten_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    talk, seen = chat(lambda _, token: SAYS.get(token, ord("?")), block_size=40)
    for _ in range(3):
        talk.take("0123456789", nothing)
    captured = capsys.readouterr()
    assert captured.out == "ok\nok\nok\n"
    assert captured.err == "note: the context is full: the 2 oldest turns are forgotten\n"
    assert len(seen[-1]) == 3
    talk.take("x" * 100, nothing)
    assert "the message takes 101 tokens" in capsys.readouterr().err
    talk.take("/history", nothing)
    assert "xxx" not in capsys.readouterr().out  # it is as if it had not been said


def test_a_conversation_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "talk.json"
    talk, _ = chat(lambda _, token: SAYS.get(token, ord("?")), system="s", save=file)
    talk.take("é", nothing)
    saved = json.loads(file.read_text())
    assert saved["model"] == "scripted"
    assert [(m["role"], m["content"]) for m in saved["messages"]] == [
        ("system", "s"), ("user", "é"), ("assistant", "ok"),
    ]  # fmt: skip
    assert saved["messages"][-1]["finish_reason"] == "end_of_text"
    talk.take("b", nothing)
    talk.take("/again", nothing)
    assert len(json.loads(file.read_text())["messages"]) == 5
    other = tmp_path / "other.json"
    other.write_text("precious")
    for line, says in [
        (f"/save {other}", "exists; give the name of a new file"),
        (f"/save {other}/below", "cannot write"),
        ("/save", "needs the name of a file"),
    ]:
        talk.take(line, nothing)
        assert says in capsys.readouterr().err
    assert other.read_text() == "precious"
    with pytest.raises(SystemExit):
        main(["model", "--save", str(other)])


def test_a_real_model_chats_from_a_pipe(
    piped: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    flags = ("--max-tokens", "6", "--temperature", "0", "--logprobs", "0")
    out, err = piped("hello\n/set logprobs none\n<|im_end|>\n/nonsense\n/seed\n/help\n", *flags)
    assert err.count("note: cut at max_tokens 6\n") == 2
    assert "unknown command '/nonsense'; /help lists them (a message may begin with //)" in err
    assert out.count("logprob") == 2  # the table's head, and the setting's name
    assert all(command in out for command in COMMANDS)
    assert "> " not in out.replace("/help", "")
    assert not (tmp_path / "state").exists()
    again, _ = piped("hello\n", *flags)
    assert out.startswith(again)


def test_models_without_a_template_say_what_to_do(
    folder: Path, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ChatTemplateError, match=r"no chat template.*--template FILE"):
        main([str(model_folder)])
    assert find_template(folder, None) == CHATML
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "chat_template.jinja").write_text("mine")
    assert find_template(tmp_path / "run", None) == "mine"
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    assert cli(["chat", str(folder), "--template", str(broken)]) == 1
    assert "antiphon chat: error: the chat template cannot be used" in capsys.readouterr().err
    with pytest.raises(UserError, match="no model at"):
        main([str(tmp_path / "none")])


def test_a_server_answers(
    folder: Path,
    model_folder: Path,
    piped: Callable[..., tuple[str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same words as the model here, from token ids alone."""
    from gpt.checkpoint import load_model

    loaded = load_model(folder)
    engine = Engine(loaded.model, loaded.tokenizer, name="parrot")
    lines = "hello\n<|im_end|> and more\n"
    flags = ("--max-tokens", "8", "--temperature", "0", "--logprobs", "1")
    here = piped(lines, *flags)
    with BackgroundServer(engine) as server:
        assert piped(lines, *flags, "--target", server.target) == here
        template = folder / "chat_template.jinja"
        with pytest.raises(UserError, match="serves parrot, whose tokenizer is not that of"):
            main([str(model_folder), "--template", str(template), "--target", server.target])
    with pytest.raises(SystemExit):
        main([str(folder), "--target", "nowhere"])
    assert "must be HOST:PORT" in capsys.readouterr().err


@contextlib.contextmanager
def at_a_terminal(model: Path, home: Path, *flags: str) -> Iterator[pexpect.spawn]:
    """The command on a terminal; it has asked for the first line."""
    env = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "xterm", "INPUTRC": os.devnull}
    # Not forked as other commands are: readline would miss many a Ctrl-C.
    words = ["-m", "gpt", "chat", str(model), "--threads", "1", *flags]
    child = pexpect.spawn(
        sys.executable, words,
        cwd=str(ROOT), env=env, encoding="utf-8", codec_errors="replace",
        timeout=100, dimensions=(50, 120), preexec_fn=hearing,
    )  # fmt: skip
    child.delaybeforesend = None
    try:
        child.expect(END)
        yield child
    finally:
        child.close(force=True)


def say(child: pexpect.spawn, line: str) -> str:
    child.sendline(line)
    child.expect_exact(END)
    shown = re.sub(r"\x1b\[\?2004[hl]\r?", "", child.before)
    return str(shown).replace("\r\n", "\n").removeprefix(line).lstrip("\r\n")


@pytest.mark.integration
def test_a_chat_at_a_terminal(folder: Path, tmp_path: Path) -> None:
    with at_a_terminal(folder, tmp_path, "--seed", "1", "--max-tokens", "4000") as child:
        assert "parrot: a context of 4096 tokens" in child.before
        child.sendline("To be")
        child.expect(".{20}")  # it streams
        child.sendintr()
        child.expect_exact("(stopped; /again answers once more)")
        child.expect_exact(END)
        assert say(child, "/set max_tokens 5").strip() == "max_tokens = 5"
        assert "(cut at max_tokens 5)" in say(child, "/again")
        assert "user:" in say(child, "/history")
        child.send("/hist\t\r")  # Tab completes
        child.expect_exact("assistant:")
        child.expect_exact(END)
        child.send("half a li")
        interrupt(child)
        child.expect_exact(END)
        child.sendeof()
        child.expect(pexpect.EOF)
        child.wait()
        assert child.exitstatus == 0
