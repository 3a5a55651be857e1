"""prepare(): the split, the stream, and a folder that is there whole or not at all (T12)."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpt.data import passes
from gpt.data.decoding import Reading
from gpt.data.prepare import prepare
from gpt.data.shards import PreparedData, ShardWriter, TokenArray
from gpt.data.sources import Source, find_corpora
from gpt.data.split import Counts, Split
from gpt.data.tokenizing import batches, cut
from gpt.errors import ConfigError, DataError, TokenizerError
from gpt.splitting import GPT4_PATTERN, Splitter
from gpt.tokenizer import Tokenizer

ENGLISH = "It was the year 1790. The king's men said: we shall not go!\n\n" * 30
CHINESE = "豫章故郡，洪都新府。星分翼轸，地接衡庐。襟三江而带五湖，控蛮荆而引瓯越。\n" * 30


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(ENGLISH)
    return path


def documents(tokenizer: Tokenizer, tokens: TokenArray) -> list[str]:
    """The texts of a split; each has to end in end-of-text."""
    ids = tokens[:]
    ends = np.flatnonzero(ids == tokenizer.eot)
    assert ends[-1] == len(ids) - 1
    parts = np.split(ids, ends + 1)[:-1]
    return [tokenizer.decode_bytes(part[:-1].tolist()).decode() for part in parts]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes", "chars"])
@pytest.mark.parametrize("corpus", [ENGLISH, CHINESE, "🙂é\u0301 \r\n" * 100])
def test_text_of_any_script_comes_back(tmp_path: Path, tokenizer: str, corpus: str) -> None:
    (tmp_path / "text.md").write_bytes(corpus.encode("utf-8-sig"))
    data = prepare(
        tmp_path / "text.md", tokenizer=tokenizer, vocab_size=300, root=tmp_path, progress=False
    )
    cut = int(len(corpus) * 0.9)
    assert documents(data.tokenizer, data.train) == [corpus[:cut]]
    assert documents(data.tokenizer, data.val) == [corpus[cut:]]
    assert data.tokenizer.kind == tokenizer
    assert data.train_bytes == len(corpus[:cut].encode())
    assert (data.val_bytes, data.val_chars) == (len(corpus[cut:].encode()), len(corpus) - cut)
    assert data.meta["splits"]["train"]["tokens"] == len(data.train)
    prompt = corpus[5:25]
    assert data.tokenizer.decode(data.tokenizer.encode(prompt)) == prompt


def test_a_single_document_splits_like_tiny_shakespeare(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("x" * 1_115_394)
    data = prepare(tmp_path / "t.txt", tokenizer="chars", root=tmp_path, progress=False)
    assert (data.meta["splits"]["train"]["chars"], data.val_chars) == (1_003_854, 111_540)


def write_documents(folder: Path, count: int) -> list[str]:
    folder.mkdir()
    texts = [f"document {i} " * (i + 1) for i in range(count)]
    for i, one in enumerate(texts):
        (folder / f"{i:03d}.txt").write_text(one)
    return texts


def test_a_few_documents_are_each_cut(tmp_path: Path) -> None:
    texts = write_documents(tmp_path / "docs", 19)
    data = prepare(
        tmp_path / "docs", tokenizer="bytes", root=tmp_path, val_fraction=0.25, progress=False
    )
    cuts = [int(len(one) * 0.75) for one in texts]
    assert documents(data.tokenizer, data.train) == [
        t[:c] for t, c in zip(texts, cuts, strict=True)
    ]
    assert documents(data.tokenizer, data.val) == [t[c:] for t, c in zip(texts, cuts, strict=True)]


@pytest.mark.parametrize(
    ("count", "fraction", "held_out"),
    [(20, 0.1, [5, 15]), (38, 0.1, [4, 14, 23, 33]), (30, 0.2, [2, 7, 12, 17, 22, 27]),
     (20, 0.001, [10]), (20, 0.999, [i for i in range(20) if i != 10])],
)  # fmt: skip
def test_of_many_documents_whole_ones_are_held_out(
    tmp_path: Path, count: int, fraction: float, held_out: list[int]
) -> None:
    texts = write_documents(tmp_path / "docs", count)
    data = prepare(
        tmp_path / "docs", tokenizer="bytes", root=tmp_path, val_fraction=fraction, progress=False
    )
    train = documents(data.tokenizer, data.train)
    val = documents(data.tokenizer, data.val)
    assert sorted(train + val) == sorted(texts)
    assert train == [one for one in texts if one not in val]
    if fraction < 0.9:
        assert [texts.index(one) for one in val] == held_out
    else:
        assert len(val) == count - 1


def test_the_bpe_has_never_seen_the_validation_text(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abababab " * 90 + "xyxyxyxy " * 10)
    data = prepare(tmp_path / "t.txt", vocab_size=400, root=tmp_path, progress=False)
    assert data.tokenizer.n_vocab < 400
    assert len(data.tokenizer.encode("abababab")) == 1
    assert len(data.tokenizer.encode("xyxyxyxy")) == 8


def test_chars_knows_the_characters_of_both_splits(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("a" * 95 + "b" * 4 + "文")
    data = prepare(tmp_path / "t.txt", tokenizer="chars", root=tmp_path, progress=False)
    assert data.tokenizer.n_vocab == 4
    assert data.val[:].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 3]


def test_ids_do_not_depend_on_how_the_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of 2 MB without a blank in it, read in blocks that cut through characters."""
    line = "".join(f"{i}文，" for i in range(180_000))
    (tmp_path / "t.txt").write_text(line)
    tokenizer = Tokenizer.bpe([line[:10_000]], 300)
    data = prepare(tmp_path / "t.txt", tokenizer=tokenizer, root=tmp_path / "a", progress=False)
    monkeypatch.setattr("gpt.data.decoding._BLOCK", 100_003)
    again = prepare(tmp_path / "t.txt", tokenizer=tokenizer, root=tmp_path / "b", progress=False)
    assert contents(data.folder) == contents(again.folder)
    cut = int(len(line) * 0.9)
    assert data.train[:-1].tolist() == tokenizer.encode(line[:cut])
    assert data.train[:-1].tolist() == tokenizer.encoding.encode_ordinary(line[:cut])


