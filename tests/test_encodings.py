"""Tokenizers by name: tiktoken's own ids, and without its files an error that says what to do."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tiktoken_ext.openai_public as public
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt import encodings
from gpt.encodings import ENCODINGS, cache_folder, missing_files, named_tokenizer
from gpt.errors import TokenizerError
from gpt.tokenizer import END_OF_TEXT, Tokenizer
from gpt.vocab import open_vocabulary
from tests.gpt2_files import fill_cache
from tests.nasty import mixed, pair_ranks

TEXT = (Path(__file__).read_text(encoding="utf-8") * 3) + (
    "It's the KING's café — naïve façade…\r\n\tЖители Đà Nẵng กรุงเทพ 漢字かな交じり文 한국어 "
    "עברית العربية हिन्दी 🌶👩‍👩‍👧 ½ Ⅷ e\u0301 \u00a0\u2003\n\n\n  if (x != 0x1F) { y++; }\n   "
)


@pytest.fixture(scope="session")
def gpt2_cache(request: pytest.FixtureRequest) -> Path:
    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("tiktoken"))
    if reason := fill_cache(folder):
        pytest.skip(reason)
    return folder


@pytest.fixture
def gpt2(gpt2_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_cache))
    return named_tokenizer("gpt2")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No network, and an empty cache of tiktoken's."""
    cache = tmp_path / "tiktoken"
    cache.mkdir()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    encodings._encoding.cache_clear()
    yield cache
    encodings._encoding.cache_clear()


# gpt2, with its real files


def test_gpt2_gives_tiktokens_ids(gpt2: Tokenizer) -> None:
    theirs = tiktoken.get_encoding("gpt2")
    assert gpt2.encode(TEXT) == theirs.encode_ordinary(TEXT)
    assert gpt2.decode(gpt2.encode(TEXT)) == TEXT
    assert (gpt2.kind, gpt2.n_vocab, gpt2.eot) == ("gpt2", 50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=mixed, cuts=st.lists(st.integers(0, 200), max_size=4))
def test_chunks_give_the_ids_of_the_whole(gpt2: Tokenizer, text: str, cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[a:b] for a, b in pairwise(borders)]
    ids = [token for ids in gpt2.encode_stream(chunks) for token in ids]
    assert ids == gpt2.encoding.encode_ordinary(text)


def test_control_text_that_a_user_types_is_ordinary_in_gpt2(gpt2: Tokenizer) -> None:
    text = f"a{END_OF_TEXT}b"
    assert gpt2.eot not in gpt2.encode(text)
    assert gpt2.encode(text, special=[END_OF_TEXT]) == [64, 50256, 65]


def test_gpt2_is_saved_and_read_again(gpt2: Tokenizer, tmp_path: Path) -> None:
    gpt2.save(tmp_path / "tokenizer.json")
    again = named_tokenizer(tmp_path)
    assert again.fingerprint == gpt2.fingerprint
    assert again.encode(TEXT) == gpt2.encode(TEXT)
    assert gpt2.fingerprint.startswith("765c51fac540"), "data prepared before would not fit models"


# What we say of the encodings is what tiktoken says


@pytest.fixture(params=ENCODINGS)
def described(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """tiktoken's own description of an encoding, made without its merge table."""
    files: list[tuple[str, str | None]] = []

    def load_one(address: str, expected_hash: str | None = None) -> dict[bytes, int]:
        files.append((address, expected_hash))
        return pair_ranks()

    def load_two(**given: str) -> dict[bytes, int]:
        for part in ("vocab_bpe", "encoder_json"):
            files.append((given[f"{part}_file"], given[f"{part}_hash"]))
        return pair_ranks()

    monkeypatch.setattr(public, "load_tiktoken_bpe", load_one)
    monkeypatch.setattr(public, "data_gym_to_mergeable_bpe_ranks", load_two)
    made = dict(public.ENCODING_CONSTRUCTORS[request.param]())
    return {**made, "name": request.param, "files": files}


def test_files_and_sizes_are_those_of_tiktoken(described: dict[str, Any]) -> None:
    ours = ENCODINGS[described["name"]]
    assert [(file.address, file.sha256) for file in ours.files] == described["files"]
    assert ours.n_vocab == max(described["special_tokens"].values()) + 1


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=mixed)
def test_our_split_is_tiktokens(described: dict[str, Any], text: str) -> None:
    if "encodings" not in described:
        described["encodings"] = [
            tiktoken.Encoding(
                "test", pat_str=pattern, mergeable_ranks=pair_ranks(), special_tokens={}
            )
            for pattern in (ENCODINGS[described["name"]].pattern, described["pat_str"])
        ]
    ours, theirs = described["encodings"]
    assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)


