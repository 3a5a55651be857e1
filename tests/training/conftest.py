from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.small import write_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "text.txt")
