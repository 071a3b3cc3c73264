"""The requests that have conversations and tools, field by field; see `schema`."""

from __future__ import annotations

import functools
import json
import logging
import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from quire.engine.params import MAX_LOGPROBS
from quire.models.chat import Role
from quire.server.errors import bad_request
from quire.server.fields import (
    UNUSED,
    Ignored,
    Metadata,
    OnlyFalse,
    TemplateVariables,
    TextOr,
    Unsupported,
    WordOr,
    extension,
)
from quire.server.json_complexity import JsonText
from quire.server.schema import BaseCompletionRequest, ModelRequest, StrictModel
from quire.tools.calls import EMPTY, Tool, ToolChoice

MAX_MESSAGES = 16384
"""Maximum number of messages: a context of 65,536 tokens with at least four tokens per message."""

MAX_TOOLS, MAX_CALLS = 128, 128
"""Maximum number of tools of a request, and of calls of an earlier answer."""

MAX_PARTS = 1024
"""Maximum number of parts of one message. Clients send one per paragraph or document."""

MAX_MODALITIES = 8
"""Maximum number of modalities. OpenAI has two."""


log = logging.getLogger("quire.server")

_said: set[str] = set()
"""Names of fields that were already logged; at most those of type Reported."""

_REPORTED = object()
Reported = Annotated[Ignored, _REPORTED]
"""A field that is not used. The log says so once."""


@functools.cache
def reported_names(kind: type[StrictModel]) -> frozenset[str]:
    """The fields of a class that the log reports."""
    return frozenset(name for name, field in kind.model_fields.items() if _REPORTED in field.metadata)


class ConversationObject(StrictModel):
    """An object of a conversation. Clients send back the fields that another server or a library added to it.

    The fields named here change nothing. Any other unknown name is refused, so that a mistyped name is found.
    """

    cache_control: Reported = None
    extra_content: Reported = None
    provider_specific_fields: Reported = None

    @model_validator(mode="after")
    def _say(self) -> ConversationObject:
        for name in reported_names(type(self)).intersection(self.__pydantic_fields_set__).difference(_said):
            if getattr(self, name) is not None:
                _said.add(name)
                log.info("a conversation has %r, which is passed over here; this is said once", name)
        return self


class TextPart(ConversationObject):
    """A piece of a message."""

    annotations: Reported = None
    extras: Reported = None
    id: Reported = None
    index: Reported = None

    type: Literal["text"]
    text: str


Content = TextOr[Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]]

ReplyContent = TextOr[Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)]]
"""Content of an answer or of a tool's result, which may be empty."""


class FunctionCallParam(ConversationObject):
    """The function and the arguments of a call in an earlier answer. arguments: JSON text."""

    name: str
    arguments: JsonText
    parsed_arguments: Ignored = None


_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def read_arguments(text: str) -> Any:
    """Arguments in the form of chat templates: an object, or the text if it is no valid object."""
    try:
        found = json.loads(text or "{}")
        if _HALF.search(text):
            json.dumps(found, ensure_ascii=False).encode()  # an escape may stand for half a surrogate pair
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


class ToolCallParam(ConversationObject):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCallParam
    index: Annotated[int, Field(ge=0)] | None = Field(None, description="As in streamed calls; not used.")


ToolCallParams = Annotated[list[ToolCallParam], Field(fail_fast=True, max_length=MAX_CALLS)]


class BaseMessage(ConversationObject):
    """The common fields of messages of all roles."""

    annotations: Reported = None
    id: Reported = None
    reasoning: Reported = None
    reasoning_details: Reported = None
    thinking_blocks: Reported = None

    name: str | None = None

    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None

    def for_template(self) -> dict[str, Any]:
        """The message in the form of chat templates."""
        return {} if self.name is None else {"name": self.name}


def content_text(content: str | list[Any] | None) -> str:
    """Content as one text, with parts joined by newlines."""
    return content or "" if not isinstance(content, list) else "\n".join(part.text for part in content)


class PromptMessage(BaseMessage):
    """A message of the system or user. `developer` means `system`, because the served models know only that role."""

    role: Role  # the last two are messages of other classes
    content: Content

    tool_calls: Unsupported = None
    tool_call_id: Unsupported = None

    def for_template(self) -> dict[str, Any]:
        """See BaseMessage."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content_text(self.content), **super().for_template()}


class AssistantMessage(BaseMessage):
    """An earlier answer, in the form in which servers give it."""

    role: Literal["assistant"]
    content: ReplyContent | None = None
    reasoning_content: str | None = None
    parsed: Ignored = None
    tool_calls: ToolCallParams | None = None
    tool_call_id: Unsupported = None

    def for_template(self) -> dict[str, Any]:
        """See BaseMessage."""
        calls = [
            {"id": call.id, "type": "function",
             "function": {"name": call.function.name, "arguments": read_arguments(call.function.arguments)}}
            for call in self.tool_calls or ()
        ]  # fmt: skip
        message: dict[str, Any] = {"role": "assistant", "content": content_text(self.content), **super().for_template()}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message | {"tool_calls": calls} if calls else message


class ToolMessage(BaseMessage):
    """The result of a tool that an answer called."""

    role: Literal["tool"]
    content: ReplyContent
    tool_call_id: str

    tool_calls: Unsupported = None

    def for_template(self) -> dict[str, Any]:
        """See BaseMessage."""
        message = {"role": "tool", "content": content_text(self.content), "tool_call_id": self.tool_call_id}
        return message | super().for_template()


def _kind_of_message(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return f"={role}" if role in ("assistant", "tool") else "=given"


Message = Annotated[
    Annotated[PromptMessage, Tag("=given")]
    | Annotated[AssistantMessage, Tag("=assistant")]
    | Annotated[ToolMessage, Tag("=tool")],
    Discriminator(_kind_of_message),
]


def template_messages(messages: list[Message] | None) -> list[dict[str, Any]]:
    """A conversation in the form of chat templates."""
    return [message.for_template() for message in messages or ()]


def check_continued(messages: list[Any] | None, begins_answer: bool | None, continues: bool | None) -> None:
    """Raises ApiError 400 if the answer cannot continue the last message as the request asks."""
    if continues and begins_answer:
        message = "'continue_final_message' and 'add_generation_prompt' exclude each other"
        raise bad_request(message, "continue_final_message")
    if continues and (not messages or messages[-1].role != "assistant" or not content_text(messages[-1].content)):
        message = "'continue_final_message' needs an assistant's last message with text"
        raise bad_request(message, "continue_final_message")
    if continues and messages and messages[-1].tool_calls:
        raise bad_request("'continue_final_message' cannot continue after 'tool_calls'", "continue_final_message")


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class Function(StrictModel):
    """A function that the caller can run."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object; null: no parameters.")
    strict: bool | None = Field(None, description="Whether arguments fit the schema also where calls are optional.")