# Without the files, without a network (T15)


@pytest.mark.parametrize("name", ENCODINGS)
def test_an_encoding_that_cannot_be_had_says_what_to_put_where(name: str, offline: Path) -> None:
    with pytest.raises(TokenizerError) as caught:
        named_tokenizer(name)
    message = str(caught.value)
    assert "TIKTOKEN_CACHE_DIR" in message
    assert name in message
    assert str(offline) in message
    assert "\n" not in message
    for file in ENCODINGS[name].files:
        assert f"{file.address} as {hashlib.sha1(file.address.encode()).hexdigest()}" in message


def test_following_the_advice_helps(offline: Path, gpt2_cache: Path) -> None:
    first, second = ENCODINGS["gpt2"].files
    shutil.copy(gpt2_cache / first.cached_name, offline / first.cached_name)
    with pytest.raises(TokenizerError) as caught:
        named_tokenizer("gpt2")
    assert second.address in str(caught.value)
    assert first.address not in str(caught.value)
    shutil.copy(gpt2_cache / second.cached_name, offline / second.cached_name)
    assert named_tokenizer("gpt2").n_vocab == 50257


def test_a_damaged_file_is_named_and_left_alone(offline: Path) -> None:
    [file] = ENCODINGS["cl100k_base"].files
    (offline / file.cached_name).write_bytes(b"half of it")
    with pytest.raises(TokenizerError, match="damaged"):
        named_tokenizer("cl100k_base")
    assert (offline / file.cached_name).read_bytes() == b"half of it"
    assert missing_files("cl100k_base") == [file]


def test_a_network_that_never_answers_is_given_up(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(encodings, "CONNECT_SECONDS", 0.2)
        monkeypatch.setattr(encodings, "READ_SECONDS", 0.2)
        with pytest.raises(TokenizerError, match=r"Time|Proxy|Connection"):
            named_tokenizer("o200k_base")


def test_a_cache_that_is_turned_off_is_said_to_be(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    assert cache_folder() is None
    with pytest.raises(TokenizerError, match="TIKTOKEN_CACHE_DIR is empty"):
        named_tokenizer("o200k_base")


# Names and paths


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpt-2", "did you mean gpt2"),
        ("GPT-4o", "did you mean o200k_base"),
        ("gpt4", "did you mean cl100k_base"),
        ("cl100k", "did you mean cl100k_base"),
        ("byte", "did you mean bytes"),
        ("nowhere/at/all", "neither a name nor a path"),
        ("bpe", "learned from a corpus"),
        ("\0", "neither a name nor a path"),
        ("x" * 5000, "neither a name nor a path"),
    ],
)
def test_an_unknown_name_is_met_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(TokenizerError, match=hint) as caught:
        named_tokenizer(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_bytes_needs_no_file() -> None:
    assert named_tokenizer("bytes").fingerprint == Tokenizer.bytes().fingerprint


def test_a_path_may_be_a_file_a_model_a_run_or_prepared_data(tmp_path: Path) -> None:
    chars = Tokenizer.chars("abc")
    run = tmp_path / "run"
    chars.save(run / "model" / "tokenizer.json")
    (run / "model" / "config.json").write_text(
        json.dumps({"tokenizer_fingerprint": chars.fingerprint})
    )
    for path in (run, run / "model", str(run / "model" / "tokenizer.json")):
        assert named_tokenizer(path).fingerprint == chars.fingerprint
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        named_tokenizer(tmp_path)
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(TokenizerError, match="is a checkpoint; give the model folder"):
        named_tokenizer(tmp_path / "last.ckpt")


def test_a_tokenizer_that_is_not_its_models_is_refused(tmp_path: Path) -> None:  # T10
    Tokenizer.bytes().save(tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text(json.dumps({"tokenizer_fingerprint": "0" * 64}))
    with pytest.raises(TokenizerError, match="is not the model's"):
        named_tokenizer(tmp_path)


def test_the_original_files_are_imported_with_the_same_ids(
    gpt2: Tokenizer, gpt2_cache: Path, tmp_path: Path
) -> None:
    for file in ENCODINGS["gpt2"].files:
        name = file.address.rpartition("/")[2]
        shutil.copy(gpt2_cache / file.cached_name, tmp_path / name)
    found = open_vocabulary(tmp_path)
    assert found.encode(TEXT) == gpt2.encode(TEXT)
    assert found.fingerprint == gpt2.fingerprint
