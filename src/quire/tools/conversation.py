"""Renders a conversation with tools as the text of a prompt, for the library and the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.tools.calls import Tool, parse_tool
from quire.tools.formats import format_of

if TYPE_CHECKING:
    from quire.models.tokenizer import Tokenizer


class ChatText(NamedTuple):
    """A rendered conversation. Encode it with `escape` and without adding tokens around it.

    escaped  the text, with `escape` inserted into the names of control tokens that users or tools wrote as text
    escape   see `quire.models.control_tokens`; "" if the text has no such names
    """

    escaped: str
    escape: str

    @property
    def text(self) -> str:
        """The text as the template wrote it."""
        return self.escaped.replace(self.escape, "") if self.escape else self.escaped


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool] = (),
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    *,
    keep_tokens: bool = False,
) -> ChatText:
    """Renders a conversation with the model's chat template.

    tools        tools that the answer may call
    variables    variables for the template
    keep_tokens  whether a control token's name in the text of users and tools becomes that token
    Raises RequestError if there is no template or it rejects the messages.
    """
    template = tokenizer.tool_template if tools else tokenizer.chat_template
    format_ = format_of(template)
    given, escape = dict(variables or {}), ""
    if tools:
        given["tools"] = [tool.for_template() for tool in tools]
    if not keep_tokens:
        messages, escaped, escape = tokenizer.escape_names(messages, given)
        given = dict(escaped)
    described = tools
    if tools:
        described = [parse_tool(tool) for tool in given["tools"]]
        if format_.make_instructions is not None:
            del given["tools"]
    text = tokenizer.chat(format_.messages(messages, described, template), add_generation_prompt, given)
    return ChatText(text, escape)
