"""Finding and reading text: every kind of source, every way in which a file can be wrong."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.data import corpora
from gpt.data.corpora import decode_utf8, find_corpus
from gpt.errors import DataError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.md", "sub/c.TXT", "sub/deep/d.md", "other.json", ".hidden.txt"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    (tmp_path / "tree/.git").mkdir()
    (tmp_path / "tree/.git/e.txt").write_text("no")
    return tmp_path / "tree"


def names(source: object, tree: Path) -> list[str]:
    documents = find_corpus(source).documents()  # type: ignore[arg-type]
    return [os.path.relpath(document.name, tree) for document in documents]


def test_a_folder_is_searched_in_the_order_of_its_paths(tree: Path) -> None:
    assert names(tree, tree) == ["a.md", "b.txt", "sub/c.TXT", "sub/deep/d.md"]
    assert names(f"{tree}/", tree) == names(tree, tree)


def test_globs_files_and_lists(tree: Path) -> None:
    assert names(str(tree / "b.txt"), tree) == ["b.txt"]
    assert names(f"{tree}/*.txt", tree) == ["b.txt"]
    assert names(f"{tree}/**/*.md", tree) == ["a.md", "sub/deep/d.md"]
    assert names([f"{tree}/sub/deep", tree / "a.md"], tree) == ["sub/deep/d.md", "a.md"]


def test_a_file_found_twice_counts_once(tree: Path) -> None:
    (tree / "link.txt").symlink_to(tree / "b.txt")
    assert names([f"{tree}/b.txt", tree, f"{tree}/*"], tree).count("b.txt") == 1
    assert "link.txt" not in names([f"{tree}/b.txt", tree], tree)


def test_a_home_folder_is_expanded(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tree))
    assert names("~/sub", tree) == ["sub/c.TXT", "sub/deep/d.md"]


def test_names_are_fit_for_a_folder(tree: Path) -> None:
    assert find_corpus(tree / "b.txt").name == "b"
    assert find_corpus(f"{tree}/sub/*").name == "sub"
    assert find_corpus([tree, tree / "b.txt"]).name == "tree-and-1-more"
    assert find_corpus("shakespeare").name == "shakespeare"
    (tree / "à la carte!.txt").touch()
    assert find_corpus(tree / "à la carte!.txt").name == "à-la-carte"


def test_the_identity_changes_with_the_file(tree: Path) -> None:
    before = find_corpus(tree)
    assert find_corpus(tree) == before
    (tree / "b.txt").write_text("longer than it was")
    changed = find_corpus(tree)
    assert changed != before
    os.utime(tree / "b.txt", ns=(1, 1))
    assert find_corpus(tree) not in (before, changed)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "shakespear",
            r"did you mean shakespeare\? \(the named corpora are shakespeare, sotu, tiny",
        ),
        ("/no/such/file.txt", r"'/no/such/file.txt' is neither a file.*shakespeare"),
        ("{tree}/other.json", r"other.json is not a .txt or .md file"),
        ("{tree}/*.json", r"no text found: there is no .txt or .md file in .*/\*.json"),
        ("{tree}/empty", r"no text found: .*empty"),
        ([], r"no text found: .*\(nothing\)"),
    ],
)
def test_what_is_not_there_is_a_data_error(tree: Path, source: object, message: str) -> None:
    (tree / "empty").mkdir()
    if isinstance(source, str):
        source = source.format(tree=tree)
    with pytest.raises(DataError, match=message) as caught:
        find_corpus(source)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_file_that_vanished_is_a_data_error(tree: Path) -> None:
    documents = find_corpus(tree).documents()
    (tree / "a.md").unlink()
    with pytest.raises(DataError, match=r"cannot read .*a.md: No such file"):
        list(documents[0].chunks())
    (tree / "dangling.txt").symlink_to(tree / "nowhere")
    with pytest.raises(DataError, match=r"cannot read .*dangling.txt"):
        find_corpus(tree)


# Decoding


@settings(deadline=None)
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60),
    block=st.integers(1, 9),
)
def test_text_comes_back_whatever_the_block_size(text: str, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "_BLOCK", block)
        assert "".join(decode_utf8(io.BytesIO(text.encode()), "x")) == text.removeprefix("\ufeff")
        assert "".join(decode_utf8(io.BytesIO(text.encode("utf-8-sig")), "x")) == text


@settings(deadline=None)
@given(
    before=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
    bad=st.sampled_from(
        [b"\x80", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xe6\x96", b"\xf0\x9f."]
    ),
    block=st.integers(1, 9),
)
def test_a_byte_that_is_not_utf8_is_named_with_its_offset(
    before: str, bad: bytes, block: int
) -> None:
    data = before.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "_BLOCK", block)
        with pytest.raises(DataError) as caught:
            list(decode_utf8(io.BytesIO(data + bad), "odd.txt"))
    assert f"odd.txt is not UTF-8: byte 0x{bad[0]:02X} at byte offset {len(data)} " in str(
        caught.value
    )


def test_a_binary_file_is_named_with_the_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "_BLOCK", 4)
    with pytest.raises(DataError, match=r"x.txt is not a text file.*byte offset 6"):
        list(decode_utf8(io.BytesIO(b"abcdef\0gh"), "x.txt"))


def test_line_ends_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "dos.txt").write_bytes(b"a\r\nb\rc\n")
    assert list(find_corpus(tmp_path).documents()[0].chunks()) == ["a\r\nb\rc\n"]


def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        find_corpus(str(tmp_path / "pipe.txt"))
