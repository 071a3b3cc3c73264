"""Chat templates: a list of messages -> the prompt a model was trained on.

A template comes with the model and is not trusted. `quire.models.render` renders it in a separate process with limited
time and memory. This module starts that process, sends it plain JSON values and reads its answers. All templates of
this process share one such process.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from quire.errors import ModelError, RequestError, shown
from quire.models import render
from quire.models.child import DIED, TIMED_OUT, ChildProcess

Role = Literal["system", "developer", "user", "assistant", "tool"]
"""The roles of chat requests. /v1/responses and pins take four of them."""

RESERVED = frozenset({"messages", "add_generation_prompt", "chat_template", "tokenize"})
"""Variables that a caller cannot set: they have another source, or belong to a feature that Quire lacks."""

MAX_SECONDS = 2.0
"""Limit of processor time for one rendering: 1,000 messages take about 5 ms."""

MAX_BYTES = 512 << 20
"""Limit of the rendering process's address space: 8 MiB of messages take about 60 MB."""

MAX_VALUES = 2**18
"""Limit of the values of a conversation and its variables: 16,384 messages have 50,000. A million numbers would take
100 MB, here and in the rendering process."""

MAX_CHARS = 16 << 20
"""Limit of a rendered prompt: twice the server's default limit of a request body."""


def check_messages(messages: Any) -> None:
    """Raises RequestError if a conversation is no sequence, is empty, or has a message without a role. Which roles
    there are is up to the model's template; the server takes those of `Role`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f"'messages' is {shown(messages)}; it must be a list of objects with role and content", "messages"
        )
    if not messages:
        raise RequestError("'messages' is empty; it must have at least one message", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            what = f"messages[{index}] is {shown(message)}; it must be an object with role and content"
        elif not isinstance(message.get("role"), str):
            role = shown(message["role"]) if "role" in message else "missing"
            what = f"the role of messages[{index}] is {role}; it must be a string, such as 'user'"
        else:
            continue
        raise RequestError(what, "messages")


class ChatTemplate:
    """A template and the special tokens that it may print."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """special_tokens: bos_token, eos_token, ... -> text. Raises ModelError if the template does not parse."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._number = next(_numbers)
        kind, text = self._ask(None)
        if kind == render.REFUSED:
            raise ModelError(f"the chat template does not parse: {text}")
        if kind != render.DONE:
            reason = _REASONS.get(kind, text.partition(": ")[2])  # without the name of Python's error
            raise ModelError(f"the chat template does not compile: {reason}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. Waits for another process, so an event loop must call it on a thread.

        messages   role and content (and other keys for the template), oldest first
        variables  variables for the template: tools, documents, enable_thinking; none of RESERVED, no *_token
        Raises RequestError with the template's own message if it rejects the conversation, and if rendering fails,
        takes too long or makes too long a text.
        """
        copy = _Copy()
        try:
            given = {name: copy.plain(value, name) for name, value in (variables or {}).items()}
            plain = copy.plain(messages, "messages")
        except RecursionError:
            raise RequestError("messages or variables are nested too deep for a chat template", "messages") from None
        if reserved := RESERVED & given.keys() | {name for name in given if name.endswith("_token")}:
            raise RequestError(f"a chat template's {', '.join(sorted(reserved))} cannot be set", "chat_template_kwargs")
        names = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **given,
            "messages": plain,
            "add_generation_prompt": add_generation_prompt,
        }
        kind, text = self._ask(names)
        if kind == render.DONE:
            return text
        if kind == render.REFUSED:
            raise RequestError(f"the chat template rejects these messages: {text}", "messages")
        if kind == render.LONG:
            text = f"it made {int(text):,} characters; the limit is {MAX_CHARS:,}"
        raise RequestError(f"the chat template fails on these messages: {_REASONS.get(kind, text)}", "messages")

    def _ask(self, names: dict[str, Any] | None) -> tuple[bytes, str]:
        """The kind and text of the renderer's answer. names: the variables; None: only compile."""
        rest = names, MAX_CHARS, MAX_SECONDS
        return _renderer.ask((self._number, None, *rest), lambda: (self._number, self.source, *rest))


_REASONS = {
    render.MEMORY: f"it needs more than {MAX_BYTES >> 20} MiB of memory",
    TIMED_OUT: f"it did not end within {MAX_SECONDS:g} s of processor time",
    DIED: "the process that renders it died",
}


_renderer = ChildProcess(render.__name__, (MAX_BYTES,), last=render.MEMORY)
_numbers = itertools.count()


_ATOMS = {type(None), str, int, float, bool}


class _Copy:
    """Copies the values of one rendering. An untrusted template must not get objects with methods, so that a copy is
    made only of JSON types.
    """

    def __init__(self) -> None:
        self._num_values = 0

    def plain(self, value: Any, name: str) -> Any:
        """A copy of a value of a variable. Raises RequestError for other types, and if all copies together have more
        than MAX_VALUES values.
        """
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            message = f"messages, tools and other variables of the chat template have more than {MAX_VALUES:,} values"
            param = name if name in ("messages", "tools") else "chat_template_kwargs"
            raise RequestError(f"{message} together; send less in one request", param)
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is list or isinstance(value, list | tuple):  # before mappings, which it takes 1 us to recognize
            return [self.plain(item, name) for item in value]
        if isinstance(value, Mapping):
            return {str(key): self.plain(item, name) for key, item in value.items()}
        if isinstance(value, str):
            return str.__str__(value)
        raise RequestError(f"{name} has a {type(value).__name__}; a chat template takes only JSON values", name)
