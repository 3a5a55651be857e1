"""`antiphon demo` from end to end, shortened; and that nothing is left running, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpt.checkpoint import load_model
from gpt.data.ngram import ngram_bits_per_byte
from gpt.data.prepare import prepare
from gpt.params import SamplingParams
from serve.demo import DemoError, compare_with_baseline, serve_and_call
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """\
model:
  preset: nano
  config:
    block_size: 32
trainer:
  max_steps: 12
  val_check_interval: 6
data:
  tokenizer: bytes
  batch_size: 4
samples:
  max_tokens: 8
"""
TEXT = "It rained, and then it rained again.\n" * 60

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "short.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that leads a process group in which afterwards nothing may be left."""
    process = warm.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def demo(*arguments: str) -> list[str]:
    settings = ["--config", "short.yaml", "--source", "text.txt", "--prompt", "It"]
    return ["-m", "gpt", "demo", *settings, "--tokens", "12", *arguments]


def nothing_is_left_of(process: subprocess.Popen[str]) -> bool:
    """Whether the group is empty; the system may need a moment to bury the last of it."""
    for _ in range(100):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def read_until(process: subprocess.Popen[str], pattern: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if re.search(pattern, line):
            return
    pytest.fail(f"{pattern!r} never came:\n{''.join(seen)}")


def test_the_demo_goes_the_whole_way(folder: Path) -> None:
    with started(folder, *demo("--no-baseline-check")) as process:
        shown, _ = process.communicate(timeout=240)
        assert process.returncode == 0, shown
        assert nothing_is_left_of(process)
    for expected in (
        r"^\[1/4\] ", r"^step 12/12 ", r"^\[2/4\] ", r"this model +\d+\.\d{3}",
        r"5-gram \(baseline\) +\d+\.\d{3}", r"^\[3/4\] ", r"^ +\| It", r"^\[4/4\] ",
        r"ready on 127\.0\.0\.1:\d+", r"what the local sampler writes", r"ended with status 0",
        r"sample runs/demo/model --prompt It$",
    ):  # fmt: skip
        assert re.search(expected, shown, re.MULTILINE), f"{expected} is not in\n{shown}"
    # Three texts: the sampled one here, and both over gRPC.
    assert len(re.findall(r"^ +\| It", shown, re.MULTILINE)) == 3


def test_a_demo_that_is_stopped_while_training_takes_the_training_with_it(folder: Path) -> None:
    with started(folder, *demo("--max-steps", "1000000")) as process:
        read_until(process, r"^step ")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
        assert nothing_is_left_of(process)


def test_a_demo_that_is_stopped_while_serving_takes_the_server_with_it(
    folder: Path, model_folder: Path
) -> None:
    code = (
        "import signal, sys; from pathlib import Path\n"
        "from serve.demo import ended_by_signals, served\n"
        "with ended_by_signals(), served(Path(sys.argv[1])) as (_, address):\n"
        "    print('up', address, flush=True); signal.pause()"
    )
    with started(folder, "-c", code, str(model_folder)) as process:
        read_until(process, r"^up 127\.0\.0\.1:\d+$")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert nothing_is_left_of(process)


def test_a_training_that_fails_ends_the_demo_with_one_line(folder: Path) -> None:
    with started(folder, *demo("--config", "no-such-config")) as process:
        shown, _ = process.communicate(timeout=60)
        assert process.returncode == 1
    assert shown.splitlines()[-1].startswith("antiphon demo: error: training ended with status 1")
    assert "Traceback" not in shown


def test_a_streamed_text_that_differs_fails_the_demo_and_shows_both(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm.executable())  # its server is one of a few
    params = SamplingParams(temperature=0, max_tokens=4, seed=1)
    with pytest.raises(DemoError, match='over gRPC, "not this" here'):
        serve_and_call(
            load_model(model_folder), "It", {"sampled": params, "greedy": params}, "not this"
        )


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_a_model_must_beat_the_baseline(
    folder: Path, factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    baseline = ngram_bits_per_byte(prepare("text.txt", tokenizer="bytes", progress=False))
    (folder / "config.yaml").write_text(
        "data: {source: text.txt, tokenizer: bytes, vocab_size: 9, root: data, val_fraction: 0.1}"
    )
    (folder / "metrics.csv").write_text(
        f"step,val/bpb\n10,{baseline * 3}\n15,\n20,{baseline * factor}\n"
    )
    if factor < 1:
        compare_with_baseline(folder, check=True)
        assert "the model needs 50% less" in capsys.readouterr().out
    else:
        compare_with_baseline(folder, check=False)
        with pytest.raises(DemoError, match=r"no fewer than the baseline's"):
            compare_with_baseline(folder, check=True)
