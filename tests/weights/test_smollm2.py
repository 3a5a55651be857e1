"""`make smollm2`: a GGUF file out of a wheel, once; here out of a small one of our own."""

from __future__ import annotations

import hashlib
import re
import zipfile
from pathlib import Path

import pytest

from gpt.checkpoint import load_model, save_model
from gpt.config import GPTConfig
from gpt.data.wheels import Wheel
from gpt.errors import DataError
from gpt.model import GPT
from gpt.splitting import PATTERNS
from gpt.tokenizer import Tokenizer
from gpt.weights import smollm2
from gpt.weights.gguf_export import export_gguf

ROOT = Path(__file__).resolve().parents[2]
MEMBER = "small/model.gguf"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Wheel, Path, int]:
    """A wheel with a model that chats, where it lies, and how large the model is."""
    folder = tmp_path_factory.mktemp("wheel")
    tokenizer = Tokenizer.bpe(["to be or not to be"] * 3, 270, PATTERNS["gpt2"])
    config = GPTConfig(
        vocab_size=tokenizer.n_vocab, block_size=32, n_layer=1, n_head=2, d_model=32,
        position="rotary", norm="rmsnorm", mlp="swiglu", bias=False,
    )  # fmt: skip
    save_model(folder / "model", GPT(config), tokenizer, chat_template="{{ messages }}")
    gguf = folder / "model.gguf"
    export_gguf(load_model(folder / "model"), gguf)
    path = folder / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, MEMBER)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("small==1.0", path.name, sha256), path, gguf.stat().st_size


def test_the_model_is_imported_once(
    wheel: tuple[Wheel, Path, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made, path, size = wheel
    cache, out = tmp_path / "cache", tmp_path / "models" / "small"
    monkeypatch.setenv("ANTIPHON_CACHE", str(cache))
    cache.mkdir()
    (cache / path.name).write_bytes(path.read_bytes())
    with pytest.raises(DataError, match=r"should have 7 bytes, but has others"):
        smollm2.fetch(out, made, MEMBER, 7)
    assert not out.exists()
    assert smollm2.fetch(out, made, MEMBER, size) == 0
    assert f"antiphon chat {out}" in capsys.readouterr().out
    assert load_model(out).chat_template == "{{ messages }}"
    assert [file.name for file in cache.iterdir()] == [path.name]  # nothing is left lying about
    (cache / path.name).unlink()
    assert smollm2.fetch(out, made, MEMBER, size) == 0  # all of it is there
    assert "fetching" not in capsys.readouterr().out


def test_the_make_target_names_the_default_folder() -> None:
    target = re.search(r"^smollm2:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target is not None
    assert target[1].endswith(f"-m {smollm2.__name__} {smollm2.OUT}")
    assert f"/{smollm2.OUT.partition('/')[0]}/" in (ROOT / ".gitignore").read_text().split()
