"""The page of a run, made from what lies in its folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gpt.errors import DataError
from gpt.training.curves import curves_svg, read_run, smooth, thin
from gpt.training.report import duration, main, one_run, results, several_runs, write_report

ROOT = Path(__file__).resolve().parents[2]

RECORD = {
    "format": "antiphon-run/1", "parameters": 1234567, "batch_tokens": 1000, "train_tokens": 4000,
    "max_steps": 40, "source": "texts/*.txt", "speed_limit": "a product measured here",
    "environment": {"Python": "3.11.7", "processor": "a slow one"},
    "sittings": [
        {"began": "2026-01-01T00:00:00", "from_step": 0, "to_step": 20, "seconds": 4000,
         "state": "interrupted", "command": "train.py fit"},
        {"began": "2026-01-02T00:00:00", "from_step": 20, "to_step": 40, "seconds": 3300.5,
         "state": "finished", "command": "train.py fit --resume"},
    ],
}  # fmt: skip


def make_run(folder: Path, lr: float = 0.01) -> Path:
    folder.mkdir(parents=True)
    rows = ["step,train/loss,lr,tokens_per_s,mfu,val/loss,val/bpb"]
    for step in range(10, 41, 10):
        rows.append(f"{step},{5 - step / 20},{lr},{900 + step},0.25,,")
        rows.append(f"{step},,,,,{4 - abs(step - 30) / -50},{3 + step / 1000}")
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    (folder / "config.yaml").write_text(
        f"name: {folder.name}\nmodel:\n  optimizer:\n    lr: {lr}\n"
    )
    (folder / "run.json").write_text(json.dumps(RECORD))
    (folder / "samples.txt").write_text(
        "--- step 20\nking\n\n--- step 40\n<script>alert('king')</script> & 國王 \x00\x1b[2J\n\n"
        "--- step 40\nqueen\nsecond line\n\n",
        encoding="utf-8",
    )
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "one")


class Outside(HTMLParser):
    """Collects tags, and whatever a page would fetch from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            local = (value or "").startswith(("data:", "#"))
            if name in ("src", "href", "xlink:href", "srcset", "poster") and not local:
                self.fetched.append(f"{tag} {name}={value}")
            assert not name.startswith("on")


def test_the_page_holds_results_curves_samples_environment_and_configuration(run: Path) -> None:
    page = write_report(run).read_text(encoding="utf-8")
    for part in ("<svg", "nats per token", "a slow one", "lr: 0.01", "train.py fit --resume",
                 "step 40 of 40, finished", "queen\nsecond line", "國王"):  # fmt: skip
        assert part in page
    assert page.index("step 40<") < page.index("step 20<")  # the newest first
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_results_are_those_of_the_best_validation_and_of_all_sittings(run: Path) -> None:
    found = dict(results(read_run(run)))
    assert found["best validation loss"] == "4.0000 nats per token"
    assert found["at step"] == "30"
    assert found["perplexity"] == "54.60"
    assert found["bits per byte"] == "3.0300"
    assert found["tokens seen"] == "40,000, 1,000 a step"
    assert found["times through the text"] == "10.00"
    assert found["time"] == "2 h 1 min in 2 sittings"
    assert found["tokens per second"] == "925 (median)"
    assert found["MFU"] == "25.0% (median), the share of a product measured here"


def test_the_page_fetches_nothing_runs_nothing_and_escapes_what_the_model_wrote(run: Path) -> None:
    page = one_run(read_run(run))
    outside = Outside()
    outside.feed(page)
    assert outside.fetched == []
    assert "script" not in outside.tags
    assert "&lt;script&gt;" in page
    assert "\x00" not in page
    assert "\x1b" not in page
    assert "default-src 'none'" in page
    assert "color-scheme: light dark" in page
    assert 'name="viewport"' in page


def test_curves_take_the_ink_of_the_page(run: Path) -> None:
    svg = curves_svg([read_run(run)])
    assert "currentColor" in svg
    assert "#010203" not in svg
    head = svg[: svg.index(">")]
    assert "viewBox" in head
    assert " width=" not in head
    assert ">loss, nats per token<" in svg  # text, not outlines
    assert svg == curves_svg([read_run(run)])


def test_several_runs_are_laid_over_each_other_with_the_settings_that_differ(run: Path) -> None:
    other = make_run(run.parent / "two", lr=0.003)
    page = several_runs([read_run(run), read_run(other)])
    table = page[page.index("Settings that differ") :]
    assert re.search(r"model.optimizer.lr.*0\.01.*0\.003", table)
    assert ">two<" in page
    assert "name<" not in table
    assert main([str(run), str(other)], "antiphon report") == 0
    assert (run.parent / "comparison.html").is_file()


def test_the_command_writes_where_it_is_told_and_finds_a_run_by_name(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.parent / "runs").mkdir()
    run.rename(run.parent / "runs" / "one")
    monkeypatch.chdir(run.parent)
    assert main(["one", "--out", "page.html"], "antiphon report") == 0
    assert capsys.readouterr().out == "page.html\n"
    assert "<svg" in Path("page.html").read_text(encoding="utf-8")
    assert not Path("runs/one/report.html").exists()
    with pytest.raises(DataError, match=r"no run at on: .*did you mean one\?"):
        main(["on"], "antiphon report")


def test_a_killed_run_has_a_page_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/loss\n10,4.5\n20,4.\n3")
    (tmp_path / "run.json").write_text('{"sittings": [{"st')
    (tmp_path / "samples.txt").write_bytes(b"--- step 10\n\xff\xfe half\n\n--- ste")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "4.0000" in page
    assert "half" in page


@pytest.mark.parametrize("rows", ["step\n", "step,train/loss\n10,nan\n20,inf\n"])
def test_a_run_without_a_number_has_a_page_too(tmp_path: Path, rows: str) -> None:
    (tmp_path / "metrics.csv").write_text(rows)
    assert "<svg" in one_run(read_run(tmp_path))


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a run's folder: metrics.csv cannot be read"):
        read_run(tmp_path)


def test_smoothing_starts_at_the_first_value_and_thinning_keeps_the_last() -> None:
    assert smooth([3.0, 3.0, 3.0], 10) == pytest.approx([3.0, 3.0, 3.0])
    assert smooth([4.0, 2.0], 1) == pytest.approx([4.0, 2.0])
    steps, values = thin((list(range(10)), [float(i) for i in range(10)]), most=4)
    assert steps == [0, 3, 6, 9]
    assert values[-1] == 9
    assert thin(([], [])) == ([], [])


def test_durations_are_said_as_people_say_them() -> None:
    said = [duration(seconds) for seconds in (4.4, 75, 3700, 90000)]
    assert said == ["4 s", "1 min 15 s", "1 h 1 min", "1 d 1 h"]


def test_a_picture_of_a_long_run_is_small(tmp_path: Path) -> None:
    rows = "\n".join(f"{step},{5 - step / 1e5},0.1,100" for step in range(1, 50001))
    (tmp_path / "metrics.csv").write_text("step,train/loss,lr,tokens_per_s\n" + rows)
    assert len(curves_svg([read_run(tmp_path)])) < 300_000


def test_a_report_needs_neither_torch_nor_lightning(run: Path) -> None:
    code = (
        "import sys; from gpt.training.report import main; main([*sys.argv[1:]], 'x'); "
        "print([m for m in ('torch', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
