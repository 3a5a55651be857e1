"""The guide: its commands run in the order of its pages; the site is built without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.documented import ROOT, complaints, run_pages

CONFIG = ROOT / "mkdocs.yml"
# Other tests have these: integration/test_demo.py, weights/test_smollm2.py, test_completion.py.
ELSEWHERE = {"make demo", "make smollm2", "antiphon completion bash > antiphon.bash"}


def nav() -> list[Path]:
    """The pages in the order in which the site shows them."""

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry
        return [page for child in children for page in pages(child)]

    found = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["nav"]
    return [ROOT / "docs" / page for page in pages(found)]


GUIDE = [
    page
    for page in nav()
    if page.parent.name == "guide" or page.name in ("index.md", "operations.md")
]


def test_every_page_of_the_docs_is_in_the_navigation() -> None:
    assert sorted(nav()) == sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_every_block_says_what_it_is(page: Path) -> None:
    assert complaints(page) == []


@pytest.mark.integration
@pytest.mark.timeout(900)  # some twenty-five processes, most of which import torch
def test_every_command_runs(tmp_path: Path) -> None:
    assert run_pages(GUIDE, tmp_path, ELSEWHERE) >= 15


@pytest.mark.integration
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in nav()}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        # What a browser would load by itself; links are for people to follow.
        loaded = re.findall(
            r"""<(?:script|img|iframe|source)[^>]+src=["']?(https?:[^"'\s>]+)"""
            r"""|<link[^>]+rel=["']?(?:stylesheet|icon|preconnect)[^>]+href=["']?(https?:[^"'\s>]+)"""
            r"""|(?:@import|url\()\s*["']?(https?:[^"')\s]+)""",
            path.read_text(encoding="utf-8"),
        )
        assert loaded == [], path
