"""Tokenizing in several processes: the same bytes as in one, and no hang when one dies."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpt.data import passes, tokenizing
from gpt.data.formats import Piece
from gpt.data.prepare import prepare
from gpt.data.split import Part
from gpt.data.tokenizing import batches, cut, encode, encode_all
from gpt.errors import DataError, TokenizerError
from gpt.tokenizer import Tokenizer

WORDS = ["the", " king", " 文", "\n", "🙂", " 1790", "<|x|>", "  ", "é", "\r\n"]


def some_text(seed: int, words: int) -> str:
    return "".join(random.Random(seed).choices(WORDS, k=words))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and texts so small that a test has many of them."""
    monkeypatch.setattr(tokenizing, "BATCH_CHARS", 2000)
    monkeypatch.setattr(tokenizing, "BATCH_TEXTS", 7)
    monkeypatch.setattr(passes, "WORKER_BYTES", 1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tokenizer", ["bpe", "chars"])
def test_the_result_is_the_same_for_any_number_of_workers(
    tmp_path: Path, small: None, tokenizer: str
) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(40):
        (tmp_path / "texts" / f"{i:02d}.txt").write_text(some_text(i, i * 40), newline="")
    (tmp_path / "long.txt").write_text(some_text(99, 30_000), newline="")
    found = [
        prepare(
            [tmp_path / "texts", tmp_path / "long.txt"],
            tokenizer=tokenizer,
            vocab_size=300,
            special_tokens=["<|x|>"],
            root=tmp_path / str(workers),
            workers=workers,
            progress=False,
        )
        for workers in (1, 2, 3)
    ]
    assert contents(found[0].folder) == contents(found[1].folder) == contents(found[2].folder)
    assert found[0].meta["splits"]["train"]["tokens"] == len(found[0].train) > 10_000


def test_one_worker_is_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "WORKER_BYTES", 1)
    monkeypatch.setattr(tokenizing.subprocess, "Popen", None)
    (tmp_path / "t.txt").write_text(some_text(1, 1000))
    prepare(tmp_path / "t.txt", tokenizer="bytes", root=tmp_path, workers=1, progress=False)


# Cutting


@settings(deadline=None)
@given(
    words=st.lists(st.sampled_from([*WORDS, "<|", "x", "|>"]), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 60), max_size=5),
    names=st.sampled_from([(), ("<|x|>",)]),
)
def test_parts_give_together_what_the_document_gives(
    words: list[str], cuts: list[int], names: tuple[str, ...]
) -> None:
    text = "".join(words)
    tokenizer = Tokenizer.bpe([some_text(0, 500)], 300, special_tokens=["<|x|>"])
    # Longer pieces are cut, in the document as in its parts: see `Splitter.segments`.
    assume(all(len(piece) < 8 for piece in tokenizer.splitter.pieces(text)))
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    parts = [
        Part(text[a:b], b == len(text), False, Piece(text[a:b], b == len(text), "t"), a)
        for a, b in itertools.pairwise(edges)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "MAX_PIECE", 4)
        patch.setattr("gpt.splitting.MAX_PIECE", 4)
        patch.setattr("gpt.splitting.SEGMENT", 16)
        found = list(cut([*parts, *parts], tokenizer.splitter, names))
    texts = [part.text for part in found]
    assert "".join(texts) == text * 2
    assert [part.end for part in found].count(True) == 2
    at = 0
    for part in found:
        assert part.offset == at
        at = 0 if part.end else at + len(part.text)
    ends = [part.end for part in found]
    afters = [part.after for part in found]
    runs = [1, len(texts) - 1]
    ids = encode(tokenizer, names, texts, ends, runs, afters).ids.tolist()
    assert ids == [*tokenizer.encode(text, special=names), tokenizer.eot] * 2


# What can go wrong


def work(count: int, size: int = 3000) -> Iterator[tuple[tuple[int, bool], Part]]:
    for i in range(count):
        text = some_text(i, size)
        yield (0, False), Part(text, True, False, Piece(text, True, "t.jsonl", i + 1), 0)


def children() -> list[int]:
    found = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children")
    return [int(pid) for pid in found.read_text().split()]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds child processes in /proc")
def test_a_worker_that_is_killed_is_an_error_and_leaves_no_process(
    tmp_path: Path, small: None
) -> None:
    tokenizer = Tokenizer.bytes()
    tokenizer.save(tmp_path / "t.json")
    before = children()
    encoded = encode_all(batches(work(1000)), tokenizer, tmp_path / "t.json", (), 2)
    next(encoded)
    team = set(children()) - set(before)
    assert len(team) == 2
    os.kill(min(team), signal.SIGKILL)
    with pytest.raises(DataError, match=r"tokenizing process ended by SIGKILL.*fewer workers"):
        list(encoded)
    assert children() == before


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds child processes in /proc")
def test_workers_end_when_the_caller_stops(tmp_path: Path, small: None) -> None:
    tokenizer = Tokenizer.bytes()
    tokenizer.save(tmp_path / "t.json")
    before = children()
    encoded = encode_all(batches(work(1000)), tokenizer, tmp_path / "t.json", (), 2)
    next(encoded)
    encoded.close()
    assert children() == before


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds child processes in /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("some text of the corpus, " * 1_000_000)
    code = (
        "import sys; from gpt.data.prepare import prepare; "
        "prepare(sys.argv[1], root=sys.argv[2], tokenizer='bytes', workers=2)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "t.txt"), str(tmp_path / "data")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        task = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(task.read_text().split()) < 2:
            time.sleep(0.01)
        process.kill()
        assert process.stderr is not None
        process.stderr.read()  # to its end, which comes when no worker holds it open any more


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_vocabulary_lacks_is_named_with_its_place(
    tmp_path: Path, small: None, workers: int
) -> None:
    rows = [f'{{"text": "{"abc" * 300}"}}\n' for _ in range(50)]
    rows[30] = f'{{"text": "{"abc" * 300}d"}}\n'
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    with pytest.raises(
        TokenizerError, match=r"rows.jsonl, row 31: character 'd' \(U\+0064\) at offset 900 "
    ):
        prepare(
            tmp_path / "rows.jsonl", tokenizer=Tokenizer.chars("abc"),
            root=tmp_path / "data", workers=workers, progress=False,
        )  # fmt: skip
    assert list((tmp_path / "data").iterdir()) == []


def test_a_fault_of_ours_in_a_worker_keeps_its_traceback(tmp_path: Path, small: None) -> None:
    tokenizer = Tokenizer.bytes()
    tokenizer.save(tmp_path / "t.json")
    broken = next(batches(work(1)))
    broken.texts[0] = None  # type: ignore[call-overload]
    with pytest.raises(RuntimeError, match="a tokenizing process failed:\nTraceback"):
        list(encode_all(iter([broken]), tokenizer, tmp_path / "t.json", (), 2))


def test_no_more_is_read_ahead_than_stated(tmp_path: Path, small: None) -> None:
    tokenizer = Tokenizer.bytes()
    tokenizer.save(tmp_path / "t.json")
    read = 0

    def counted() -> Iterator[tokenizing.Batch]:
        nonlocal read
        for batch in batches(work(60)):
            read += 1
            yield batch

    for done, _ in enumerate(encode_all(counted(), tokenizer, tmp_path / "t.json", (), 2)):
        time.sleep(0.001)
        assert read - done <= 2 * tokenizing.AHEAD
