"""Every format, plain and compressed: the same rows come out, and what is wrong has its place."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.data import formats
from gpt.data.decoding import OnError, Reading
from gpt.data.formats import Piece, kind_of, read_file
from gpt.errors import DataError

ROWS = [
    "plain",
    "",
    'a "quoted", one',
    "two\nlines\r\nof text",
    "文🙂é\u0301",
    "  blanks  ",
    "x" * 9000,
]


def write(path: Path, rows: list[str]) -> Path:
    """The rows in the format that the name says."""
    stem, packed = formats._unpacked(str(path))
    kind = stem.rpartition(".")[2]
    if kind in ("jsonl", "ndjson"):
        lines = (json.dumps({"id": i, "text": row}) for i, row in enumerate(rows))
        data = "".join(f"{line}\n" for line in lines).encode()
    elif kind in ("csv", "tsv"):
        out = io.StringIO(newline="")
        writer = csv.writer(out, delimiter="," if kind == "csv" else "\t")
        writer.writerows([["id", "text"], *([i, row] for i, row in enumerate(rows))])
        data = out.getvalue().encode()
    else:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": range(len(rows)), "text": rows}), sink, row_group_size=3)
        data = sink.getvalue().to_pybytes()
    if packed == ".gz":  # two members, as from appending
        data = gzip.compress(data[:50]) + gzip.compress(data[50:])
    elif packed == ".zst":
        data = zstandard.compress(data[:50]) + zstandard.compress(data[50:])
    path.write_bytes(data)
    return path


def read(path: Path, field: str = "text", reading: Reading | None = None) -> list[str]:
    pieces = list(read_file(str(path), field, reading or Reading()))
    assert all(piece.end and piece.name == str(path) for piece in pieces)
    return [piece.text for piece in pieces]


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "csv", "tsv", "parquet"])
def test_rows_come_out_as_they_went_in(tmp_path: Path, kind: str, packed: str) -> None:
    path = write(tmp_path / f"rows.{kind}{packed}", ROWS)
    done: list[int] = []
    assert read(path, reading=Reading(advance=done.append)) == ROWS
    assert packed or sum(done) == path.stat().st_size
    unix = read(path, reading=Reading(newlines="lf"))
    assert unix == [row.replace("\r\n", "\n") for row in ROWS]
    if kind in ("csv", "tsv"):
        assert read(path, "id") == list(map(str, range(len(ROWS))))


@settings(deadline=None, max_examples=40)
@given(rows=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\r"))))
def test_any_text_survives_any_format(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    for kind in ("jsonl", "csv", "parquet"):
        assert read(write(folder / f"rows.{kind}", rows)) == rows


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_text_is_one_document_in_pieces(
    tmp_path: Path, packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt.data.decoding._BLOCK", 7)
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[packed]
    path = tmp_path / f"text.md{packed}"
    path.write_bytes(compress("\ufeffone\r\n文 two\r\n".encode()))
    pieces = list(read_file(str(path), "text", Reading(newlines="lf")))
    assert "".join(piece.text for piece in pieces) == "one\n文 two\n"
    assert [piece.end for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 1
    assert all(piece.text for piece in pieces)


def test_kinds_are_known_by_name() -> None:
    for name, kind in [
        ("a.txt", ".txt"), ("a.MD.GZ", ".md"), ("b/c.jsonl.zst", ".jsonl"), ("a.json", None),
        ("a.gz", None), ("txt", None), ("a.txt.bz2", None), (".txt", ".txt"), ("a.b.csv", ".csv"),
    ]:  # fmt: skip
        assert kind_of(name) == kind


# What can be wrong


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])
def test_a_missing_field_names_the_file_and_the_fields_there_are(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / f"rows.{kind}", ROWS)
    with pytest.raises(DataError, match=r"rows\.\w+,?.* has no field 'body'; it has 'id', 'text'"):
        read(path, "body")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{bad", "line 3, is not JSON: Expecting property"),
        ('{"text": "a"} x', "line 3, is not JSON: Extra data"),
        ("[" * 100_000, "line 3, is (nested too deep|not JSON)"),
        ('["text"]', "row 3, is no object with fields but a list"),
        ("null", "row 3, is no object with fields but null"),
        ('{"body": "a", "id": 1}', "row 3, has no field 'text'; it has 'body', 'id'"),
        ('{"text": 5}', "row 3: the field 'text' is a number, not text"),
        ('{"text": {"a": 1}}', "row 3: the field 'text' is an object, not text"),
        (r'{"text": "a\ud800b"}', "row 3, holds half of a surrogate pair \\(U\\+D800\\)"),
    ],
)
def test_a_bad_line_of_json_has_its_number_and_can_be_left_out(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "one"}}\n\n{line}\n{{"text": "two"}}')
    with pytest.raises(DataError, match=f"rows.jsonl, {message}") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    reading = Reading("skip")
    assert read(path, reading=reading) == ["one", "two"]
    assert (reading.losses.rows, reading.losses.bytes) == (1, 0)
    assert "line 3" in reading.losses.first or "row 3" in reading.losses.first


def test_json_may_stand_between_blanks_and_null_is_an_empty_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf  {"text": "a"} \r\n   \n{"text": null}\r\n{"text": "\\ud83d\\ude42"}'
    )
    assert read(path) == ["a", "", "🙂"]


def test_half_a_pair_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"text": "a\ud800b\ufffd"}')
    reading = Reading("replace")
    assert read(path, reading=reading) == ["a\ufffdb\ufffd"]
    assert (reading.losses.rows, reading.losses.bytes) == (0, 1)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(
    ("on_error", "text"), [("stop", ""), ("skip", "ab"), ("replace", "a\ufffdb")]
)
def test_bytes_that_are_no_utf8_in_a_row(
    tmp_path: Path, kind: str, on_error: OnError, text: str
) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        strings = pa.array([b"fine", b"a\xffb"], pa.binary()).view(pa.string())
        pq.write_table(pa.table({"text": strings}), path)
    else:
        path.write_bytes(
            b'{"text": "fine"}\n{"text": "a\xffb"}\n'
            if kind == "jsonl"
            else b"text\nfine\na\xffb\n"
        )
    reading = Reading(on_error)
    if on_error == "stop":
        with pytest.raises(DataError, match=r"rows\.\w+.* is not UTF-8: byte 0xFF at byte offset"):
            read(path, reading=reading)
    else:
        assert read(path, reading=reading) == ["fine", text]
        assert (reading.losses.bytes, reading.losses.rows) == (1, 0)


@pytest.mark.parametrize(
    ("content", "message", "left"),
    [
        ('id,text\n1,"open', "line 2, is not CSV: unexpected end of data", []),
        ('id,text\n1,"a"b\n2,c\n', "line 2, is not CSV: ',' expected", ["c"]),
        ("id,text\n1\n2,c\n", "row 1, ends before the field 'text': it has 1 fields", ["c"]),
    ],
)
def test_a_bad_row_of_csv_has_its_place_and_can_be_left_out(
    tmp_path: Path, content: str, message: str, left: list[str]
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=f"rows.csv, {message}"):
        read(path)
    reading = Reading("skip")
    assert read(path, reading=reading) == left
    assert reading.losses.rows == 1


def test_a_huge_field_is_no_error(tmp_path: Path) -> None:
    rows = ["a,b\n" * 400_000, "small"]
    assert read(write(tmp_path / "rows.csv", rows)) == rows
    assert read(write(tmp_path / "rows.jsonl", rows)) == rows


def test_a_file_without_rows_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_MAX_ROW", 1000)
    for kind, message in (("jsonl", "line 1, has more than"), ("csv", "is not CSV: field larger")):
        path = write(tmp_path / f"rows.{kind}", ["a" * 2000])
        with pytest.raises(DataError, match=message):
            read(path)


@pytest.mark.parametrize("name", ["t.txt.gz", "t.txt.zst", "t.jsonl.gz", "t.parquet.zst"])
@pytest.mark.parametrize("how", ["cut", "other"])
def test_a_damaged_archive_is_named(tmp_path: Path, name: str, how: str) -> None:
    compress = gzip.compress if name.endswith("gz") else zstandard.compress
    data = compress(b'{"text": "some text"}\n' * 1000)
    (tmp_path / name).write_bytes(data[:-9] if how == "cut" else b"no archive at all" * 9)
    with pytest.raises(DataError, match=f"cannot read .*{name}: ") as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_what_is_no_parquet_or_holds_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"t.parquet is damaged, or is no Parquet file"):
        read(path)
    path.write_bytes(b"PAR1 and then something else PAR1")
    with pytest.raises(DataError, match=r"t.parquet is damaged, or is no Parquet file"):
        read(path)
    path = write(path, ROWS)
    with pytest.raises(DataError, match="the field 'id' is of type int64, not text"):
        read(path, "id")
    path.write_bytes(path.read_bytes()[:400] + b"\xff" * 300 + path.read_bytes()[700:])
    with pytest.raises(DataError, match=r"t.parquet"):
        read(path)


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet_of_other_text_types_and_null(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"text": pa.array(["a", None, "文"], pa.string()).cast(kind)})
    pq.write_table(table, tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet") == ["a", "", "文"]


def test_a_place_is_a_file_or_a_row_of_it() -> None:
    assert Piece("a", True, "t.txt").place == "t.txt"
    assert Piece("a", True, "t.csv", 4).place == "t.csv, row 4"


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst", "a.parquet.gz"])
def test_a_packed_file_of_no_bytes_is_cut_short(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match="is cut short: it has 0 bytes"):
        list(read_file(str(tmp_path / name), "text", Reading()))


def test_two_columns_of_one_name_are_an_error(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.array(["a", "b"])
    pq.write_table(pa.table([column, column], ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has 2 columns of the name 'text'"):
        list(read_file(str(tmp_path / "a.parquet"), "text", Reading()))


def test_a_number_of_thousands_of_digits_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": ' + "1" * 5000 + "}\n")
    with pytest.raises(DataError, match="line 1, has a number of too many digits") as caught:
        list(read_file(str(tmp_path / "a.jsonl"), "text", Reading()))
    assert "set_int_max" not in str(caught.value)