class ToolParam(StrictModel):
    """A tool: a function."""

    type: Literal["function"]
    function: Function

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.name

    def tool(self) -> Tool:
        """The tool in the engine's form."""
        given = self.function
        parameters = EMPTY if given.parameters is None else given.parameters
        return Tool(given.name, given.description or "", parameters, bool(given.strict))


class NamedFunction(StrictModel):
    """The name of a function."""

    name: str


class NamedTool(StrictModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        """The name of the tool."""
        return self.function.name


class ConversationFields(StrictModel):
    """The common fields of all endpoints for conversations. Each endpoint has its own form of tools and choices."""

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: TemplateVariables = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = UNUSED
    safety_identifier: str | None = UNUSED

    @property
    def _named_tool(self) -> str | None:
        """The name of the tool that must be called; None if the request names none."""
        name: str | None = getattr(self.tool_choice, "name", None)
        return name

    def _check_tools(self) -> None:
        """Raises ApiError 400 if two tools have the same name, or if the tool choice does not match the tools."""
        names, named = [tool.name for tool in self.tools or ()], self._named_tool
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise bad_request(f"'tools' has {twice!r} twice", "tools")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise bad_request("'tool_choice' asks for a call, and there are no 'tools'", "tool_choice")
        if named is not None and named not in names:
            raise bad_request(f"'tool_choice' names {named!r}, which is not in 'tools'", "tool_choice")

    @property
    def chosen(self) -> ToolChoice:
        """Whether the answer may or must call, and which tool."""
        if self._named_tool is not None:
            return ToolChoice("required", self._named_tool, parallel=False)
        if self.tool_choice == "none":
            return ToolChoice("none")
        mode: Literal["auto", "none"] = "auto" if self.tools else "none"
        parallel = self.parallel_tool_calls is not False
        return ToolChoice("required" if self.tool_choice == "required" else mode, parallel=parallel)


class ChatRequest(ConversationFields, BaseCompletionRequest):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="The older name of max_completion_tokens."
    )
    logprobs: bool | None = None

    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=MAX_MODALITIES)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(None, description="Extension.")
    echo: bool | None = extension("begin the answer with the last message, an assistant's.")
    add_generation_prompt: bool | None = extension("begin an answer (default).")
    continue_final_message: bool | None = extension(
        "continue the last message, an assistant's, instead of beginning an answer."
    )
    include_reasoning: bool | None = extension("split reasoning off the answer (default).")

    tools: Annotated[list[ToolParam], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: WordOr[NamedTool] | None = None
    parallel_tool_calls: bool | None = Field(None, description="Whether an answer may have several calls (default).")
    store: OnlyFalse = None
    metadata: Metadata | None = UNUSED

    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _options_agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("'top_logprobs' is only allowed when 'logprobs' is true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("'max_tokens' and 'max_completion_tokens' differ; give one of them", "max_tokens")
        check_continued(self.messages, self.add_generation_prompt, self.continue_final_message)
        last = self.messages[-1].role
        if self.echo and not (last == "assistant" and (self.continue_final_message or not self.begins_answer)):
            raise bad_request("'echo' needs an assistant's last message that the answer continues", "echo")
        if self.stream and self.prompt_logprobs is not None:
            message = "'prompt_logprobs' is not supported when 'stream' is true"
            raise bad_request(message, "prompt_logprobs", "unsupported_value")
        self._check_tools()
        return self

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt ends with the beginning of an answer."""
        return self.add_generation_prompt is not False and not self.continue_final_message


class TokenizeRequest(ModelRequest):
    """The body of POST /tokenize: a text or a conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[ToolParam], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: TemplateVariables = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        for name in ("continue_final_message", "tools"):
            if self.messages is None and getattr(self, name) is not None:
                raise bad_request(f"{name!r} is only allowed with 'messages'", name)
        check_continued(self.messages, self.add_generation_prompt, self.continue_final_message)
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either 'prompt' or 'messages'", "prompt")
        if self.prompt is not None and self.add_generation_prompt is not None:
            raise bad_request("'add_generation_prompt' is only allowed with 'messages'", "add_generation_prompt")
        if self.messages is not None and self.add_special_tokens is not None:
            message = "'add_special_tokens' is only allowed with 'prompt'; chat templates add special tokens themselves"
            raise bad_request(message, "add_special_tokens")
        return self
