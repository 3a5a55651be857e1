"""`antiphon bench`: what its benchmarks share, and how mistakes are met."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt.bench import command
from gpt.bench.output import exponent, table
from gpt.bench.rounds import Timing, interleave
from gpt.errors import UserError


def test_subjects_take_turns_after_a_warm_up() -> None:
    order: list[str] = []
    times = interleave(
        {name: lambda name=name: order.append(name) for name in "ab"},  # type: ignore[misc]
        3,
        lambda: order.append("wait"),
    )
    assert order[:2] == ["a", "b"]
    assert [each for each in order[2:] if each != "wait"] == list("ababab")
    assert order[2:5] == ["wait", "a", "wait"]
    assert all(len(timing.seconds) == 3 for timing in times.values())


def test_a_timing_has_a_median_and_its_spread() -> None:
    assert Timing([3.0, 1.0, 2.0]).to_dict() == {
        "median_s": 2.0, "min_s": 1.0, "max_s": 3.0, "rounds_s": [3.0, 1.0, 2.0],
    }  # fmt: skip


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_the_exponent_of_a_power_is_found(power: float) -> None:
    sizes = [512, 1024, 4096]
    assert exponent(sizes, [3e-4 * n**power for n in sizes]) == pytest.approx(power)


def test_an_exponent_needs_two_points() -> None:
    assert exponent([1, 2, 3], [None, 5.0, 0.0]) is None
    assert exponent([1, 2, 3], [1.0, None, 9.0]) == pytest.approx(2.0)


def test_a_table_is_aligned() -> None:
    assert table(["row", "ms"], [["a", "10.5"], ["longer", "7"]]) == [
        "row       ms",
        "a       10.5",
        "longer     7",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("attention --plot a.jpg", "must end in .png"),
        ("attention --json .", "must be the name of a file"),
        ("attention --json /dev/null/a.json", "cannot be written to"),
        ("attention --heads 0", "--heads is 0, but must be at least 1"),
        ("attention --kv-heads 3", "--heads 8 is not divisible by --kv-heads 3"),
        ("attention --rows naive,fast", "'fast', but can have naive, fused"),
        ("attention --patterns windw:3", "did you mean window?"),
        ("attention --rows fused --patterns causal", "without patterns"),
        ("attention --device tpu", "unknown device 'tpu'"),
        ("recall --distances 3", "4 pairs fill as many tokens"),
        ("recall --pairs 9", "there are only 8 keys"),
        ("recall --rate 0", "--rate is 0.0"),
        ("recall --device cuda", "runs on the cpu alone"),
        ("recall --heads 3", "not divisible by n_head 3"),
    ],
)
def test_a_mistake_is_met_before_the_work(arguments: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        command.main(arguments.split())
    assert said in str(caught.value)


def test_without_a_compiler_flex_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match="no C\\+\\+ compiler"):
        command.main(["attention", "--flex"])


@pytest.mark.parametrize("lengths", ["", "5,x", "0,4"])
def test_lengths_are_whole_numbers(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["attention", "--lengths", lengths])
    assert "argument --lengths" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "wrong", "choices"),
    [
        ("decode --dtypes float32,bf16", "'bf16'", "float32, bfloat16"),
        ("prefill --dtypes bfloat15", "'bfloat15'", "did you mean bfloat16?"),
        ("decode --dtypes float32,", "''", "float32, bfloat16"),
        ("train --precisions bfloat16", "'bfloat16'", "float32, bf16"),
        ("train --peers nanogtp", "'nanogtp'", "did you mean nanogpt?"),
    ],
)
def test_a_wrong_name_in_a_list_is_told_with_those_there_are(
    given: str, wrong: str, choices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(given.split())
    said = capsys.readouterr().err
    assert f"argument {given.split()[1]}: {wrong} is none of" in said
    assert choices in said


@pytest.mark.parametrize(
    ("given", "name", "found"),
    [
        ("decode --dtypes bfloat16,float32,bfloat16", "dtypes", ["bfloat16", "float32"]),
        ("prefill --dtypes float32", "dtypes", ["float32"]),
        ("prefill", "dtypes", ["float32", "bfloat16"]),
        ("train --precisions float32,bf16", "precisions", ["float32", "bf16"]),
        ("train --peers none", "peers", ["none"]),
    ],
)
def test_names_stand_with_commas_in_the_order_given(
    given: str, name: str, found: list[str]
) -> None:
    assert getattr(command.build_parser("bench").parse_args(given.split()), name) == found


def test_nothing_is_written_where_nothing_was_measured(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        command.main(["recall", "--rate", "2", "--json", str(tmp_path / "a" / "b.json")])
    assert list(tmp_path.iterdir()) == []
