"""Prompts from a file: read in pieces, checked a line at a time."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt import prompts
from gpt.params import SamplingParams
from gpt.prompts import Format, LineReader, Nothing, Prompt, PromptReader, parse


def read(content: bytes, kind: Format = "jsonl") -> list[Prompt]:
    reader, writer = os.pipe()
    thread = threading.Thread(target=_write, args=(writer, content))
    thread.start()
    try:
        source = PromptReader(LineReader(reader), kind, SamplingParams(seed=1))
        found = []
        while isinstance(prompt := source.next(wait=True), Prompt):
            found.append(prompt)
        return found
    finally:
        thread.join()
        os.close(reader)


def _write(writer: int, content: bytes) -> None:
    with open(writer, "wb") as file:
        file.write(content)


def error_of(line: str) -> str:
    (found,) = read(line.encode("utf-8", "surrogatepass"))
    assert found.error is not None
    return found.error


def test_texts_and_ids_with_settings_and_keys_of_their_own() -> None:
    found = read(
        b'\xef\xbb\xbf{"prompt": "\xe6\x96\x87", "id": 7, "temperature": 1, "stop": "x"}\r\n'
        b" \n\n"
        b'{"token_ids": [], "seed": null, "tags": {"a": [null]}}'
    )
    assert found == [
        Prompt(0, 1, "文", {"temperature": 1.0, "stop": ("x",)}, {"id": 7}),
        Prompt(1, 4, [], {}, {"tags": {"a": [None]}}),
    ]


def test_a_text_file_has_a_prompt_on_each_line_as_it_stands() -> None:
    assert [p.prompt for p in read(b'  a \r\n{"prompt": 1}\n\nlast', "txt")] == [
        "  a ", '{"prompt": 1}', "last",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "not JSON .*--input-format txt"),
        ('{"prompt": "a", "x": NaN}', "NaN is no number"),
        ('{"prompt": "a", "id": 1e999}', "number that is too large, 1e999"),
        ('{"prompt": "a", "x": {"y": [-1E999]}}', "number that is too large, -1E999"),
        ('{"prompt": "a", "temperature": 1e999}', "number that is too large, 1e999"),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "a number of 5,000 digits, 9{40}…"),
        ('{"prompt": "a", "seed": ' + "9" * 4000 + "}", "^seed: 9{40}… is not in 0 to"),
        ("[" * 100_000, "not JSON"),
        ('["a"]', "no object"),
        ("{}", "neither"),
        ('{"prompt": "a", "token_ids": [1]}', "both"),
        ('{"prompt": 3}', "not a text"),
        ('{"prompt": "a", "stop": ["b", ""]}', r"^stop\[1\]: 0 characters"),
        ('{"prompt": "a", "stop": "\\ud800"}', r"^stop\[0\]: has U\+D800"),
        ('{"token_ids": [1, true]}', "not a list of whole numbers"),
        ('{"token_ids": "1"}', "not a list of whole numbers"),
        ('{"prompt": "a", "temprature": 1}', 'did you mean "temperature"'),
        ('{"prompt": "a", "top-p": 1}', 'did you mean "top_p"'),
        ('{"prompt": "a", "max_new_tokens": 1}', 'did you mean "max_tokens"'),
        ('{"promt": "a"}', 'did you mean "prompt"'),
        ('{"prompt": "a", "num_samples": 2}', "--num-samples"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature: .* is not a number from 0 up"),
        ('{"prompt": "a", "top_p": 0}', "top_p"),
        ('{"prompt": "a", "min_p": 7, "seed": -1}', "min_p.*seed"),
        ('{"prompt": "a", "usage": 2}', '"usage" is one of the result\'s own'),
        ('{"text": "a"}', 'no "prompt"'),
    ],
)
def test_a_line_that_cannot_be_used_says_why(line: str, message: str) -> None:
    assert re.search(message, error_of(line))


@pytest.mark.parametrize("key", ["id", "text_id", "tokens", "topic", "note", "step", "need"])
def test_keys_that_mean_nothing_here_pass(key: str) -> None:
    (found,) = read(json.dumps({"prompt": "a", key: 1}).encode())
    assert found.error is None
    assert found.extra == {key: 1}


def test_a_bad_line_keeps_its_id_and_stops_nobody() -> None:
    found = read(b'{"id": 5}\n\xff\n{"prompt": "good"}\n')
    assert [p.error is None for p in found] == [False, False, True]
    assert found[0].extra == {"id": 5}
    assert "byte 1 of the line is not UTF-8" in str(found[1].error)
    assert [(p.index, p.line) for p in found] == [(0, 1), (1, 2), (2, 3)]


def test_a_line_without_end_is_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_LINE", 100)
    found = read(b'{"prompt": "' + b"x" * 300_000 + b'"}\n{"prompt": "y"}\n')
    assert "longer than" in str(found[0].error)
    assert found[1] == Prompt(1, 2, "y")


def test_nobody_waits_for_a_line_that_is_not_whole() -> None:
    reader, writer = os.pipe()
    lines = LineReader(reader)
    assert lines.next(wait=False) is Nothing.YET
    os.write(writer, b"half")
    assert lines.next(wait=False) is Nothing.YET
    os.write(writer, b" and half\nrest")
    assert lines.next(wait=False) == b"half and half"
    assert lines.next(wait=False) is Nothing.YET
    os.close(writer)
    assert lines.next(wait=False) == b"rest"
    assert lines.next(wait=False) is Nothing.MORE
    assert lines.next(wait=True) is Nothing.MORE
    os.close(reader)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=5)), st.integers(1, 7))
def test_lines_are_those_of_split_wherever_reads_are_cut(pieces: list[bytes], size: int) -> None:
    content = b"\n".join(pieces)
    before, prompts.READ = prompts.READ, size
    reader, writer = os.pipe()
    try:
        os.write(writer, content)
        os.close(writer)
        lines, found = LineReader(reader), []
        while isinstance(line := lines.next(wait=True), bytes):
            found.append(line)
    finally:
        prompts.READ = before
        os.close(reader)
    wanted = content.split(b"\n")
    if not wanted[-1]:
        wanted.pop()
    assert found == [line.removesuffix(b"\r") for line in wanted]


def test_what_is_done_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"a\n\nb\nc\n")
    with open(path, "rb", buffering=0) as file:
        source = PromptReader(LineReader(file.fileno()), "txt", SamplingParams(seed=1))
        source.skip(2)
        assert source.next(wait=True) == Prompt(2, 4, "c")


def test_duplicate_and_large_numbers_are_json_like_any_other() -> None:
    assert parse('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(prompts.LineError):
        parse('{"a": ' + "9" * 5000 + "}")
