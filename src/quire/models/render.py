"""The program that renders chat templates in a separate process. `quire.models.chat` starts it and talks to it.

A template is not trusted. One expression can allocate 10 GB, or run for hours in a single call that no thread can
interrupt. The kernel limits both here: a limit on the address space, and a timer of processor time with a signal that
ends the process. jinja2's immutable sandbox gives templates access only to plain values.

A request is (number of the template, its source or None, variables or None, maximum characters, seconds). The program
imports nothing else of Quire, so that it starts in about 50 ms.
"""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import socket
from datetime import datetime
from typing import TYPE_CHECKING, Any

from quire.models.child import NEEDS_CONTEXT, receive_request, send_answer

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

DONE, REFUSED, FAILED, MEMORY, LONG = b"d", b"r", b"f", b"m", b"l"
"""Kinds of answers: the text; the template's own rejection; any other error; out of memory; a text too long. Also
NEEDS_CONTEXT: a template whose source was not sent yet."""

LARGE_CHARS = 250_000
"""After a text of this length freed memory is given back to the system: 2,600,000 characters leave 32 MB."""

SHOWN_CHARS = 1000
"""Maximum characters of an error's text: a template may raise a text of any length."""


def compiled(source: str) -> Template:
    """A template in the environment of transformers' `apply_chat_template`, for which templates are written."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks assistant text for training; here it is a plain block."""

        tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

        def parse(self, parser: Parser) -> Node | list[Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON in the form of training data: jinja2's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def answer(templates: dict[int, Template], request: tuple[Any, ...]) -> tuple[bytes, str]:
    """The kind and text of one answer.

    request  (number of the template, its source or None if it is already compiled, variables or None to only compile,
             maximum characters of the text)
    """
    from jinja2 import TemplateError

    number, source, variables, most = request
    try:
        if source is not None:
            templates[number] = compiled(source)
        elif number not in templates:
            return NEEDS_CONTEXT, ""
        if variables is None:
            return DONE, ""
        text = templates[number].render(variables)
        return (DONE, text) if len(text) <= most else (LONG, str(len(text)))
    except TemplateError as error:
        return REFUSED, (error.message or "")[:SHOWN_CHARS]
    except MemoryError:
        return MEMORY, ""
    except Exception as error:
        return FAILED, f"{type(error).__name__}: {error}"[:SHOWN_CHARS]


def serve(connection: socket.socket) -> None:
    """Answer requests until the other side closes."""
    templates: dict[int, Template] = {}
    (max_bytes,) = receive_request(connection)
    import jinja2.sandbox  # noqa: F401  # before the limits count, and before the first request

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        *request, seconds = receive_request(connection)
        # The default action of SIGPROF ends the process, also in the middle of one long call.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        kind, text = answer(templates, tuple(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send_answer(connection, kind, text)
        if kind == MEMORY:
            return  # a new process has all of its memory again
        is_large = len(text) >= LARGE_CHARS
        del request, text
        if is_large and trim is not None:
            trim(0)
