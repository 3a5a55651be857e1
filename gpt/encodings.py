"""Ready tokenizers by name: tiktoken's encodings, and the vocabularies that lie in folders.

tiktoken has the merge tables of its encodings in files that it downloads once into a cache. Where
they are missing and no network is at hand, the error says what to put where.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from gpt.errors import TokenizerError
from gpt.splitting import CL100K_PATTERN, GPT2_PATTERN, O200K_PATTERN
from gpt.tokenizer import FILE_NAME, Tokenizer

CACHE_VARIABLES = ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR")
CONNECT_SECONDS = 5.0
READ_SECONDS = 10.0

_HOST = "https://openaipublic.blob.core.windows.net"


@dataclass(frozen=True)
class EncodingFile:
    """A file that an encoding is made of.

    Attributes:
        address: where tiktoken downloads it from.
        sha256: of its content (hex).
    """

    address: str
    sha256: str

    @property
    def cached_name(self) -> str:
        """What tiktoken calls it in its cache: the SHA-1 of its address."""
        return hashlib.sha1(self.address.encode()).hexdigest()


@dataclass(frozen=True)
class Encoding:
    """One of tiktoken's encodings.

    Attributes:
        files: what it is made of.
        pattern: how it splits text. Ours, not the one in tiktoken, which is spelled otherwise from
            release to release: a model's tokenizer must not change its identity with that.
        n_vocab: one more than its largest id.
    """

    files: tuple[EncodingFile, ...]
    pattern: str
    n_vocab: int


ENCODINGS: dict[str, Encoding] = {
    "gpt2": Encoding(
        (
            EncodingFile(
                f"{_HOST}/gpt-2/encodings/main/vocab.bpe",
                "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
            ),
            EncodingFile(
                f"{_HOST}/gpt-2/encodings/main/encoder.json",
                "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
            ),
        ),
        GPT2_PATTERN,
        50_257,
    ),
    "cl100k_base": Encoding(
        (
            EncodingFile(
                f"{_HOST}/encodings/cl100k_base.tiktoken",
                "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
            ),
        ),
        CL100K_PATTERN,
        100_277,
    ),
    "o200k_base": Encoding(
        (
            EncodingFile(
                f"{_HOST}/encodings/o200k_base.tiktoken",
                "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
            ),
        ),
        O200K_PATTERN,
        200_019,
    ),
}


def named_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of that name, or the one that lies there.

    Args:
        name: `gpt2`, `cl100k_base`, `o200k_base`, `bytes`; or the path of a `tokenizer.json`, a
            model folder, a run folder, or a folder of prepared data. A name goes before a file of
            that name; write `./gpt2` for the file.

    Raises:
        TokenizerError: no such name or path, an encoding that is neither cached nor to be had, or a
            file that is damaged or another than its model's.
    """
    if name in ENCODINGS:
        return _encoding(str(name))
    if name == "bytes":
        return Tokenizer.bytes()
    path = Path(name).expanduser()
    try:
        there = bool(str(name)) and path.exists()
    except (OSError, ValueError):  # a name too long, a NUL in it
        there = False
    if not there:
        raise TokenizerError(_unknown(str(name)))
    if path.is_file():
        if path.suffix == ".ckpt":
            raise TokenizerError(
                f"{path} is a checkpoint; give the model folder that lies beside it in the run "
                f"folder, or a {FILE_NAME}"
            )
        return Tokenizer.load(path)
    for folder in (path, path / "model"):
        if (folder / FILE_NAME).is_file():
            return _from_folder(folder)
    raise TokenizerError(
        f"{path} has no {FILE_NAME}: give a model folder, a run folder, or a folder of prepared "
        f"data, or one of {', '.join(ENCODINGS)}, bytes"
    )


def cache_folder() -> Path | None:
    """Where tiktoken keeps its files; None if its cache is turned off by an empty variable."""
    for variable in CACHE_VARIABLES:
        if (folder := os.environ.get(variable)) is not None:
            return Path(folder) if folder else None
    return Path(tempfile.gettempdir()) / "data-gym-cache"