def test_a_ready_tokenizer_is_used_and_saved(text: Path, tmp_path: Path) -> None:
    mine = Tokenizer.bpe([ENGLISH], 270)
    data = prepare(text, tokenizer=mine, root=tmp_path, progress=False)
    assert data.tokenizer.fingerprint == mine.fingerprint
    assert data.train[:-1].tolist() == mine.encode(ENGLISH[: int(len(ENGLISH) * 0.9)])


def test_text_that_the_tokenizer_cannot_express_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abc" * 60 + "d" + "abc" * 3)
    with pytest.raises(TokenizerError, match=r"t.txt: character 'd' \(U\+0064\) at offset 180 "):
        prepare(tmp_path / "t.txt", tokenizer=Tokenizer.chars("abc"), root=tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]


# The folder


def test_a_second_run_does_nothing(text: Path, tmp_path: Path) -> None:
    first = prepare(text, root=tmp_path / "data", vocab_size=300, progress=False)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    again = prepare(str(text), root=tmp_path / "data", vocab_size=300, progress=False)
    assert again.folder == first.folder
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == stamps
    assert [path.name for path in (tmp_path / "data").iterdir()] == [first.folder.name]


def test_other_settings_or_text_make_another_folder(text: Path, tmp_path: Path) -> None:
    def name(**settings: object) -> str:
        return prepare(text, root=tmp_path, progress=False, **settings).folder.name  # type: ignore[arg-type]

    names = [
        name(vocab_size=300),
        name(vocab_size=301),
        name(tokenizer="bytes"),
        name(tokenizer="chars"),
        name(tokenizer=Tokenizer.bpe([ENGLISH], 270)),
        name(vocab_size=300, val_fraction=0.2),
        name(vocab_size=300, pattern="gpt2"),
        name(vocab_size=300, special_tokens=["<|x|>"]),
        name(tokenizer="bytes", special_tokens=["<|x|>"]),
        name(vocab_size=300, newlines="lf"),
        name(vocab_size=300, on_error="skip"),
    ]
    os.utime(text, ns=(1, 1))
    names.append(name(vocab_size=300))
    assert len(set(names)) == len(names)
    assert all(one.startswith("text-") and len(one) == 17 for one in names)
    assert name(tokenizer="chars", vocab_size=300) == name(tokenizer="chars", vocab_size=9)
    assert name(tokenizer="bytes") == name(tokenizer=Tokenizer.bytes())
    assert name(tokenizer="bytes", workers=3) == name(tokenizer="bytes", shard_tokens=5)
    assert name(vocab_size=300, pattern="gpt4") == name(vocab_size=300)


