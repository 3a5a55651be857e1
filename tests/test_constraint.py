"""Constraints: only texts that meet them are made, and what cannot be met is refused."""

from __future__ import annotations

import json
import random
import re

import pytest

from gpt.constraint import ConstraintCompiler, Guide
from gpt.errors import SamplingError
from gpt.params import Constraint, ConstraintKind
from gpt.tokenizer import Tokenizer

BYTES = Tokenizer.bytes()
ASCII = Tokenizer.chars('abcdefghijklmnopqrstuvwxyz 0123456789{}[]":,.-/')
COMPILERS = {t.kind: ConstraintCompiler(t, {t.eot}) for t in (BYTES, ASCII)}

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIST = 'start: "[" (item ("," item)*)? "]"\nitem: /[a-c]{1,3}/ | start'


def compiled(kind: ConstraintKind, text: str, tokenizer: Tokenizer = BYTES) -> Guide:
    return COMPILERS[tokenizer.kind].compile(Constraint(kind, text))


def made(guide: Guide, tokenizer: Tokenizer, seed: int, longest: int = 200) -> str | None:
    """A random text of those allowed; None if it did not end."""
    pick, ids = random.Random(seed), []
    guide = guide.copy()
    while not guide.complete and len(ids) < longest:
        allowed = guide.allowed()
        assert allowed, "a dead end"
        token = pick.choice(allowed)
        if token == tokenizer.eot:
            assert guide.may_end
            return tokenizer.decode(ids)
        ids.append(token)
        guide.push(token)
    return tokenizer.decode(ids) if guide.complete else None


@pytest.mark.parametrize("tokenizer", [BYTES, ASCII])
@pytest.mark.parametrize("pattern", ["a+b?", "(yes|no)", "[a-c]{2,4}(/[0-9])?", "", "x{3}"])
def test_a_text_matches_the_expression(pattern: str, tokenizer: Tokenizer) -> None:
    if not pattern:
        return
    guide = compiled("regex", pattern, tokenizer)
    texts = [text for seed in range(40) if (text := made(guide, tokenizer, seed)) is not None]
    assert len(texts) > 20
    assert all(re.fullmatch(pattern, text) for text in texts)


@pytest.mark.parametrize("tokenizer", [BYTES, ASCII])
def test_a_text_is_json_under_the_schema(tokenizer: Tokenizer) -> None:
    guide = compiled("json_schema", json.dumps(SCHEMA), tokenizer)
    texts = [t for seed in range(40) if (t := made(guide, tokenizer, seed, 400)) is not None]
    assert texts
    for text in texts:
        found = json.loads(text)
        assert set(found) == {"name", "age"}
        assert isinstance(found["name"], str)
        assert len(found["name"]) <= 5
        assert 0 <= found["age"] <= 99


def test_a_text_is_a_sentence_of_the_grammar() -> None:
    guide = compiled("grammar", LIST)
    texts = {t for seed in range(200) if (t := made(guide, BYTES, seed)) is not None}
    assert "[]" in texts
    assert any("[" in text[1:] for text in texts)
    assert all(text.count("[") == text.count("]") for text in texts)


def test_a_text_is_complete_when_nothing_more_can_come() -> None:
    guide = compiled("regex", "ab?")
    assert not guide.complete
    assert not guide.may_end
    guide.push(ord("a"))
    assert guide.may_end
    assert not guide.complete
    assert guide.allowed() == [ord("b"), BYTES.eot]
    guide.push(ord("b"))
    assert guide.complete


def test_copies_go_their_own_ways() -> None:
    guide = compiled("regex", "(ab|cd)")
    other = guide.copy()
    guide.push(ord("a"))
    other.push(ord("c"))
    assert guide.allowed() == [ord("b")]
    assert other.allowed() == [ord("d")]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "文+"),
        ("regex", "a文"),
        ("regex", "[a-z]*文"),
        ("regex", "/文/"),
        ("json_schema", '{"const": "文"}'),
        ("json_schema", '{"type": "object", "properties": {"文": {}}, "required": ["文"]}'),
        ("grammar", 'start: "a" "B"'),
    ],
)
def test_what_the_vocabulary_cannot_express_is_refused(kind: ConstraintKind, text: str) -> None:
    """S28."""
    with pytest.raises(SamplingError, match=f"{kind}: no text of this model's vocabulary"):
        compiled(kind, text, ASCII)
    compiled(kind, text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a|文"),
        ("regex", "[^b]{3}"),
        ("json_schema", '{"type": "string"}'),
        ("json_schema", json.dumps(SCHEMA)),
        ("json_schema", "{}"),
        ("grammar", LIST),
    ],
)
def test_what_the_vocabulary_can_express_in_some_way_is_taken(
    kind: ConstraintKind, text: str
) -> None:
    compiled(kind, text, ASCII)


def test_a_dead_end_allows_nothing_and_is_not_the_end() -> None:
    guide = compiled("grammar", 'start: "a" /[a-z]/* "文" | "b"', ASCII)
    guide.push(ASCII.encode("b")[0])
    assert guide.complete
    guide = compiled("regex", "a")
    guide.push(ord("x"))
    assert not guide.allowed()
    assert not guide.complete


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(((", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("json_schema", "{", "is not JSON"),
        ("json_schema", "[" * 60_000, "is not JSON: it is nested too deeply"),
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", "[]", "must be an object or boolean"),
        ("json_schema", '{"not": {"type": "string"}}', "Unimplemented"),
        ("json_schema", '{"$ref": "http://example.org/x"}', "retriev"),
        ("json_schema", "false", "no text can meet it|cannot be used"),
        (
            "json_schema",
            '{}}], "grammars": [{"lark_grammar": "start: /a/"}], "x": [{"y": {}',
            "JSON",
        ),
        ("grammar", "start: unknown", "unknown name"),
        ("grammar", 'other: "a"', "no start rule"),
        ("grammar", "x" * 60_000, "Expected token"),
        ("grammar", "start: start", "no text can meet it"),
    ],
)
def test_what_cannot_be_used_says_why_in_one_line(
    kind: ConstraintKind, text: str, reason: str
) -> None:
    with pytest.raises(SamplingError, match=f"{kind}: .*({reason})") as caught:
        compiled(kind, text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