def missing_files(name: str) -> list[EncodingFile]:
    """Files of that encoding which are not in the cache, or not as they should be."""
    folder = cache_folder()
    return [file for file in ENCODINGS[name].files if not _is_cached(folder, file)]


def _is_cached(folder: Path | None, file: EncodingFile) -> bool:
    if folder is None:
        return False
    try:
        content = (folder / file.cached_name).read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content).hexdigest() == file.sha256


@functools.lru_cache(maxsize=len(ENCODINGS))
def _encoding(name: str) -> Tokenizer:
    described = ENCODINGS[name]
    # Asked first, with a limit: tiktoken's own download has none, and before it begins, it deletes
    # what lies in the cache and is not as it should be.
    missing = missing_files(name)
    if missing and (reason := _unreachable(missing[0].address)):
        raise TokenizerError(_offline(name, missing, reason))
    try:
        found = tiktoken.get_encoding(name)
    except (OSError, ValueError, AssertionError) as error:  # requests' errors are OSErrors
        raise TokenizerError(_offline(name, missing_files(name), _reason(error))) from None
    ranks: dict[bytes, int] = found._mergeable_ranks
    tokens = [b""] * (1 + max(ranks.values()))
    for token, rank in ranks.items():
        tokens[rank] = token
    special: dict[str, int] = found._special_tokens
    return Tokenizer(name, described.pattern, tokens, special=special)


def _unreachable(address: str) -> str:
    """Why nothing can be downloaded from there; empty if it can."""
    import requests

    try:
        requests.head(address, timeout=(CONNECT_SECONDS, READ_SECONDS)).raise_for_status()
    except (OSError, ValueError) as error:
        return _reason(error)
    return ""


def _reason(error: BaseException) -> str:
    """The kind of error, without the pages of text that requests puts into one."""
    text = str(error)
    return type(error).__name__ + (f": {text}" if 0 < len(text) <= 80 and "\n" not in text else "")


def _offline(name: str, missing: list[EncodingFile], reason: str) -> str:
    folder = cache_folder()
    if folder is None:
        state = "the cache is turned off, since TIKTOKEN_CACHE_DIR is empty"
    else:
        there = {(folder / file.cached_name).exists() for file in missing}
        how = {frozenset([True]): "damaged", frozenset([False]): "missing"}.get(
            frozenset(there), "missing or damaged"
        )
        state = f"what it is made of is {how} in {folder}"
    wanted = " and ".join(f"{file.address} as {file.cached_name}" for file in missing)
    return (
        f"the encoding {name} cannot be loaded: {state}, and the download failed ({reason}). "
        f"Where there is a network, save {wanted}; put {'it' if len(missing) == 1 else 'them'} "
        "into a folder of your own here and set TIKTOKEN_CACHE_DIR to that folder"
    )


def _unknown(name: str) -> str:
    shown = repr(name[:80])
    known = [*ENCODINGS, "bytes"]
    if name in ("bpe", "chars"):
        return (
            f"a {name} tokenizer is learned from a corpus, there is none ready; give the folder of "
            "data prepared with it, a model's, or one of " + ", ".join(known)
        )
    near = difflib.get_close_matches(name, known, n=1)
    with contextlib.suppress(KeyError):
        # A model's name, written in any way: gpt4, GPT-4o.
        model = re.sub(r"^gpt-?(?=\d)", "gpt-", name.lower())
        near = [tiktoken.encoding_name_for_model(model)]
    hint = f"; did you mean {near[0]}?" if near and near[0] in known else ""
    return (
        f"the tokenizer {shown} is neither a name nor a path that exists{hint} (the names are "
        f"{', '.join(known)}; a path is that of a {FILE_NAME}, or of a folder with one)"
    )


def _from_folder(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(folder / FILE_NAME)
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return tokenizer  # prepared data has none; who opens the model says what is wrong with it
    wanted = config.get("tokenizer_fingerprint") if isinstance(config, dict) else None
    if isinstance(wanted, str) and wanted != tokenizer.fingerprint:
        raise TokenizerError(
            f"{folder / FILE_NAME} is not the model's: its fingerprint is "
            f"{tokenizer.fingerprint[:12]}, the model was trained with {wanted[:12]}; put back the "
            "tokenizer.json that was saved with the model"
        )
    return tokenizer