def test_the_same_text_gives_the_same_bytes(text: Path, tmp_path: Path) -> None:
    one = prepare(text, root=tmp_path / "a", vocab_size=300, progress=False)
    two = prepare(text, root=tmp_path / "b", vocab_size=300, progress=False)
    assert contents(one.folder) == contents(two.folder)


PREPARE = """
import sys
from gpt.data import prepare as module
from gpt.data.shards import ShardWriter
if sys.argv[3] == "hang":
    append = ShardWriter.append
    def slow(self, ids):
        append(self, ids)
        if self.tokens > 50:
            print("half way", flush=True)
            sys.stdin.read()
    ShardWriter.append = slow
data = module.prepare(sys.argv[1], root=sys.argv[2], tokenizer="bytes", progress=False)
print(data.folder, len(data.train))
"""


def start(text: Path, root: Path, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE, str(text), str(root), mode]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_run_that_was_killed_can_be_repeated(text: Path, tmp_path: Path) -> None:  # T12
    root = tmp_path / "data"
    with start(text, root, "hang") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half way\n"
        process.send_signal(signal.SIGKILL)
    left = sorted(path.name for path in root.iterdir())
    assert left
    assert all(name.startswith(".") for name in left), "nothing that looks finished may be left"
    data = prepare(text, root=root, tokenizer="bytes", progress=False)
    assert [path.name for path in root.iterdir()] == [data.folder.name]
    whole = prepare(text, root=tmp_path / "other", tokenizer="bytes", progress=False)
    assert contents(data.folder) == contents(whole.folder)


def test_two_processes_at_once_both_end_well(text: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    with start(text, root, "hang") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "half way\n"
        with start(text, root, "straight") as second, start(text, root, "straight") as third:
            time.sleep(0.05)
            first.communicate("")  # lets the first one go on
            answers = [process.communicate()[0] for process in (second, third)]
    assert [first.returncode, second.returncode, third.returncode] == [0, 0, 0]
    assert answers[0] == answers[1] != ""
    assert len(list(root.iterdir())) == 1


def test_a_run_that_fails_leaves_nothing(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "append", full)
    with pytest.raises(DataError, match=r"cannot write prepared data .*No space left.*free some"):
        prepare(text, root=tmp_path / "data", progress=False)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_disk_that_is_full_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abc " * 20_000)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + PREPARE, str(tmp_path / "t.txt"), str(tmp_path / "d"), "no"],
        capture_output=True,
        text=True,
    )
    assert "DataError: cannot write prepared data to" in done.stderr
    assert "File too large; free some space" in done.stderr
    assert "Exception ignored" not in done.stderr
    assert list((tmp_path / "d").iterdir()) == []


