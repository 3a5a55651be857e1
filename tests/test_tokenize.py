"""antiphon tokenize: pieces, ids, counts, JSON and back, on pipes and on a terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest

from gpt.errors import DataError, InexpressibleTextError, TokenizerError, UserError
from gpt.tokenize import build_parser, main
from gpt.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small bpe that has special tokens."""
    folder = tmp_path_factory.mktemp("chat")
    made = Tokenizer.bpe(["the cat the cat the hat " * 20], 270, special_tokens=["<|user|>"])
    made.save(folder / "tokenizer.json")
    return str(folder)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    assert main([*argv]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def given(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """`data` on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_pieces_and_counts_are_shown(chat: str, capsys: Any) -> None:
    out, err = run(capsys, "the cat, the 文\n", "--tokenizer", chat)
    assert out.splitlines() == [
        "the│·cat│,│·the│·│\\xe6│\\x96│\\x87│⏎",
        "9 tokens, 15 characters, 17 bytes, 1.89 bytes per token (bpe, 266 ids)",
    ]
    assert err == ""
    assert run(capsys, "", "--tokenizer", "bytes")[0].startswith("0 tokens, 0 characters, 0 bytes")
    assert "1 token, 1 character, 1 byte, 1.00" in run(capsys, "a", "-t", "bytes")[0]


def test_ids_are_printed_alone_and_decoded_again(
    chat: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the cat\n文 🙂 the hat"
    out, err = run(capsys, text, "-t", chat, "--ids")
    tokenizer = Tokenizer.load(Path(chat) / "tokenizer.json")
    ids = tokenizer.encode(text)
    assert out == " ".join(map(str, ids)) + "\n"
    assert err.startswith(f"{len(ids)} tokens, ")
    assert run(capsys, "-t", chat, "--decode", *out.split())[0] == text
    given(monkeypatch, json.dumps(ids).encode())
    assert run(capsys, "-t", chat, "--decode", "-")[0] == text
    found = json.loads(run(capsys, "-t", chat, "--json", "--decode", *out.split())[0])
    assert found == {"text": text, "tokens": len(ids)}


def test_json_has_bytes_and_ids_exactly(chat: str, capsys: Any) -> None:
    found = json.loads(run(capsys, "é the", "-t", chat, "--json")[0])
    assert b"".join(bytes(piece["bytes"]) for piece in found["pieces"]).decode() == "é the"
    assert [piece["text"] for piece in found["pieces"]] == ["\ufffd", "\ufffd", " the"]
    assert (found["tokens"], found["characters"], found["bytes"]) == (3, 5, 6)
    assert found["bytes_per_token"] == 2
    assert found["tokenizer"]["kind"] == "bpe"


def test_special_tokens_are_taken_on_request(chat: str, capsys: Any) -> None:
    text = "<|user|>the<|endoftext|>"
    plain = json.loads(run(capsys, text, "-t", chat, "--json")[0])
    assert not any("special" in piece for piece in plain["pieces"])
    found = json.loads(run(capsys, text, "-t", chat, "--json", "--special")[0])
    assert [piece["text"] for piece in found["pieces"]] == ["<|user|>", "the", "<|endoftext|>"]
    assert [piece.get("special", False) for piece in found["pieces"]] == [True, False, True]
    ids = [str(piece["token_id"]) for piece in found["pieces"]]
    assert run(capsys, "-t", chat, "--decode", *ids)[0] == "<|user|>the"
    assert run(capsys, "-t", chat, "--special", "--decode", *ids)[0] == text


def test_a_limit_cuts_what_is_shown_and_not_what_is_counted(chat: str, capsys: Any) -> None:
    text = "the cat" * 2000
    out, _ = run(capsys, text, "-t", "bytes")
    assert out.count("│") == 999
    assert "… 13,000 more tokens" in out
    assert "14,000 tokens, 14,000 characters" in out
    assert run(capsys, text, "-t", "bytes", "--limit", "0")[0].count("│") == 13_999
    out, err = run(capsys, text, "-t", "bytes", "--limit", "2", "--ids")
    assert out == "116 104\n"
    assert "14,000 tokens" in err
    found = json.loads(run(capsys, text, "-t", "bytes", "--limit", "1", "--json")[0])
    assert (len(found["pieces"]), found["not_shown"], found["tokens"]) == (1, 13_999, 14_000)


def test_text_comes_from_a_file_or_a_pipe(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("a文".encode())
    expected = run(capsys, "a文", "-t", "bytes", "--ids")
    assert run(capsys, "--file", str(file), "-t", "bytes", "--ids") == expected
    for argv in (["-"], ["--file", "-"], []):
        given(monkeypatch, "a文".encode())
        assert run(capsys, *argv, "-t", "bytes", "--ids") == expected


@pytest.mark.parametrize(
    ("argv", "kind", "says"),
    [
        (["a", "-t", "gpt-2"], TokenizerError, "did you mean gpt2"),
        (["a文", "-t", "{chars}"], InexpressibleTextError, "'文' .* offset 1"),
        (["--file", "{here}/none.txt", "-t", "bytes"], DataError, "cannot read .*No such file"),
        (["--file", "{here}", "-t", "bytes"], DataError, "cannot read .*directory"),
        (["--file", "{here}/bad.txt", "-t", "bytes"], DataError, "not UTF-8.*offset 2"),
        (["-t", "bytes", "--decode", "65", "257"], TokenizerError, r"257 is outside .*0 to 256"),
        (["-t", "bytes", "--decode", "x"], TokenizerError, "'x' is no token id"),
        (["-t", "bytes", "--decode", "9" * 5000], TokenizerError, "no token id"),
    ],
)
def test_mistakes_take_one_line(
    argv: list[str], kind: type[UserError], says: str, tmp_path: Path
) -> None:
    Tokenizer.chars("ab").save(tmp_path / "chars" / "tokenizer.json")
    (tmp_path / "bad.txt").write_bytes(b"ok\xff")
    argv = [word.format(here=tmp_path, chars=tmp_path / "chars") for word in argv]
    with pytest.raises(kind, match=says) as caught:
        main(argv)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["a"], "--tokenizer"),
        (["a", "-t", "bytes", "--file", "b"], "TEXT and --file exclude each other"),
        (["a", "-t", "bytes", "--decode", "1"], "TEXT and --decode exclude each other"),
        (["-t", "bytes", "--ids", "--decode", "1"], "leave --ids"),
        (["a", "-t", "bytes", "--ids", "--json"], "not allowed with"),
        (["a", "-t", "bytes", "--limit", "-1"], "0 (all) or more"),
        (["a", "-t", "bytes", "--limmit", "3"], "did you mean --limit"),
    ],
)
def test_flags_that_do_not_fit_are_refused(argv: list[str], says: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_help_ends_with_examples() -> None:
    assert "\nexamples:\n  antiphon tokenize" in build_parser("antiphon tokenize").format_help()


def on_terminal(*argv: str, **env: str) -> str:
    code = "import sys; from gpt.tokenize import main; sys.exit(main(sys.argv[1:]))"
    child = pexpect.spawn(
        sys.executable, ["-c", code, *argv], cwd=str(ROOT), timeout=60, encoding="utf-8",
        env={**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0, child.before
    return str(child.before)


@pytest.mark.integration
def test_a_terminal_has_colours_unless_it_wants_none() -> None:
    shown = on_terminal("a b", "-t", "bytes", NO_COLOR="")
    assert "\x1b[0m" in shown
    assert "│" not in shown
    plain = on_terminal("a b", "-t", "bytes", NO_COLOR="1")
    assert "\x1b" not in plain
    assert "a│·│b" in plain


def test_tokenizing_loads_no_torch() -> None:
    code = (
        "import sys; from gpt.tokenize import main; main(['hi', '-t', 'bytes'])\n"
        "assert not {'torch', 'grpc', 'lightning', 'pyarrow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_file_that_is_no_text_gets_no_advice_to_use_a_flag_there_is_not(tmp_path: Path) -> None:
    for data in (b"a\xff", b"a\0"):
        (tmp_path / "bin.txt").write_bytes(data)
        with pytest.raises(DataError) as caught:
            main(["-t", "bytes", "-f", str(tmp_path / "bin.txt")])
        assert "--on-error" not in str(caught.value)


def test_a_tokenizer_without_a_name_is_unknown() -> None:
    with pytest.raises(TokenizerError, match="the tokenizer '' is neither a name nor a path"):
        main(["-t", "", "a"])


def test_a_wrong_id_comes_before_any_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TokenizerError, match="999 is outside"):
        main(["-t", "bytes", "--decode", "72", "999"])
    assert capsys.readouterr().out == ""
