"""Patterns: the predicate against plain loops, and what else they say against the predicate."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.checkpoint import load_model, save_model
from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.model import GPT
from gpt.patterns import (
    BigBird,
    Causal,
    Dilated,
    Fixed,
    LayerPatterns,
    Memory,
    Pattern,
    SlidingWindow,
    check_pattern,
    parse_pattern,
    parse_patterns,
    trust,
)
from gpt.tokenizer import Tokenizer
from tests import reference

BYTES = Tokenizer.bytes()


@dataclass(frozen=True)
class Primes(Pattern):
    """A user's own: itself, and what is a prime number of tokens back, or `also`."""

    also: int = 1

    def allowed(self, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
        back = q_pos - k_pos
        prime = torch.tensor([0, self.also, 2, 3, 5, 7, 11, 13, 17, 19])
        return (back[..., None] == prime).any(-1)


class NoPattern:
    """Something that no configuration may make."""


numbers = st.integers(1, 40)
texts = st.one_of(
    st.just("causal"),
    st.builds("window:{}".format, numbers),
    st.builds("window:{}+sinks:{}".format, numbers, st.integers(0, 9)),
    st.builds("window:{}+global:{}".format, numbers, st.integers(0, 9)),
    st.builds("dilated:{}:{}".format, numbers, st.integers(1, 9)),
    st.builds(
        lambda a, b: f"fixed:{max(a, b)}:{min(a, b)}", st.integers(1, 20), st.integers(1, 20)
    ),
    st.builds("bigbird:{}:{}:{}:{}".format, numbers, st.integers(0, 9), st.integers(0, 4), numbers),
)


def square(pattern: Pattern, length: int) -> torch.Tensor:
    at = torch.arange(length)
    return pattern.allowed(at[:, None], at)


@settings(deadline=None, max_examples=60)
@given(texts, st.sampled_from([1, 2, 30, 90]))
def test_the_predicate_is_the_definition_in_words(text: str, length: int) -> None:
    found = square(parse_pattern(text), length)
    wanted = [[reference.may_look(text, q, k) for k in range(length)] for q in range(length)]
    assert found.tolist() == wanted


def test_random_blocks_are_those_of_the_definition() -> None:
    """At lengths at which there are blocks to draw from."""
    text, length = "bigbird:5:3:2:11", 700
    found = square(parse_pattern(text), length)
    for q in [*range(0, length, 37), 127, 128, 699]:
        assert found[q].tolist() == [reference.may_look(text, q, k) for k in range(length)]


@settings(deadline=None, max_examples=60)
@given(texts, st.integers(1, 200), st.integers(1, 70))
def test_spans_hold_all_that_may_be_seen_and_a_single_querys_no_more(
    text: str, length: int, size: int
) -> None:
    pattern = parse_pattern(text)
    seen = square(pattern, length)
    assert pattern.pairs(length) == int(seen.sum())
    for first in range(0, length, size):
        last = min(first + size, length) - 1
        spans = pattern.spans(first, last)
        keys = [key for span in spans for key in span]
        assert keys == sorted(set(keys))
        assert set(seen[first : last + 1].any(0).nonzero()[:, 0].tolist()) <= set(keys)
        assert keys[-1] <= last
        exact = [key for span in pattern.spans(last, last) for key in span]
        assert exact == seen[last].nonzero()[:, 0].tolist()


@settings(deadline=None, max_examples=40)
@given(texts.filter(lambda text: not text.startswith("dilated")), st.sampled_from([8, 16, 64]))
def test_blocks_that_nobody_may_see_are_not_listed(text: str, size: int) -> None:
    pattern = parse_pattern(text)
    seen = square(pattern, 4 * size).unflatten(0, (4, size)).unflatten(2, (4, size))
    for q_block, row in enumerate(seen.any(1).any(-1)):
        assert pattern.key_blocks(q_block, size) == row.nonzero()[:, 0].tolist()


@settings(deadline=None, max_examples=60)
@given(texts, st.integers(1, 130))
def test_what_a_pattern_says_of_itself_is_true(text: str, length: int) -> None:
    pattern = parse_pattern(text)
    seen = square(pattern, length)
    assert seen.diagonal().all(), "each token sees itself"
    assert not seen.triu(1).any(), "none sees the future"

    until = min(length, pattern.causal_until)
    assert seen[:until, :until].sum() == until * (until + 1) // 2

    at, memory = torch.arange(length), pattern.memory
    if memory.window is not None:
        forgotten = (at[:, None] - at >= memory.window) & (at >= memory.sinks)
        assert not (seen & forgotten).any(), "what is forgotten is never asked for again"
    if pattern.relative:
        assert torch.equal(square(pattern, length), pattern.allowed(at[:, None] + 7, at + 7))
    if pattern.residues is not None:
        n, inner = pattern.residues
        alike = at[:, None] % n == at % n
        assert torch.equal(seen, alike & inner.allowed(at[:, None] // n, at // n))


def test_memory_is_as_small_as_the_pattern_allows() -> None:
    assert parse_pattern("causal").memory == Memory()
    assert parse_pattern("window:256+sinks:4").memory == Memory(256, 4)
    assert parse_pattern("dilated:4:3").memory == Memory(10)
    assert parse_pattern("fixed:8:2").memory == parse_pattern("bigbird:8:0:1").memory == Memory()
    assert [Memory(5, 2).positions(n) for n in (3, 7, 100)] == [3, 7, 7]
    assert Memory().positions(100) == 100


def test_bigbird_draws_by_seed_and_block_alone() -> None:
    pattern = BigBird(1, 0, 3, seed=5)
    q, k = torch.tensor([[64 * 9 + 1]]), torch.arange(64 * 9)
    drawn = pattern.allowed(q, k).unflatten(1, (9, 64)).all(-1)
    assert int(drawn.sum()) == 3
    assert torch.equal(pattern.allowed(torch.tensor([[64 * 9 + 1], [9999]]), k)[:1],
                       pattern.allowed(q, k))  # fmt: skip
    others = {tuple(BigBird(1, 0, 3, seed).spans(577, 577)) for seed in range(20)}
    assert len(others) > 10


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("causal", Causal()),
        ("window:256", SlidingWindow(256)),
        ("window:256+sinks:4", SlidingWindow(256, 4)),
        ("window:256+global:4", SlidingWindow(256, 4)),
        ("dilated:256:4", Dilated(256, 4)),
        ("fixed:128:8", Fixed(128, 8)),
        ("bigbird:192:64:3:7", BigBird(192, 64, 3, 7)),
        ("bigbird:192:64:3", BigBird(192, 64, 3, 0)),
        (f"{__name__}:Primes", Primes()),
        (f"{__name__}:Primes(4)", Primes(4)),
        (f"{__name__}:Primes(also=4)", Primes(4)),
    ],
)
def test_each_form_is_read(text: str, pattern: Pattern) -> None:
    check_pattern(text)
    assert parse_pattern(text) == pattern


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("widow:4", "did you mean window"),
        ("window", "must be one of causal, window:WIDTH"),
        ("window:0", "at least 1"),
        ("window:4+sink:2", "must be one of"),
        ("window:٣", "must be one of"),
        ("window:" + "9" * 5000, "must be one of"),
        ("dilated:4:0", "at least 1"),
        ("fixed:4:5", "the last 5 positions of a block of 4"),
        ("bigbird:1:2", "must be one of"),
        ("bigbird:1:2:9999", "at most 1000"),
        (f"{__name__}:Nothing", "no subclass of gpt.patterns.Pattern"),
        (f"{__name__}:NoPattern", "no subclass of gpt.patterns.Pattern"),
        ("subprocess:Popen(['true'])", "no subclass of gpt.patterns.Pattern"),
        (f"{__name__}:Primes(1, 2)", "cannot be made"),
        (f"{__name__}:Primes(open('x'))", "plain numbers"),
        (f"{__name__}:Primes(*[1])", "plain numbers"),
        (f"{__name__}:Primes(**{{}})", "plain numbers"),
        (f"{__name__}:Primes)(", "must be one of"),
        ("", "must be one of"),
        ("causal\n", "must be one of"),
    ],
)
def test_what_is_no_pattern_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pattern(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_list_repeats_over_the_layers() -> None:
    patterns = parse_patterns(["window:4", "window:4", "causal"])
    assert patterns == LayerPatterns((SlidingWindow(4), Causal()), (0, 0, 1))
    assert [patterns.of_layer(i) for i in range(4)] == [
        SlidingWindow(4), SlidingWindow(4), Causal(), SlidingWindow(4)
    ]  # fmt: skip
    assert parse_patterns("window:4") == LayerPatterns((SlidingWindow(4),))


# --- A class of one's own -------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that nobody has imported yet, and that leaves a trace when it is."""
    name = "pattern_of_somebody"
    (tmp_path / f"{name}.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "from dataclasses import dataclass\nfrom gpt.patterns import Pattern\n"
        "@dataclass(frozen=True)\nclass Even(Pattern):\n"
        "    def allowed(self, q, k):\n        return (k <= q) & ((q - k) % 2 == 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield f"{name}:Even"
    sys.modules.pop(name, None)
    parse_pattern.cache_clear()


def test_reading_a_configuration_runs_no_code_of_others(module: str, tmp_path: Path) -> None:
    config = GPTConfig(pattern=[module, "causal"], vocab_size=9)
    assert config.patterns == (module, "causal")
    with pytest.raises(ConfigError, match="set ANTIPHON_PATTERN_MODULES=pattern_of_somebody"):
        GPT(config)
    assert not (tmp_path / "ran").exists()


def test_a_model_folder_cannot_bring_code(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GPTConfig.preset("nano", vocab_size=BYTES.n_vocab)
    save_model(tmp_path / "model", GPT(config), BYTES)
    file = tmp_path / "model" / "config.json"
    file.write_text(file.read_text().replace('"causal"', f'"{module}"'))
    with pytest.raises(CheckpointError, match="importing it runs its code; if you trust it"):
        load_model(tmp_path / "model")
    assert not (tmp_path / "ran").exists()

    monkeypatch.setenv("ANTIPHON_PATTERN_MODULES", "other, pattern_of_somebody")
    loaded = load_model(tmp_path / "model").model
    assert (tmp_path / "ran").exists()
    ids = torch.randint(0, 9, (1, 12))
    changed = ids.clone()
    changed[0, 4] += 1
    other = (loaded(ids) != loaded(changed)).any(-1)[0]
    assert other.tolist() == [False] * 4 + [i % 2 == 0 for i in range(4, 12)]


def test_settings_of_ones_own_may_name_ones_own_code(module: str) -> None:
    trust(["causal", module])
    try:
        assert type(parse_pattern(module)).__name__ == "Even"
    finally:
        from gpt.patterns import text

        text._trusted.clear()


def test_a_module_that_is_not_there_is_named() -> None:
    trust("no_such_module_here:Mine")
    with pytest.raises(ConfigError, match=r"cannot be imported .* is its folder on PYTHONPATH"):
        parse_pattern("no_such_module_here:Mine")