def test_ctrl_c_ends_it_at_once_with_its_workers_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("some text of the corpus, " * 2_000_000)
    code = (
        "import sys; from gpt.data.prepare import prepare; "
        "prepare(sys.argv[1], root=sys.argv[2], tokenizer='bytes', workers=2)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "t.txt"), str(tmp_path / "data")],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        while "tokenizing" not in process.stderr.readline():
            pass
        shard = tmp_path / "data"
        while not any(path.stat().st_size for path in shard.glob(".*/*.bin")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()  # to its end: no worker holds it open any more
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in rest
    assert list((tmp_path / "data").iterdir()) == []


def test_a_root_that_cannot_be_written_is_a_data_error(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write prepared data"):
        prepare(text, root=tmp_path / "file" / "data", progress=False)


def test_text_that_changes_meanwhile_is_an_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = passes.Job._write

    def meddle(self: passes.Job, *args: object) -> object:
        os.utime(text, ns=(1, 1))
        return write(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(passes.Job, "_write", meddle)
    with pytest.raises(DataError, match="changed while it was being read"):
        prepare(text, root=tmp_path / "data", progress=False)
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), r"cannot read .*007.txt: No such file"),
        (lambda path: path.write_text("x"), r"docs changed while it was being read"),
        (lambda path: path.write_text("x" * 500), r"docs changed while it was being read"),
        (lambda path: path.write_text(""), r"became shorter while it was being read"),
        (lambda path: (path.parent / "999.txt").write_text("y"), r"docs changed while"),
    ],
)
def test_a_file_that_vanishes_or_changes_half_way_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], message: str
) -> None:
    write_documents(tmp_path / "docs", 30)
    make = passes.Job._make_tokenizer

    def meddle(self: passes.Job, alphabet: set[str]) -> Tokenizer:
        change(tmp_path / "docs" / "007.txt")
        return make(self, alphabet)

    monkeypatch.setattr(passes.Job, "_make_tokenizer", meddle)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "docs", tokenizer="bytes", root=tmp_path / "data", progress=False)
    assert list((tmp_path / "data").iterdir()) == []


# Several sources


def test_each_source_is_split_by_itself_and_lies_in_a_span(tmp_path: Path) -> None:
    texts = write_documents(tmp_path / "docs", 30)
    (tmp_path / "one.txt").write_text("only one " * 50)
    (tmp_path / "rows.jsonl").write_text('{"body": "row"}\n' * 20)
    sources = [
        tmp_path / "docs",
        Source(str(tmp_path / "one.txt"), weight=3),
        Source(str(tmp_path / "rows.jsonl"), field="body"),
    ]
    data = prepare(sources, tokenizer="bytes", root=tmp_path / "data", progress=False)
    assert [(span.name, span.weight) for span in data.sources] == [
        (f"{tmp_path}/docs", 1), (f"{tmp_path}/one.txt", 3), (f"{tmp_path}/rows.jsonl", 1),
    ]  # fmt: skip
    found = {}
    for split in ("train", "val"):
        tokens = getattr(data, split)
        found[split] = [
            documents(data.tokenizer, tokens[slice(*getattr(span, split))]) for span in data.sources
        ]
        assert getattr(data.sources[-1], split)[1] == len(tokens)
    assert found["train"][1:] == [["only one " * 45], ["row"] * 18]
    assert found["val"] == [[texts[i] for i in (5, 15, 25)], ["only one " * 5], ["row"] * 2]
    assert sorted(found["train"][0] + found["val"][0]) == sorted(texts)
    assert [entry["val"]["documents"] for entry in data.meta["spans"]] == [3, 1, 2]
    assert [span.weight for span in PreparedData.open(data.folder).sources] == [1, 1, 1]


