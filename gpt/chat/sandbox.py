"""Where chat templates are run: a process of its own, which may read nothing and can be ended.

A template comes with a model, from whoever made it, and is a program. Jinja's sandbox keeps it from
Python's insides, but not from counting for ever or filling the memory, and a step counter would not
see a single multiplication that does. So this process takes its limits from the operating system
before it reads the first template: seconds of processor time, bytes of memory, no file and no
socket besides the pipes it already has. `gpt.chat.template` is the other end; it waits no longer
than it wants to.

A line of JSON comes in, a line of JSON goes out. Only the standard library and Jinja are imported.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import time
from typing import Any

MAX_OUTPUT = 2**22
"""Characters a template may write; a context of a million tokens is about that long."""

Answer = dict[str, Any]


def environment() -> Any:
    """What templates of Hugging Face models expect to find, in Jinja's strictest sandbox."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the model says, for training; here it is just text."""

        tags = {"generation"}  # noqa: RUF012 (as the base class has it)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: object) -> None:
        raise RefusedError(str(message))

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own writes <, > and & as escapes, for HTML.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    class Names(jinja2.utils.Namespace):
        """Jinja's, without names that begin with an underscore: those reach into Python."""

        def __init__(*args: Any, **values: Any) -> None:
            checked = dict(*args[1:], **values)
            for name in checked:
                _plain(name)
            jinja2.utils.Namespace.__init__(args[0], checked)

        def __setitem__(self, name: str, value: Any) -> None:
            super().__setitem__(_plain(name), value)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals = {
        "range": made.globals["range"],  # the sandbox's, with a largest length
        "dict": lambda *args, **values: dict(*args, **values),  # and not the class
        "namespace": Names,
        "cycler": made.globals["cycler"],
        "joiner": made.globals["joiner"],
        "raise_exception": refuse,
    }
    return made


def _plain(name: Any) -> Any:
    from jinja2.exceptions import SecurityError

    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may hold no name like {name!r}")
    return name


class RefusedError(Exception):
    """The template called `raise_exception`: these messages are not as it wants them."""


class Renderer:
    """Compiles a template once, and renders it as often as is asked."""

    def __init__(self) -> None:
        self._environment = environment()
        self._source: str | None = None
        self._template: Any = None
        # What Jinja imports only when it is first used must come before files are out of reach.
        self.answer(
            {
                "source": "{% for m in messages %}{{ m|tojson }}{{ strftime_now('%d %b') }}"
                "{% endfor %}{{ 'a'.format() }}{{ missing }}",
                "requests": [{"messages": [{}]}],
                "now": 0.0,
            }
        )
        for wrong in ("{{", "{{ raise_exception('') }}", "{{ 1 / 0 }}"):
            self.answer({"source": wrong, "requests": [{}], "now": 0.0})

    def answer(self, request: Any) -> Answer:
        """`texts`, one for each of the request's `requests`; or `error` with its `kind`."""
        try:
            return {"texts": [self._render(request, each) for each in request["requests"]]}
        except RefusedError as error:
            return {"kind": "refused", "error": str(error)[:500]}
        except MemoryError:
            return {"kind": "memory", "error": "it wants more memory than it may have"}
        except RecursionError:
            return {"kind": "failed", "error": "it is nested too deeply, or calls itself for ever"}
        # A template can raise whatever Python can.
        except Exception as error:  # noqa: BLE001
            line = getattr(error, "lineno", None)
            where = f" (line {line})" if isinstance(line, int) else ""
            what = str(error).strip() or type(error).__name__
            return {"kind": "failed", "error": what.splitlines()[0][:300] + where}

    def _render(self, request: Any, values: dict[str, Any]) -> str:
        if self._template is None or self._source != request["source"]:
            self._template = None
            self._template = self._environment.from_string(request["source"])
            self._source = request["source"]
        # The same moment in every text, so that they can be compared.
        now = datetime.datetime.fromtimestamp(request["now"])
        values = {**values, "strftime_now": now.strftime}
        parts: list[str] = []
        length = 0
        for part in self._template.generate(values):
            length += len(part)
            if length > MAX_OUTPUT:
                raise ValueError(f"it writes more than {MAX_OUTPUT:,} characters")
            parts.append(part)
        return "".join(parts)


def confine(memory: int) -> None:
    """Take from this process, for good, what no template needs."""
    import resource

    limits = [
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NOFILE, 0),  # files that are open stay open
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ]
    for limit, most in limits:
        with contextlib.suppress(OSError, ValueError):  # one that a system does not know
            _, hard = resource.getrlimit(limit)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(limit, (most, most))


def allow(seconds: int) -> None:
    """End this process, even if nobody waits for it any more, when it works longer than that."""
    import resource

    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds + 1, hard))


def serve(seconds: int, memory: int) -> None:
    """Answer until the other end closes the pipe.

    Args:
        seconds: of processor time that an answer may take.
        memory: bytes of address space.
    """
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is for the other end
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    renderer = Renderer()
    sys.setrecursionlimit(500)  # a template that calls itself shall not fill the C stack
    confine(memory)
    sink.write(b"ready\n")
    sink.flush()
    for line in source:
        allow(seconds)
        answer = renderer.answer(json.loads(line))
        sink.write(json.dumps(answer).encode() + b"\n")
        sink.flush()
