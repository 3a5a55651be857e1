"""antiphon data: what prepare makes training finds, and every number shown is right."""

from __future__ import annotations

import inspect
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt.data import inspection
from gpt.data.command import DEFAULTS, NEWLINES, ON_ERROR, main, parse_source
from gpt.data.prepare import prepare
from gpt.data.shards import PreparedData
from gpt.data.sources import Source
from gpt.data.statistics import of_prepared
from gpt.errors import ConfigError, DataError, TokenizerError
from gpt.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"Line {i} of the book.\n" * (i % 7 + 1) for i in range(40)] + ["Line 3 of the book.\n"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """40 documents of which the first has a duplicate."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text, "body": text}) + "\n" for text in [*TEXTS, TEXTS[0]])
    )
    return path


@pytest.fixture
def data(rows: Path, tmp_path: Path) -> PreparedData:
    return prepare(rows, tokenizer="bytes", root=tmp_path / "data", progress=False)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*argv]) == 0
    return capsys.readouterr().out


def record(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    return json.loads(run(capsys, *argv, "--json"))


# prepare


def test_defaults_are_those_of_prepare_and_of_the_trainer(capsys: Any) -> None:
    from gpt.training.data import TextDataModule

    for function in (prepare, TextDataModule.__init__):
        parameters = inspect.signature(function).parameters
        for name, value in DEFAULTS.items():
            assert (parameters[name].default or ()) == (value or ()), (function, name)
    assert Source("x") == parse_source("x")
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for value in (*NEWLINES, *ON_ERROR, "default: 2048", "default: 0.1", "default: bpe"):
        assert value in shown


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--tokenizer", "chars", "--newlines", "lf", "--on-error", "replace"],
        ["--vocab-size", "280", "--pattern", "o200k", "--special-token", "<a b>"],
        ["--pattern", r"\p{L}+|(?s:.)", "--val-fraction", "0.25", "--workers", "1"],
        ["--field", "body", "--tokenizer", "bytes"],
        ["--weight"],
    ],
)
def test_the_command_it_prints_finds_the_data_ready(
    flags: list[str], rows: Path, tmp_path: Path, capsys: Any
) -> None:
    from gpt.training.cli import build_parser as train_parser
    from gpt.training.data import TextDataModule

    sources = [str(rows)]
    if flags == ["--weight"]:
        (tmp_path / "it's.txt").write_text("More of it. " * 50)
        flags, sources = [], [str(rows), f"{tmp_path}/it's.txt@2.5"]
    root = tmp_path / "my data"
    made = record(capsys, "prepare", *sources, "--root", str(root), *flags)
    assert [path.name for path in root.iterdir()] == [Path(made["folder"]).name]
    before = (Path(made["folder"]) / "meta.json").stat()

    words = shlex.split(made["train_command"])
    assert words[:3] == ["antiphon", "train", "fit"]
    config = train_parser("train.py").subcommands()["fit"].parse_args(words[3:])
    given = {name: value for name, value in vars(config.data).items() if name in _NAMES}
    if isinstance(given["source"], list):
        given["source"] = [one if isinstance(one, (str, Source)) else Source(**vars(one))
                           for one in given["source"]]  # fmt: skip
    module = TextDataModule(**given)
    module.prepare_data()
    module.setup("fit")
    assert [path.name for path in root.iterdir()] == [Path(made["folder"]).name]
    assert (Path(made["folder"]) / "meta.json").stat().st_mtime_ns == before.st_mtime_ns
    assert [span.weight for span in module.prepared.sources] == [
        source["weight"] for source in made["sources"]
    ]


_NAMES = {"source", "field", *DEFAULTS}


def test_what_was_made_is_shown(rows: Path, tmp_path: Path, capsys: Any) -> None:
    argv = ["prepare", str(rows), "--root", str(tmp_path / "d"), "--tokenizer", "bytes"]
    out = run(capsys, *argv, "--special-token", "book")
    [folder] = (tmp_path / "d").iterdir()
    assert out.startswith(f"{folder}\n")
    assert "bytes of 258 ids" in out
    assert "special    book" in out
    assert f"antiphon train fit --data.source {rows} --data.tokenizer bytes" in out
    assert f"antiphon data inspect {folder}" in out
    prepared = PreparedData.open(folder)
    assert prepared.tokenizer.special["book"] in prepared.train[:100]


def test_a_weight_follows_the_source() -> None:
    assert parse_source("a.txt@2", "body") == Source("a.txt", field="body", weight=2)
    half = Source("hf:me/it:en", weight=0.5, split="dev")
    assert parse_source("hf:me/it:en@.5", split="dev") == half
    assert parse_source("me@home.txt").source == "me@home.txt"
    assert parse_source("a@").source == "a@"


def test_a_file_whose_name_looks_like_a_weight_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "notes@2").mkdir()
    assert parse_source(str(tmp_path / "notes@2")).weight == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "ACTION"),
        (["prepair", "x"], "did you mean prepare"),
        (["prepare"], "SOURCE"),
        (["prepare", "x", "--tokenizer", "gpt2", "--vocab-size", "9"], "is for --tokenizer bpe"),
        (["prepare", "x", "--tokenizer", "chars", "--pattern", "gpt2"], "is for --tokenizer bpe"),
        (["prepare", "x", "--newlines", "crlf"], "invalid choice"),
        (["inspect", "x", "--documents", "-1"], "0 or more"),
    ],
)
def test_flags_that_do_not_fit_are_refused(argv: list[str], says: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "kind", "says"),
    [
        (["prepare", "{here}/none.txt"], DataError, "none.txt"),
        (["prepare", "{rows}", "--pattern", "gpt9"], TokenizerError, "did you mean gpt4"),
        (["prepare", "{rows}", "--pattern", "("], TokenizerError, "not valid"),
        (["prepare", "{rows}", "--field", "title"], DataError, "title"),
        (["prepare", "{rows}", "--tokenizer", "gpt-2"], TokenizerError, "did you mean gpt2"),
        (["prepare", "{rows}@-1"], DataError, "@-1"),
        (["inspect", "{here}"], DataError, "no prepared data"),
        (["inspect", "{data}", "--at", "99999"], DataError, "tokens 0 to .* none at 99999"),
        (["stats", "{rows}", "--split", "val"], ConfigError, "--split is for a prepared folder"),
        (["stats", "{data}", "--tokenizer", "gpt2"], ConfigError, "prepared already"),
        (["stats", "{rows}", "--tokenizer", "bpe"], TokenizerError, "learned from a corpus"),
    ],
)
def test_mistakes_take_one_line(
    argv: list[str],
    kind: type[Exception],
    says: str,
    rows: Path,
    data: PreparedData,
    tmp_path: Path,
) -> None:
    places = {"here": tmp_path, "rows": rows, "data": data.folder}
    root = ["--root", str(tmp_path / "d"), "--quiet"] if argv[0] == "prepare" else []
    with pytest.raises(kind, match=says) as caught:
        main([*(word.format(**places) for word in argv), *root])
    assert "\n" not in str(caught.value)


# inspect


def test_documents_and_settings_are_shown(data: PreparedData, capsys: Any) -> None:
    out = run(capsys, "inspect", str(data.folder), "--documents", "1")
    assert "val_fraction 0.1" in out
    assert f"{len(data.train):,}" in out
    assert "every token was read and is as described" in out
    assert "train, document 0: 20 tokens\n  Line 0 of the book." in out
    found = record(capsys, "inspect", str(data.folder), "--split", "val", "--documents", "99")
    texts = [document["text"] for document in found["documents"]]
    assert len(texts) == found["splits"]["val"]["documents"] == 4
    assert all(text in TEXTS for text in texts)
    assert found["documents"][1]["start"] == found["documents"][0]["tokens"] + 1
    assert found["splits"]["train"]["tokens"] == len(data.train)
    assert found["checked"]


def test_a_long_document_is_cut_and_tricks_are_shown(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.txt").write_text("\x1b[2Jabc" * 1000)
    folder = prepare(tmp_path / "a.txt", tokenizer="bytes", root=tmp_path, progress=False).folder
    out = run(capsys, "inspect", str(folder))
    assert "\x1b" not in out
    assert "␛[2Jabc" in out
    assert out.rstrip().endswith("…")


def test_a_place_is_shown_with_what_is_around_it(
    data: PreparedData, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = np.flatnonzero(data.train[:] == data.tokenizer.eot)
    for size in (1 << 20, 50):  # in one block, and across many
        monkeypatch.setattr(inspection, "BLOCK", size)
        for at in (0, 5, int(ends[0]), int(ends[0]) + 1, int(ends[7]), len(data.train) - 1):
            found = record(capsys, "inspect", str(data.folder), "--at", str(at))["at"]
            document = int(np.searchsorted(ends, at))
            assert found["document"] == document
            assert found["end"] == ends[document]
            assert found["start"] == (ends[document - 1] + 1 if document else 0)
            assert found["token"] == data.train[at]
            assert found["before"] == data.train[max(at - 32, 0) : at].tolist()
            assert found["after"] == data.train[at + 1 : at + 33].tolist()
    out = run(capsys, "inspect", str(data.folder), "--at", str(ends[0]))
    assert "  token   <|endoftext|>\n" in out
    assert "document 0 (tokens 0 to" in out


def shard(data: PreparedData) -> np.memmap[Any, Any]:
    return np.memmap(data.folder / "train-00000.bin", data.train.dtype, mode="r+")


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (3, 300, "an id that its vocabulary has not"),
        (3, 256, "has documents 39, but meta.json says 38"),
    ],
)
def test_a_token_that_was_changed_is_found(
    at: int, value: int, says: str, data: PreparedData, capsys: Any
) -> None:
    ids = shard(data)
    ids[at] = value
    ids.flush()
    with pytest.raises(DataError, match=says):
        main(["inspect", str(data.folder)])
    assert main(["inspect", str(data.folder), "--no-check", "--documents", "0"]) == 0


def test_a_count_that_is_wrong_everywhere_is_found(data: PreparedData, capsys: Any) -> None:
    """What is printed has been compared with the tokens: characters and each source's numbers."""
    path = data.folder / "meta.json"
    whole = path.read_text()
    for name in ("documents", "bytes", "chars"):
        meta = json.loads(whole)
        for counts in (meta["splits"]["val"], meta["spans"][0]["val"]):
            counts[name] += 1
        path.write_text(json.dumps(meta))
        with pytest.raises(DataError, match=f"val of .*rows.jsonl has {name} "):
            main(["inspect", str(data.folder)])


def test_tokens_that_are_none_are_not_counted(data: PreparedData) -> None:
    path = data.folder / "val-00000.bin"
    path.write_bytes(b"\xff" * path.stat().st_size)
    for argv in (["stats"], ["stats", "--split", "val"], ["inspect"], ["inspect", "--split=val"]):
        with pytest.raises(DataError, match="val has an id that its vocabulary has not"):
            main([argv[0], str(data.folder), *argv[1:]])


def test_an_id_without_a_token_is_found(tmp_path: Path) -> None:
    tokens = [bytes([b]) for b in range(256)]
    gaps = Tokenizer("gaps", r"(?s:.)", tokens, special={"<|endoftext|>": 300})
    (tmp_path / "a.txt").write_text("abc" * 100)
    data = prepare(tmp_path / "a.txt", tokenizer=gaps, root=tmp_path, progress=False)
    inspection.verify(data)
    ids = shard(data)
    ids[3] = 260
    ids.flush()
    with pytest.raises(DataError, match="an id that its vocabulary has not"):
        inspection.verify(data)


# stats


def test_statistics_are_those_of_a_plain_count(
    data: PreparedData, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "BLOCK", 97)  # documents lie across the blocks
    found = record(capsys, "stats", str(data.folder))
    ids = [*data.train[:].tolist(), *data.val[:].tolist()]
    counts = Counter(ids)
    assert found["tokens"] == len(ids)
    assert found["bytes"] == data.train_bytes + data.val_bytes
    assert found["documents"] == 42
    assert found["duplicate_documents"] == 42 - len({*TEXTS})
    shares = [count / len(ids) for count in counts.values()]
    bits = -sum(share * math.log2(share) for share in shares)
    assert found["unigram_bits_per_token"] == pytest.approx(bits)
    assert found["unigram_bits_per_byte"] == pytest.approx(bits * len(ids) / found["bytes"])
    assert found["vocabulary"] == {"ids": 257, "used": len(counts), "unused": 257 - len(counts)}
    most = [(entry["token_id"], entry["count"]) for entry in found["most_frequent"]]
    assert most == sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:10]
    least = [(entry["token_id"], entry["count"]) for entry in found["least_frequent"]]
    assert least == sorted(counts.items(), key=lambda item: (item[1], item[0]))[:10]
    lengths = sorted(len(text) for text in [*TEXTS, TEXTS[0]])
    assert found["document_tokens"]["0"] == lengths[0]
    assert found["document_tokens"]["0.5"] == lengths[20]
    assert found["document_tokens"]["1"] == lengths[-1]


