"""`antiphon bench recall`: the task is what it says, and a run can be repeated and stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpt.bench import command, recall, recalling


@settings(max_examples=30, deadline=None)
@given(
    pairs=st.integers(1, 8), more=st.integers(0, 40), seed=st.integers(0, 999), exact=st.booleans()
)
def test_each_answer_stands_behind_its_key_at_the_distance(
    pairs: int, more: int, seed: int, exact: bool
) -> None:
    distance = pairs + more
    rng = torch.Generator().manual_seed(seed)
    texts = recalling.make_texts(3, distance, pairs, rng, exact=exact)
    assert texts.ids.shape == (3, recalling.text_length(distance, pairs))
    for row, ids in enumerate(texts.ids.tolist()):
        said = [divmod(each - recalling.FIRST_PAIR, recalling.VALUES) for each in ids[:pairs]]
        value_of = {key: recalling.FIRST_VALUE + value for key, value in said}
        assert sorted(value_of) == sorted(key for key, _ in said)
        assert all(0 <= key < recalling.KEYS for key in value_of)
        asked = texts.asked[row].tolist()
        first = int(texts.pair[row])
        assert said[first][0] == ids[asked[0]]
        off = asked[0] - first - distance
        assert off == 0 if exact else abs(off) < pairs
        assert sorted(ids[at] for at in asked) == sorted(value_of)
        for at, answer in zip(asked, texts.answers[row].tolist(), strict=True):
            assert answer == value_of[ids[at]] == ids[at + 1]
        question = {at + i for at in asked for i in (0, 1)}
        rest = [each for i, each in enumerate(ids) if i >= pairs and i not in question]
        assert all(each >= recalling.FIRST_FILLER for each in rest)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
def test_recurrent_models_are_as_large_as_the_gpt(kind: type[nn.LSTM | nn.RNN]) -> None:
    gpt = recalling.make_gpt("rotary", "causal", 100, 32, 2, 2)
    made = recalling.make_recurrent(kind, 2, recalling.count(gpt))
    assert recalling.count(made) == pytest.approx(recalling.count(gpt), rel=0.05)


def test_an_lstm_begins_by_remembering() -> None:
    named = recalling.Recurrent(nn.LSTM, 5, 2).named_parameters()
    biases = [p for name, p in named if "ih" in name]
    open_gates = [p for p in biases if p.dim() == 1]
    assert len(open_gates) == 2
    for bias in open_gates:
        assert bias[5:10].tolist() == [1.0] * 5
        assert bias[:5].abs().max() < 1


def test_the_command_knows_how_many_keys_there_are() -> None:
    assert recall.KEYS == recalling.KEYS


def test_a_gpt_learns_to_recall_and_chance_is_one_in_eight() -> None:
    torch.manual_seed(0)
    model = recalling.make_gpt("rotary", "causal", 16, 32, 2, 2)
    before = recalling.test(model, 8, 2, 0)
    done = recalling.train(model, [8], 2, 100, 1e-2, 0, lambda *_: None)
    after = recalling.test(model, 8, 2, 0)
    assert done == 100
    assert before.accuracy < 0.3
    assert after.accuracy > 0.9
    assert after.loss < before.loss


def test_the_gradient_is_that_of_the_first_answer_at_its_key() -> None:
    torch.manual_seed(0)
    window = recalling.make_gpt("rotary", "window:4", 40, 16, 2, 1)
    causal = recalling.make_gpt("rotary", "causal", 40, 16, 2, 1)
    causal.load_state_dict(window.state_dict())
    assert recalling.test(window, 8, 2, 0).gradient == 0  # out of sight
    assert recalling.test(causal, 8, 2, 0).gradient > 0


def test_where_a_question_begins_tells_nothing_of_what_it_asks_first() -> None:
    texts = recalling.make_texts(4000, 16, 4, torch.Generator().manual_seed(0), exact=False)
    counts = torch.zeros(4, 4)
    for begins, pair in zip((texts.asked[:, 0] - 16).tolist(), texts.pair.tolist(), strict=True):
        counts[begins, pair] += 1
    assert (counts / 4000 - 1 / 16).abs().max() < 0.02


def run(tmp_path: Path, name: str, more: str = "") -> tuple[int, dict[str, object]]:
    target = tmp_path / f"{name}.json"
    line = f"recall --distances 8,16 --steps 3 --width 16 --threads 1 --json {target} {more}"
    status = command.main(line.split())
    return status, json.loads(target.read_text())


def test_the_command_shows_writes_and_draws_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "r.png"
    status, first = run(tmp_path, "first", f"--pattern causal window:4 --plot {plot}")
    assert status == 0
    out, err = capsys.readouterr()
    for name in ("GPT causal rotary", "GPT window:4 rotary", "LSTM", "RNN"):
        assert out.count(f"\n{name} ") == 3
        assert f"{name}: step 3/3" in err
    assert plot.read_bytes().startswith(b"\x89PNG")
    _, second = run(tmp_path, "second", "--pattern causal window:4")
    assert second["results"] == first["results"]
    _, other = run(tmp_path, "other", "--pattern causal window:4 --seed 1")
    assert other["results"] != first["results"]


def test_ctrl_c_shows_how_far_it_got(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = recalling.make_texts, []

    def stopped(*given: object, exact: bool) -> recalling.Texts:
        calls.append(given)
        if len(calls) == 40:  # in the training of the first model: two tests come before it
            raise KeyboardInterrupt
        return real(*given, exact=exact)  # type: ignore[arg-type]

    monkeypatch.setattr(recalling, "make_texts", stopped)
    status, found = run(tmp_path, "stopped", "--steps 500")
    assert status == recall.INTERRUPTED == 130
    assert "how far it got" in capsys.readouterr().err
    assert found["interrupted"] is True
    (only,) = found["results"]  # type: ignore[misc]
    assert 0 < only["steps"] < 500  # type: ignore[index]
