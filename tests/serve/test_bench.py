"""`antiphon bench serve`: what is asked, how it is kept up, what is made of it, and the command."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from gpt.bench import command
from gpt.errors import UserError
from gpt.tokenizer import Tokenizer
from serve.bench.asking import Ask, Lengths, Requests, Row, check_room, read_rows
from serve.bench.drive import Drive, Load, Message, RefusedError, Seen
from serve.bench.figures import Limits, percentile, ratio, summary
from serve.bench.processes import made_up_tokenizer
from tests.serve.scripted import ScriptedModel
from tests.serve.served import Served

# --- What is asked --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("fixed:7", 7, 7), ("uniform:3-9", 3, 9), ("lognormal:20:0.5:60", 1, 60)],
)
def test_lengths_stay_within_what_is_said(text: str, low: int, high: int) -> None:
    numbers = random.Random(0)
    drawn = sorted(Lengths.parse(text).draw(numbers) for _ in range(2000))
    assert low <= drawn[0] <= drawn[-1] <= high
    if "uniform" in text:
        assert set(drawn) == set(range(3, 10))
    if "lognormal" in text:
        assert drawn[1000] == pytest.approx(20, abs=1)
        assert drawn[-1] == 60
        # A normal's 16th percent lies one standard deviation below its middle.
        assert drawn[320] == pytest.approx(20 * math.exp(-0.5), abs=1.5)


@pytest.mark.parametrize(
    "text", ["7", "fixed:0", "fixed:x", "uniform:5-2", "uniform:5", "lognormal:9:1", "normal:1",
             "lognormal:0:1:9", "lognormal:9:nan:20", "lognormal:30:1:20"],
)  # fmt: skip
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be one of fixed:N"):
        Lengths.parse(text)


def requests(**settings: object) -> Requests:
    given = {"seed": "1", "prefix": 4, "prefix_seed": "p", **settings}
    return Requests(range(50), Lengths.parse("uniform:2-6"), Lengths.parse("fixed:3"), **given)  # type: ignore[arg-type]


def test_the_same_seed_asks_the_same_and_prompts_begin_alike() -> None:
    first, again = ([next(it) for _ in range(20)] for it in (requests(), requests()))
    assert first == again
    begins = {tuple(ask.prompt[:4]) for ask in first}
    assert len(begins) == 1
    assert {len(ask.prompt) for ask in first} == {6, 7, 8, 9, 10}
    other = [next(it) for it in [requests(seed="2")] for _ in range(20)]
    assert other != first
    assert {tuple(ask.prompt[:4]) for ask in other} == begins
    own = requests(own_prefix=True)
    assert len({tuple(next(own).prompt[:4]) for _ in range(20)}) == 20


def test_requests_of_a_file_are_taken_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(
        '{"prompt": "Hi", "output_tokens": 9}\n\n{"prompt_tokens": 5}\n{"prompt": [1]}\n'
    )
    it = requests(prefix=0, rows=read_rows(str(file)))
    asked = [next(it) for _ in range(4)]
    assert [ask.output for ask in asked] == [9, 3, 3, 9]
    assert asked[0].prompt == asked[3].prompt == "Hi"
    assert len(asked[1].prompt) == 5
    assert asked[2].prompt == [1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", ":1 is not JSON"), ("[]", ":1 must be an object"), ('{"tokens": 1}', "no more"),
        ('{"output_tokens": 0}', "from 1 up"), ('{"output_tokens": true}', "from 1 up"),
        ('{"prompt": {}}', "text or a list"), ('{"prompt": [-1]}', "text or a list"),
        ('{"prompt": "x", "prompt_tokens": 1}', "leave one out"), ("", "has no requests"),
    ],
)  # fmt: skip
def test_a_file_with_a_mistake_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=said):
        read_rows(str(file))


def test_what_cannot_fit_is_refused_before_it_is_asked() -> None:
    ten, twenty = Lengths.parse("uniform:1-10"), Lengths.parse("fixed:20")
    check_room(34, ten, twenty, 4)
    with pytest.raises(UserError, match="4 shared and 10 prompt tokens and make 20"):
        check_room(33, ten, twenty, 4)
    with pytest.raises(UserError, match="31 prompt tokens and make 20"):
        check_room(50, ten, twenty, 0, [Row(prompt_tokens=31)])


# --- Driving --------------------------------------------------------------------------------------


def endless() -> Iterator[Ask]:
    for seed in range(10**6):
        yield Ask([1, 2, 3], 2, seed)


def driven(ask: Callable[[Ask], AsyncIterator[Message]], **settings: object) -> Seen:
    given = {
        "streams": 4, "rate": None, "seconds": 0.25, "warm_up": 0.05, "drain": 5.0, "seed": "0",
        **settings,
    }  # fmt: skip
    load = Load(**given)  # type: ignore[arg-type]
    return asyncio.run(Drive(load, ask, endless(), endless(), lambda seen, seconds: None).run())


def test_so_many_streams_are_under_way_and_no_more() -> None:
    under_way: set[int] = set()
    most = 0

    async def ask(asked: Ask) -> AsyncIterator[Message]:
        nonlocal most
        under_way.add(asked.seed)
        most = max(most, len(under_way))
        yield Message(3, 0)
        for _ in range(3):
            await asyncio.sleep(0.002)
            yield Message(0, 2)
        under_way.remove(asked.seed)

    seen = driven(ask)
    assert most == 4
    assert not under_way
    assert len(seen.first) == len(seen.whole) == len(seen.texts) > 0
    assert seen.tokens == 2 * seen.messages
    assert seen.prompt_tokens % 3 == 0
    assert (seen.cut, seen.errors) == (0, Counter())
    assert Seen.from_dict(json.loads(json.dumps(seen.to_dict()))).tokens == seen.tokens


def test_arrivals_do_not_wait_for_answers_and_count_from_when_they_were_due() -> None:
    asked: list[int] = []

    async def ask(one: Ask) -> AsyncIterator[Message]:
        asked.append(one.seed)
        await asyncio.sleep(60)
        yield Message(0, 1)

    seen = driven(ask, streams=None, rate=200.0, drain=0.0)
    assert len(asked) > 10
    assert 0 < seen.cut < len(asked), "those of the warm-up are not counted"
    assert seen.first == []


def test_failures_are_counted_by_status() -> None:
    async def ask(asked: Ask) -> AsyncIterator[Message]:
        if asked.seed % 2:
            raise RefusedError("RESOURCE_EXHAUSTED")
        await asyncio.sleep(0.001)
        yield Message(3, 1)

    seen = driven(ask)
    assert set(seen.errors) == {"RESOURCE_EXHAUSTED"}
    assert seen.first
    assert len(seen.first) == len(seen.whole)


def test_long_prompts_are_counted_apart() -> None:
    async def ask(asked: Ask) -> AsyncIterator[Message]:
        await asyncio.sleep(0.001)
        yield Message(3, 1)

    seen = driven(ask, streams=1, long_rate=100.0)
    assert seen.long > 0
    assert seen.tokens == len(seen.first) or abs(seen.tokens - len(seen.first)) <= 1


def test_a_fault_of_the_loader_is_raised() -> None:
    async def ask(asked: Ask) -> AsyncIterator[Message]:
        raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError):
        driven(ask)


# --- Figures --------------------------------------------------------------------------------------


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(n) for n in range(1, 201)]
    random.Random(0).shuffle(values)
    assert [percentile(values, p) for p in (50, 90, 95, 99)] == [100.0, 180.0, 190.0, 198.0]
    assert percentile([5.0], 50) == percentile([5.0], 99) == 5.0
    assert percentile([], 50) is None


def test_a_summary_takes_rounds_together_and_counts_what_is_good() -> None:
    one = Seen(2.0, tokens=20, messages=20, first=[0.1, 0.3], whole=[1.0, 2.0],
               texts=[(0.1, 0.05), (0.3, 0.01)], errors=Counter(A=1))  # fmt: skip
    two = Seen(2.0, tokens=40, messages=10, first=[0.2], whole=[1.5], texts=[(0.2, 0.02)], cut=3)
    found = summary("row", [one, two], Limits(first=0.25, gap=0.04))
    assert found["tokens_per_s"] == {"median": 15.0, "rounds": [10.0, 20.0]}
    assert found["good_texts_per_s"]["rounds"] == [0.0, 0.5]
    assert found["first_token_s"]["p50"] == 0.2
    assert found["first_token_s"]["count"] == 3
    assert found["between_tokens_s"]["p99"] is None
    assert (found["errors"], found["cut_off"], found["tokens_per_message"]) == ({"A": 1}, 3, 2.0)
    assert ratio(found, summary("other", [one, one], Limits(None, None))) == (1.5, 1.0, 2.0)


def test_a_made_up_vocabulary_has_the_size_asked_for() -> None:
    tokenizer = made_up_tokenizer(50257)
    assert tokenizer.n_vocab == 50257
    assert len({tokenizer.token_bytes(token) for token in range(50256)}) == 50256
    assert tokenizer.decode(tokenizer.encode("any text \u00e9")) == "any text \u00e9"


# --- The command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "nothing to load given"),
        ("here --preset nano", "here and nano to load given"),
        ("/no/such", "no model at /no/such"),
        ("--preset nanno", "did you mean nano?"),
        ("--address h:1 --engine-only", "--engine-only needs the model itself"),
        ("--address h:1 --threads 2", "--threads needs the model itself"),
        ("--preset nano --streams 1 --rate 1", "a load has one of them"),
        ("--preset nano --streams 0", "--streams is 0"),
        ("--preset nano --rate 0", "--rate is 0, but must be above 0"),
        ("--preset nano --rate nan", "--rate is nan"),
        ("--preset nano --seconds inf", "--seconds is inf"),
        ("--preset nano --drain -1", "--drain is -1, but must be at least 0"),
        ("--preset nano --no-shared-prefix", "give that, too"),
        ("--preset nano --server-options='", "cannot be read"),
        ("--preset nano --requests /no/such", "cannot read /no/such"),
        (
            "--preset nano --output-tokens fixed:9 --long-prompts 128",
            "holds prompts of 127 at most",
        ),
        ("--preset nano --prompt-tokens fixed:100 --output-tokens fixed:29", "context holds 128"),
        ("--address 127.0.0.1:1", "no server can be reached at 127.0.0.1:1"),
    ],
)
def test_a_mistake_is_one_line_and_met_at_once(
    arguments: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as caught:
        command.main(["serve", *arguments.split()])
    assert said in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "nano", "--server-options=--max-runing 3"], "did you mean --max-running?"),
        (["--address", "here"], "must be HOST:PORT"),
    ],
)
def test_an_option_that_there_is_not_and_an_address_that_is_none_are_usage_errors(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["serve", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_running_server_is_loaded(
    serve: Callable[..., Served], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(ScriptedModel(Tokenizer.bytes().n_vocab, lambda position, token: 97))
    arguments = [
        "serve", "--address", served.server.target, "--streams", "3", "--seconds", "0.5",
        "--warm-up", "0.1", "--rounds", "2", "--prompt-tokens", "fixed:5",
        "--output-tokens", "fixed:7", "--shared-prefix", "16", "--no-shared-prefix",
        "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png"),
    ]  # fmt: skip
    assert command.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "over gRPC against no shared prefix:" in shown
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["settings"]["output_tokens"] == "fixed:7"
    for row in found["results"]:
        assert row["tokens_per_s"]["median"] > 0
        assert row["whole_s"]["count"] > 0
        assert row["errors"] == {}
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert served.engine.held == 0


@pytest.mark.integration
def test_a_server_and_an_engine_of_random_weights_are_loaded_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    arguments = (
        "serve --preset nano --rate 40 --seconds 0.5 --warm-up 0.2 --rounds 1 --engine-only "
        "--prompt-tokens fixed:5 --output-tokens fixed:4 --threads 1"
    )
    assert command.main(arguments.split()) == 0
    assert "over gRPC against engine only:" in capsys.readouterr().out
    assert [each for each in tmp_path.iterdir() if each.name.startswith("antiphon")] == []