def test_held_out_documents_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "the same"}\n' * 30)
    data = prepare(path, tokenizer="bytes", root=tmp_path, progress=False)
    found = of_prepared(data.folder, show=False)
    assert (found.held_out_seen(), found.duplicates()) == (3, 29)
    assert of_prepared(data.folder, "val", show=False).held_out_seen() is None


def test_a_corpus_is_counted_without_being_prepared(
    rows: Path, data: PreparedData, tmp_path: Path, capsys: Any
) -> None:
    plain = record(capsys, "stats", str(rows))
    ready = record(capsys, "stats", str(data.folder))
    different = {"name", "held_out_documents_in_train"}
    for name in plain.keys() - different:
        assert plain[name] == ready[name], name
    assert not list(tmp_path.glob("**/meta.json"))[1:]
    out = run(capsys, "stats", str(rows), "--top", "2", "--tokenizer", str(data.folder))
    assert "documents   42, of them" in out
    assert "most frequent" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_preparing_with_its_workers_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "t.txt").write_text("some text of the corpus, " * 2_000_000)
    words = ["prepare", "t.txt", "--tokenizer", "bytes", "--root", "data", "--workers", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "gpt", "data", *words],
        stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        while "tokenizing" not in process.stderr.readline():
            pass
        while not any(path.stat().st_size for path in tmp_path.glob("data/.*/*.bin")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        rest = process.stderr.read()  # to its end: no worker holds it open any more
    assert process.returncode == 128 + number
    assert "Traceback" not in rest
    assert list((tmp_path / "data").iterdir()) == []


def test_preparing_loads_no_torch(rows: Path) -> None:
    code = (
        "import sys; from gpt.data.command import main\n"
        "main(['prepare', sys.argv[1], '--tokenizer', 'bytes', '--root', sys.argv[2], '--quiet'])\n"
        "assert not {'torch', 'grpc', 'lightning'} & set(sys.modules)"
    )
    argv = [sys.executable, "-c", code, str(rows), str(rows.parent)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_of_each_action_ends_with_examples(capsys: Any) -> None:
    for action in ([], ["prepare"], ["inspect"], ["stats"]):
        with pytest.raises(SystemExit):
            main([*action, "--help"], "antiphon data")
        assert "\nexamples:\n  antiphon data" in capsys.readouterr().out


def test_the_commands_it_prints_hold_for_strange_names(tmp_path: Path, monkeypatch: Any) -> None:
    from gpt.data.command import _inspected, train_command
    from gpt.training.cli import build_parser as train_parser

    words = shlex.split(train_command([Source("-dash.txt")], {"root": "-data"}))
    assert "--data.source=-dash.txt" in words
    assert train_parser("antiphon train").parse_args(words[2:])
    assert _inspected(Path("-data/a b")) == "'./-data/a b'"
    strange = os.fsdecode(b"it's caf\xe9.txt")
    assert train_command([Source(strange)], {}).endswith(r" $'it\x27s caf\xe9.txt'")
