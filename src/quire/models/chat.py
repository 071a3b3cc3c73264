"""Chat templates: a list of messages -> the prompt a model was trained on.

Templates come with the model, that is from strangers: they run in jinja2's immutable sandbox and see nothing but plain
JSON values. The environment follows what templates are written against:
`transformers.PreTrainedTokenizer.apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from quire.errors import ModelError, RequestError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser


RESERVED = frozenset({"messages", "add_generation_prompt", "chat_template", "tokenize"})
"""Names a caller cannot give a template: they come from elsewhere, or would promise what is not done."""


class ChatTemplate:
    """A compiled template and the special tokens it may print."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """special_tokens: bos_token, eos_token, ... -> text. Raises ModelError if the template does not parse."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._template = _compile(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation.

        messages   role and content (and whatever else the template reads), oldest first
        variables  further names the template may read: tools, documents, enable_thinking; none of RESERVED, no *_token
        Raises RequestError with the template's own message when it refuses the conversation.
        """
        from jinja2 import TemplateError

        given = {name: _plain(value, name) for name, value in (variables or {}).items()}
        if taken := RESERVED & given.keys() | {name for name in given if name.endswith("_token")}:
            raise RequestError(f"a chat template's {', '.join(sorted(taken))} cannot be given", "chat_template_kwargs")
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    "tools": None,
                    "documents": None,
                    **given,
                    "messages": _plain(messages, "messages"),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error.message}", "messages") from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(f"the chat template fails on these messages: {reason}", "messages") from None


def _compile(source: str) -> Template:
    from jinja2 import TemplateError, nodes
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
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelError(f"the chat template does not parse: {error.message}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # of Python, into which it is compiled
        raise ModelError(f"the chat template does not compile: {error}") from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: jinja2's own filter escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _plain(value: Any, name: str) -> Any:
    """A copy made of JSON types alone: objects with methods are nothing a stranger's template should hold."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    raise RequestError(f"{name} holds a {type(value).__name__}; only JSON values can be given to a chat template", name)
