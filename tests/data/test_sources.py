"""Finding and reading text: every kind of source, every way in which a file can be wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpt.data.decoding import Reading
from gpt.data.sources import Corpus, Source, SourceLike, as_sources, find_corpora, joint_name
from gpt.errors import ConfigError, DataError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.md", "sub/c.TXT", "sub/deep/d.md", "other.json", ".hidden.txt"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    (tmp_path / "tree/.git").mkdir()
    (tmp_path / "tree/.git/e.txt").write_text("no")
    return tmp_path / "tree"


def find(source: object) -> list[Corpus]:
    return find_corpora(source)  # type: ignore[arg-type]


def names(source: object, tree: Path) -> list[str]:
    pieces = [piece for corpus in find(source) for piece in corpus.pieces(Reading())]
    return [os.path.relpath(piece.name, tree) for piece in pieces]


def identities(source: SourceLike) -> object:
    return [corpus.identity for corpus in find(source)]


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
    (tree / "à la carte!.txt").touch()
    (tree / "rows.jsonl.zst").touch()
    for source, name in [
        (tree / "b.txt", "b"),
        (f"{tree}/sub/*", "sub"),
        (tree / "à la carte!.txt", "à-la-carte"),
        (tree / "rows.jsonl.zst", "rows"),
        ("shakespeare", "shakespeare"),
        ([tree, tree / "b.txt"], "tree-and-1-more"),
    ]:
        assert joint_name(find(source)) == name


def test_the_identity_changes_with_the_file(tree: Path) -> None:
    before = identities(tree)
    assert identities(tree) == before
    (tree / "b.txt").write_text("longer than it was")
    changed = identities(tree)
    assert changed != before
    os.utime(tree / "b.txt", ns=(1, 1))
    assert identities(tree) not in (before, changed)


def test_the_identity_of_many_files_is_small_and_still_changes_with_each(tmp_path: Path) -> None:
    for i in range(300):
        (tmp_path / f"{i}.txt").write_text("a")
    before = identities(tmp_path)
    assert len(str(before)) < 4000
    (tmp_path / "299.txt").write_text("ab")
    assert identities(tmp_path) != before


def test_the_field_is_part_of_what_rows_are_and_of_nothing_else(tree: Path) -> None:
    (tree / "rows.jsonl").write_text('{"a": "x", "b": "y"}')
    for path, same in [(tree / "rows.jsonl", False), (tree / "b.txt", True)]:
        a, b = (identities(Source(str(path), field=field)) for field in "ab")
        assert (a == b) == same


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 101.0])
def test_a_weight_is_from_0_to_100(weight: float) -> None:
    with pytest.raises(ConfigError, match="the weight of x is"):
        as_sources(Source("x", weight=weight))


def test_one_weight_at_least_is_above_0() -> None:
    assert len(as_sources([Source("x", weight=0), "y"])) == 2
    with pytest.raises(ConfigError, match="all sources have weight 0"):
        as_sources([Source("x", weight=0), Source("y", weight=0)])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "shakespear",
            r"did you mean shakespeare\? \(the named corpora are shakespeare, sotu, tiny",
        ),
        ("/no/such/file.txt", r"'/no/such/file.txt' is neither a file.*shakespeare"),
        ("{tree}/other.json", r"other.json is of no kind that can be read \(.txt, .md, .jsonl"),
        ("{tree}/*.json", r"no text found: there is no file that can be read .*/\*.json"),
        ("{tree}/empty", r"no text found: .*empty"),
        ([], r"no text found: there is no source in the list"),
    ],
)
def test_what_is_not_there_is_a_data_error(tree: Path, source: object, message: str) -> None:
    (tree / "empty").mkdir()
    if isinstance(source, str):
        source = source.format(tree=tree)
    with pytest.raises(DataError, match=message) as caught:
        find(source)
    assert "\n" not in str(caught.value)


def test_a_file_that_vanished_is_a_data_error(tree: Path) -> None:
    [corpus] = find(tree)
    (tree / "a.md").unlink()
    with pytest.raises(DataError, match=r"cannot read .*a.md: No such file"):
        list(corpus.pieces(Reading()))
    (tree / "dangling.txt").symlink_to(tree / "nowhere")
    with pytest.raises(DataError, match=r"cannot read .*dangling.txt"):
        find(tree)


def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        find(str(tmp_path / "pipe.txt"))


def test_a_pipe_in_a_folder_is_passed_over(tree: Path) -> None:
    """Opened, it would wait for ever for somebody who writes."""
    os.mkfifo(tree / "pipe.txt")
    os.mkfifo(tree / "sub/pipe.jsonl.gz")
    assert names(tree, tree) == ["a.md", "b.txt", "sub/c.TXT", "sub/deep/d.md"]
    assert "pipe.txt" not in names(f"{tree}/*", tree)


def test_a_file_name_need_not_be_utf8(tmp_path: Path) -> None:
    from gpt.data.command import main

    strange = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / strange).write_text("some text " * 30)
    for given in (tmp_path / "in", tmp_path / "in" / strange):
        argv = ["prepare", str(given), "--tokenizer", "bytes", "--root", str(tmp_path / "data")]
        for form in ([], ["--json"]):
            assert main([*argv, *form]) == 0
    [_, _] = (tmp_path / "data").iterdir()