def test_rows_are_documents_and_the_split_of_millions_is_arithmetic() -> None:
    for n in (20, 21, 77, 1000):
        for fraction in (0.001, 0.1, 0.37, 0.5, 0.93):
            split = Split(Counts(documents=n), fraction)
            held_out = min(max(round(n * fraction), 1), n - 1)
            chosen = {(2 * i + 1) * n // (2 * held_out) for i in range(held_out)}
            assert {i for i in range(n) if split.holds_out(i)} == chosen
    assert Split(Counts(documents=10**9), 0.1).holds_out(999_999_995)


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_no_pass_holds_more_than_a_part_of_the_text(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"t.{kind}"
    if kind == "txt":
        path.write_text("one word after another " * 1_000_000)
    else:
        path.write_text(('{"text": "' + "one word after another " * 200 + '"}\n') * 4_000)
    [corpus] = find_corpora(path)
    splitter = Splitter(GPT4_PATTERN)
    tracemalloc.start()
    try:
        split = Split(Counts.of(corpus.pieces(Reading())), 0.1)
        parts = cut(split.parts(corpus.pieces(Reading())), splitter, ())
        chars = sum(batch.chars for batch in batches(((0, part.val), part) for part in parts))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert chars == split.counts.chars > 18_000_000
    assert peak < 12_000_000


def test_thousands_of_small_files_make_a_small_meta(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for i in range(3000):
        (tmp_path / "docs" / f"{i}.txt").write_text(f"file {i}\n")
    data = prepare(tmp_path / "docs", tokenizer="bytes", root=tmp_path, progress=False)
    assert [data.meta["splits"][split]["documents"] for split in ("train", "val")] == [2700, 300]
    assert (data.folder / "meta.json").stat().st_size < 6000


# Vocabularies


def test_special_tokens_are_found_in_the_corpus_only_when_named(tmp_path: Path) -> None:
    chat = "<|user|>hello there<|bot|>well, hello<|endoftext|>" * 40
    (tmp_path / "t.txt").write_text(chat)
    plain = prepare(tmp_path / "t.txt", vocab_size=300, root=tmp_path, progress=False)
    assert plain.tokenizer.eot not in plain.train[:-1]
    named = prepare(
        tmp_path / "t.txt", vocab_size=300, special_tokens=["<|user|>", "<|bot|>"],
        root=tmp_path, progress=False,
    )  # fmt: skip
    ids = named.train[:].tolist()
    assert ids.count(named.tokenizer.special["<|user|>"]) == 36
    assert named.tokenizer.eot not in ids[:-1]  # written in a text, it is ordinary text
    assert documents(named.tokenizer, named.train) == [chat[: int(len(chat) * 0.9)]]
    learned = range(256, min(named.tokenizer.special.values()))
    assert learned
    assert not any(b"user" in named.tokenizer.token_bytes(i) for i in learned)


def test_a_tokenizer_can_be_named_or_lie_in_a_folder(text: Path, tmp_path: Path) -> None:
    first = prepare(text, vocab_size=300, root=tmp_path, progress=False)
    again = prepare(text, tokenizer=str(first.folder), root=tmp_path, progress=False)
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert again.folder != first.folder
    assert again.train[:].tolist() == first.train[:].tolist()
    more = prepare(
        text, tokenizer=str(first.folder / "tokenizer.json"), special_tokens=["king"],
        root=tmp_path, progress=False,
    )  # fmt: skip
    assert more.tokenizer.special["king"] in more.train[:]


@pytest.mark.parametrize(("pattern", "longest"), [("gpt4", 3), ("gpt2", 8), (r"(?s:.)", 1)])
def test_the_pattern_decides_where_text_is_split(
    tmp_path: Path, pattern: str, longest: int
) -> None:
    (tmp_path / "t.txt").write_text("1234567 " * 300)
    tokenizer = prepare(
        tmp_path / "t.txt", vocab_size=270, pattern=pattern, root=tmp_path, progress=False
    ).tokenizer
    assert max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_vocab)) == longest


def test_of_much_text_an_even_sample_is_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()
    for i in range(200):
        (tmp_path / "docs" / f"{i:03d}.txt").write_text(f"{i:03d}" * 10)
    seen: list[str] = []
    learn = Tokenizer.bpe

    def watched(texts: Iterator[str], *args: object) -> Tokenizer:
        seen.extend(texts)
        return learn(iter(seen), *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Tokenizer, "bpe", watched)
    monkeypatch.setattr(passes, "LEARN_BYTES", 1500)
    prepare(tmp_path / "docs", vocab_size=300, root=tmp_path, progress=False)
    assert 1400 < sum(map(len, seen)) < 1600
    numbers = [int(text[:3]) for text in seen]
    assert numbers[0] < 5
    assert numbers[-1] > 190
    assert max(b - a for a, b in itertools.pairwise(numbers)) < 8


# What can be wrong


def test_empty_files_are_skipped_and_counted(text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbf")
    data = prepare(f"{tmp_path}/*.txt", root=tmp_path / "data", tokenizer="bytes", progress=False)
    assert data.meta["empty_documents"] == 2
    assert data.meta["splits"]["train"]["documents"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no text found: 1 documents in .*bad.txt, all empty"),
        (b"\xef\xbb\xbf", "no text found: 1 documents in .*bad.txt, all empty"),
        (bytes(range(256)) * 50, "bad.txt is not a text file: .*byte offset 0"),
        (b"\xff\xfea\0b\0", "bad.txt is UTF-16"),
        (b"a", "1 characters in all, too few"),
        (b"abc\xffd" * 100, "bad.txt is not UTF-8: byte 0xFF at byte offset 3"),
        (b"abc\0d" * 100, "bad.txt is not a text file: .*byte offset 3"),
    ],
)
def test_bad_text_is_a_data_error(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "bad.txt", root=tmp_path / "data", progress=False)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_text_of_nothing_but_line_ends_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"\n" * 40_000)
    for tokenizer in ("bpe", "chars"):
        data = prepare(tmp_path / "t.txt", tokenizer=tokenizer, root=tmp_path, progress=False)
        assert documents(data.tokenizer, data.train) == ["\n" * 36_000]


