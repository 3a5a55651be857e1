"""Chat templates: rendered as they expect to be, and kept from doing anything else."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest

from gpt.chat.sandbox import Renderer
from gpt.chat.template import MAX_SOURCE, ChatTemplate, read_template
from gpt.errors import ChatTemplateError
from tests.chat.chatml import CHATML

SAID = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " é <b> "},
    {"role": "assistant", "content": "b"},
]


def test_a_conversation_is_rendered_and_the_process_serves_again() -> None:
    with ChatTemplate(CHATML) as template:
        assert template.render([SAID[:1], SAID[1:2]]) == [
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n",
            "<|im_start|>user\n é <b> <|im_end|>\n<|im_start|>assistant\n",
        ]
        assert template.render([SAID[2:]], add_generation_prompt=False) == [
            "<|im_start|>assistant\nb<|im_end|>\n"
        ]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        # Blocks leave no line of their own; a line's end behind a block goes.
        ("{% if true %}\n  {% set a = 1 %}\n  x\n{% endif %}\ny", "  x\ny"),
        ("{{ bos_token }}|{{ eos_token }}|{{ unk_token }}", "<s>|</s>|"),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": " é <b> "}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        (("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }};"
         "{% break %}{% endfor %}"), "user;"),
        (("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
         "{% endfor %}{{ ns.n }}"), "3"),
        ("{% generation %}{{ messages[1].content | trim }}{% endgeneration %}", "é <b>"),
        ("{{ strftime_now('%Y') }}", "2001"),
        ("{{ tools is none }} {{ documents is none }} {{ nothing is defined }}", "True True False"),
        ("{{ dict(a=1).items() | list }}", "[('a', 1)]"),
    ],
)  # fmt: skip
def test_templates_find_what_they_expect(source: str, text: str) -> None:
    now = datetime.datetime(2001, 7, 1).timestamp()
    variables = {"messages": SAID, "bos_token": "<s>", "eos_token": "</s>"}
    variables |= {"tools": None, "documents": None}
    answer = Renderer().answer({"source": source, "requests": [variables], "now": now})
    assert answer == {"texts": [text]}


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__self__.x }}",
        "{{ (messages | attr('__class__')).x }}",
        "{{ '{0.__class__.__mro__[1]}'.format('') }}",
        "{{ messages | map(attribute='__class__.__mro__') | list | first | first }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.mro() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='user') }}",
        "{{ lipsum() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ range(1000000) | list }}",
    ],
)
def test_a_template_reaches_nothing(source: str) -> None:
    answer = Renderer().answer({"source": source, "requests": [{"messages": SAID}], "now": 0.0})
    assert answer["kind"] == "failed"
    assert "\n" not in answer["error"]


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ONE_OPERATION = "{{ 9 ** (9 ** 9) }}"  # no step counter would see it


@pytest.mark.parametrize("source", [ENDLESS, ONE_OPERATION])
def test_a_template_that_does_not_end_is_ended(source: str) -> None:
    template = ChatTemplate(source, seconds=0.3)
    with pytest.raises(ChatTemplateError, match=r"not done after 0\.3 seconds; does it loop\?"):
        template.render([SAID])
    assert template._process is None


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ 'a' * 10 ** 9 }}", "more memory than it may have"),
        ("{{ '%2000000000d' % 1 }}", "more memory than it may have"),
        (("{% set ns = namespace(x=['a']) %}{% for i in range(40) %}"
         "{% set ns.x = ns.x + ns.x %}{% endfor %}"), "more memory than it may have"),
        ("{% for i in range(99999) %}{{ 'a' * 100 }}{% endfor %}", "more than 4,194,304 charac"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself for ever"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "nested too deeply"),
        ("{% for %}", r"Expected an expression.*\(line 1\)"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('Only users\\nmay speak') }}", "refuses these messages: Only users"),
    ],
)  # fmt: skip
def test_demands_and_mistakes_are_one_line(source: str, says: str) -> None:
    with (
        pytest.raises(ChatTemplateError, match=says) as caught,
        ChatTemplate(source) as template,
    ):
        template.render([SAID])
    assert "\n" not in str(caught.value)


OPENS = """
import json, sys
from gpt.chat import sandbox
sandbox.confine(2**29)
found = []
for act in (lambda: open("/etc/passwd"), lambda: __import__("socket").socket()):
    try:
        act()
    except OSError as error:
        found.append(error.errno)
print(found)
"""


def test_the_process_can_open_nothing_even_if_the_sandbox_were_left(
    run_python: Callable[[str], str],
) -> None:
    import errno

    code = "import socket\n" + OPENS
    assert run_python(code) == f"{[errno.EMFILE] * 2}\n"


def test_a_process_that_dies_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with ChatTemplate(CHATML) as template:
        template.render([SAID])
        assert template._process is not None
        template._process.kill()
        with pytest.raises(ChatTemplateError, match="ended the process"):
            template.render([SAID])
        assert len(template.render([SAID])) == 1  # another one was started
        monkeypatch.setattr("sys.executable", "/bin/false")
        template.close()
        with pytest.raises(ChatTemplateError, match="does not start"):
            template.render([SAID])


def test_files_with_templates(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes("é\r\n".encode())
    assert read_template(file) == "é\r\n"
    file.write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match="not UTF-8"):
        read_template(file)
    file.write_bytes(b"x" * (MAX_SOURCE + 1))
    with pytest.raises(ChatTemplateError, match="larger than"):
        read_template(file)
    with pytest.raises(ChatTemplateError, match="No such file"):
        read_template(tmp_path / "none")
    with pytest.raises(ChatTemplateError, match="is empty"):
        ChatTemplate(" \n")
