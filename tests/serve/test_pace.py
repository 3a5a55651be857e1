"""How much of prompts is read beside texts, against machines whose speed is made up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt.checkpoint import save_model
from gpt.config import GPTConfig
from gpt.errors import UserError
from gpt.model import GPT
from gpt.params import SamplingParams
from gpt.sequence import Sequence
from gpt.starter import Starter
from gpt.tokenizer import Tokenizer
from serve.asked import Asked
from serve.pace import LEAST, PROBE_EVERY, Pace
from serve.server import load, parse
from tests.serve.test_scheduler import run, scheduler, sequence


@given(
    text=st.floats(1e-5, 0.1),
    token=st.floats(1e-7, 0.1),
    fixed=st.floats(1e-3, 1),
    texts=st.integers(1, 200),
    stretch=st.floats(1.1, 4),
)
def test_a_step_takes_no_longer_than_allowed(
    text: float, token: float, fixed: float, texts: int, stretch: float
) -> None:
    """But for the least that a prompt must get on by; and what is allowed is used."""
    pace = Pace(stretch, 512)
    alone = fixed + text * texts
    limits = []
    for _ in range(200):
        limit = pace.limit(texts)
        pace.ran(texts, limit, alone + token * limit)
        limits.append(limit)
    allowed = (stretch - 1) * alone / token
    last = [limit for limit in limits[-60:] if limit]
    assert all(LEAST <= limit <= max(LEAST, min(512, 1.26 * allowed)) for limit in last)
    assert max(last) >= min(512, allowed / 1.26) - 1


def test_now_and_then_a_step_without_prompts_tells_what_one_takes() -> None:
    pace = Pace(1.5, 512)
    assert pace.limit(4) == 0, "nothing is known yet"
    pace.ran(4, 0, 1.0)
    limits = []
    for _ in range(2 * (PROBE_EVERY + 1)):
        limits.append(pace.limit(4))
        pace.ran(4, limits[-1], 1.0 if limits[-1] == 0 else 1.1)
    assert limits.count(0) == 2
    assert limits[PROBE_EVERY] == 0


def test_one_slow_moment_is_made_good() -> None:
    pace = Pace(1.5, 512)
    pace.ran(4, 0, 1.0)
    for slow in (False, True, False):
        for _ in range(30):
            limit = pace.limit(4)
            pace.ran(4, limit, 1 + 0.01 * limit + slow)
        assert (limit == LEAST) == slow
    assert limit > 30


def test_nobody_waits_for_prompts_alone_so_they_are_read_whole() -> None:
    pace = Pace(1.5, 512)
    pace.ran(0, 512, 100.0)
    assert pace.limit(0) == 512


@pytest.mark.parametrize("stretch", [1, 0.5, float("nan")])
def test_a_stretch_below_one_is_refused(stretch: float) -> None:
    with pytest.raises(ValueError, match="above 1"):
        Pace(stretch, 512)


def test_a_prompt_is_cut_so_that_who_streams_hardly_waits() -> None:
    it = scheduler(chunk=64, running=4)
    it.pace = Pace(1.5, 64)
    streaming = sequence(prompt=1, max_tokens=400)
    it.add([streaming])
    for _ in range(3):
        work = run(it)
        it.pace.ran(len(work), 0, 1.0)
    long, longer = sequence(prompt=100, max_tokens=1), sequence(prompt=90, max_tokens=1)
    it.add([long])
    it.add([longer])
    read: list[int] = []
    while len(it) > 1:
        work = run(it)
        assert work[streaming] == 1, "a stream never waits for a prompt"
        read.append(sum(work.values()) - 1)
        assert read[-1] <= max(LEAST, 16), "at 0.05 a token a step has room for 10"
        it.pace.ran(1, read[-1], 1 + 0.05 * read[-1])
    assert sum(read) == 190
    assert long.full
    assert longer.full


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    it = scheduler(chunk=64, running=4)
    it.pace = Pace(1.5, 64)
    it.add([sequence(prompt=1, max_tokens=400)])
    for _ in range(3):
        it.pace.ran(len(run(it)), 0, 1.0)
    long, short = sequence(prompt=200, max_tokens=1), sequence(prompt=10, max_tokens=1)
    it.add([long])
    it.add([short])
    steps = 0
    while not short.full:
        work = run(it)
        it.pace.ran(1, sum(work.values()) - 1, 1.4)
        steps += 1
    assert steps <= 10 / (LEAST / 2) + 2, "two of the steps are to measure"
    assert long.computed >= 8, "nor does it wait for short ones"


@pytest.mark.parametrize(
    ("flags", "paced"),
    [([], True), (["--prefill-stretch", "0"], False), (["--deterministic"], False)],
    ids=str,
)
def test_a_server_reads_prompts_at_a_pace_unless_told_not_to(
    flags: list[str], paced: bool, tmp_path: Path
) -> None:
    """Texts that must not depend on the machine's speed are read whole, too."""
    config = GPTConfig(vocab_size=257, block_size=512, n_layer=1, n_head=2, d_model=16)
    save_model(tmp_path / "model", GPT(config), Tokenizer.bytes())
    settings = parse([str(tmp_path / "model"), "--max-running", "4", *flags], "antiphon serve")
    engine = load(settings, settings.models[0])
    starter = Starter(config, engine.tokenizer)

    def text(length: int) -> Sequence:
        params = SamplingParams(max_tokens=100, seed=0, ignore_end_of_text=True)
        return starter.start([1] * length, params)

    async def drive() -> Sequence:
        engine.submit(Asked([text(1)]))
        for _ in range(3):
            engine.turn()
        long = text(300)
        engine.submit(Asked([long]))
        for _ in range(3):
            engine.turn()
        return long

    read = asyncio.run(drive()).computed
    assert 0 < read < 8 * LEAST if paced else read >= 300


def test_the_setting_has_a_default_and_a_least() -> None:
    assert parse(["model"], "serve").prefill_stretch == 1.7
    assert parse(["model", "--prefill-stretch", "0"], "serve").prefill_stretch == 0
    with pytest.raises((SystemExit, UserError)):
        parse(["model", "--prefill-stretch", "0.5"], "serve")