def test_bytes_that_do_not_belong_are_left_out_on_request_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_bytes(b"abc\xffd\0" * 100)
    found = {}
    for on_error in ("skip", "replace"):
        data = prepare(tmp_path / "t.txt", tokenizer="bytes", on_error=on_error, root=tmp_path)  # type: ignore[arg-type]
        text = "".join(documents(data.tokenizer, data.train) + documents(data.tokenizer, data.val))
        found[on_error] = text
        assert data.meta["left_out"]["bytes"] == 200
        assert "NUL byte at byte offset 5" in data.meta["left_out"]["first"]
        assert (
            "200 bytes and 0 rows were left out or replaced; the first:" in capsys.readouterr().err
        )
    assert found == {"skip": "abcd" * 100, "replace": "abc\ufffdd\ufffd" * 100}


def test_a_field_that_no_row_has_is_named_though_rows_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"body": "text"}\n' * 30)
    with pytest.raises(
        DataError, match=r"30 rows left out .*row 1, has no field 'text'; it has 'b"
    ):
        prepare(tmp_path / "t.jsonl", root=tmp_path, on_error="skip", progress=False)


def test_line_ends_are_made_one_on_request(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"a\r\nb\rc\n" * 10)
    texts = [
        prepare(tmp_path / "t.txt", tokenizer="bytes", newlines=newlines, root=tmp_path,
                progress=False)
        for newlines in ("keep", "lf")
    ]  # fmt: skip
    assert [len(data.train) + len(data.val) - 2 for data in texts] == [70, 60]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"tokenizer": "words"}, TokenizerError, "'words' is neither .*; or bpe or chars"),
        ({"vocab_size": 256}, TokenizerError, "vocab_size is 256, .* at least 257"),
        ({"val_fraction": 0.0}, ConfigError, "val_fraction is 0.0"),
        ({"val_fraction": 1.0}, ConfigError, "val_fraction is 1.0"),
        ({"val_fraction": float("nan")}, ConfigError, "val_fraction is nan"),
        ({"shard_tokens": 0}, ConfigError, "shard_tokens is 0"),
        ({"workers": 0}, ConfigError, "workers is 0"),
        ({"newlines": "crlf"}, ConfigError, "newlines is 'crlf', but must be keep or lf"),
        ({"on_error": "x"}, ConfigError, "on_error is 'x', but must be stop or skip or replace"),
        ({"pattern": "gpt3"}, TokenizerError, "split pattern 'gpt3' is unknown"),
        ({"pattern": "["}, TokenizerError, "split pattern .* is not valid"),
        ({"special_tokens": ["<|endoftext|>"]}, TokenizerError, "every vocabulary has it"),
        (
            {"special_tokens": [f"<{i}>" for i in range(9)], "vocab_size": 260},
            TokenizerError,
            "at least 266",
        ),
    ],
)
def test_bad_settings_are_named_before_any_work(
    text: Path, tmp_path: Path, settings: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prepare(text, root=tmp_path / "data", progress=False, **settings)  # type: ignore[arg-type]
    assert not (tmp_path / "data").exists()


def test_progress_goes_to_stderr_or_nowhere(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(text, root=tmp_path / "a", progress=False)
    assert capsys.readouterr() == ("", "")
    for folder, terminal in [("b", False), ("c", True)]:
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        prepare(text, root=tmp_path / folder)
        out, err = capsys.readouterr()
        assert out == ""
        assert all(step in err for step in ("reading", "learning bpe", "tokenizing"))
        assert ("B/s" in err) == ("\r" in err) == terminal


def test_meta_tells_where_the_data_comes_from(text: Path, tmp_path: Path) -> None:
    data = prepare(text, root=tmp_path, vocab_size=300, progress=False)
    assert PreparedData.open(data.folder).meta == data.meta
    meta = json.loads((data.folder / "meta.json").read_text())
    facts = text.stat()
    file = {"path": str(text), "size": facts.st_size, "mtime_ns": facts.st_mtime_ns}
    assert meta["sources"] == [{"files": [file]}]
    assert meta["tokenizer"]["vocab_size"] == 300
    assert meta["tokenizer"]["fingerprint"] == data.tokenizer.fingerprint
    assert meta["fingerprint"][:12] == data.folder.name[-12:]


@pytest.mark.parametrize(
    ("share", "says"),
    [
        (1e-300, "val_fraction is 1e-300: .* holds out none; give a larger fraction"),
        (
            1 - 1e-16,
            "fraction is 0.9999999999999999: .* leaves none to train on; give a smaller",
        ),
    ],
)
def test_a_fraction_that_leaves_a_split_empty_is_named(
    share: float, says: str, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=says):
        prepare(text, tokenizer="bytes", val_fraction=share, root=tmp_path / "d", progress=False)


@pytest.mark.parametrize("below", ["", "/data"])
def test_a_root_that_can_be_no_folder_is_named(below: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is no folder; choose another root"):
        prepare(text, tokenizer="bytes", root=f"{text}{below}", progress=False)
    with pytest.raises(DataError, match="cannot have a NUL in it"):
        prepare(text, tokenizer="bytes", root=f"{tmp_path}/a\0b{below}", progress=False)


def test_what_a_folder_has_of_other_kinds_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mixed"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("some words to learn from " * 20)
    for name in ("x.pdf", "sub/y.log", ".hidden.pdf"):
        (folder / name).write_text("?")
    prepare(str(folder), tokenizer="bytes", root=tmp_path / "data")
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert "x.pdf" in told
    assert "y.log" in told
    assert "hidden" not in told
    prepare(str(folder), tokenizer="bytes", root=tmp_path / "again", progress=False)
    assert "left out" not in capsys.readouterr().err
