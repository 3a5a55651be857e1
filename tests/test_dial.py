"""`antiphon size`: what follows from a depth, and that the trainer takes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpt.dial import TOKENS_PER_PARAMETER, dial, main
from gpt.errors import ConfigError
from gpt.size import matrix_count


@given(
    depth=st.integers(1, 40), vocab=st.integers(2, 60_000), block=st.integers(8, 4096),
    aspect=st.integers(1, 128), tokens=st.none() | st.integers(1, 10**12),
)  # fmt: skip
def test_the_budget_is_spent_in_whole_steps_and_heads_fill_the_width(
    depth, vocab, block, aspect, tokens
):
    found = dial(depth, vocab, block, tokens, aspect)
    config = found.config
    assert config.n_layer == depth
    assert config.d_model == config.n_head * config.head_width >= depth * aspect
    assert found.tokens == found.steps * found.batch_tokens
    budget = TOKENS_PER_PARAMETER * matrix_count(config) if tokens is None else tokens
    assert abs(found.tokens - budget) <= max(found.batch_tokens, budget / 2)
    assert 0 < found.lr < 0.02


def test_a_deeper_model_is_wider_sees_more_in_larger_steps_and_learns_slower():
    small, large = dial(4, 2048), dial(12, 2048)
    assert (small.config.d_model, large.config.d_model) == (256, 768)
    assert large.tokens > 5 * small.tokens
    assert large.batch_tokens > small.batch_tokens
    assert large.lr < small.lr
    assert large.muon_lr == small.muon_lr, "Muon's rate is the same at any width"


@pytest.mark.parametrize("argument", ["--aspect", "--vocab-size", "--block-size", "--tokens"])
def test_a_number_out_of_range_is_named(argument):
    with pytest.raises(ConfigError, match=f"{argument[2:]} is 0, but must be at least 1"):
        main(["4", argument, "0"], "antiphon size")


def test_a_depth_that_is_no_number_is_a_users_mistake():
    with pytest.raises(ConfigError, match="depth is 'deep', but must be a whole number"):
        main(["deep"], "antiphon size")


def test_the_config_is_written_once_and_describes_the_model(tmp_path: Path, capsys):
    path = tmp_path / "mine.yaml"
    assert main(["2", "--aspect", "16", "--write", str(path)], "antiphon size") == 0
    shown = capsys.readouterr().out
    assert f"antiphon train fit --config {path}" in shown
    settings = yaml.safe_load(path.read_text())
    assert settings["model"]["config"]["d_model"] == 32
    assert settings["model"]["optimizer"]["kind"] == "muon"
    from gpt.subject import find

    assert find(str(path)).config.n_layer == 2
    with pytest.raises(ConfigError, match="is there already"):
        main(["2", "--write", str(path)], "antiphon size")
    with pytest.raises(ConfigError, match="takes one depth, but there are 2"):
        main(["2", "3", "--write", str(tmp_path / "other.yaml")], "antiphon size")
