"""The request of POST /v1/responses, field by field; see `schema`. It has only fields that need no stored state."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, Tag, model_validator
from pydantic_core import PydanticCustomError

from quire.server.chat_schema import (
    FUNCTION_NAME,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    ConversationFields,
    ConversationObject,
    content_text,
    read_arguments,
)
from quire.server.errors import bad_request
from quire.server.fields import Ignored, Metadata, OnlyFalse, TextOr, Unsupported, WordOr
from quire.server.json_complexity import JsonText
from quire.server.schema import GenerationRequest, StrictModel, json_structure
from quire.structured.params import StructuredOutputsParams
from quire.tools.calls import EMPTY, Tool


class InputText(ConversationObject):
    """A piece of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None


InputParts = Annotated[list[InputText], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
ToolOutput = TextOr[Annotated[list[InputText], Field(fail_fast=True, max_length=MAX_PARTS)]]
"""The result of a tool, which may be empty."""


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _is_message(value: Any) -> Any:
    """Refuses an item of another type. Clients refer to an item by its id if they believe that the server stores it."""
    if value == "item_reference":
        said = "Nothing is stored here: send the item itself, as clients do that are told `store: false`"
        raise PydanticCustomError("literal_error", said)
    if isinstance(value, str) and value not in _KINDS:
        raise PydanticCustomError("literal_error", f"An item is one of {', '.join(_KINDS)}")
    return value


class InputObject(ConversationObject):
    """An item in the form of a response's items."""

    id: Ignored = None
    status: Ignored = None


class InputMessage(InputObject):
    """A message, such as an earlier answer."""

    type: Annotated[Literal["message"], BeforeValidator(_is_message)] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOr[InputParts]
    phase: Ignored = None


class InputCall(InputObject):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: JsonText
    parsed_arguments: Ignored = None
    caller: Ignored = None
    namespace: Ignored = None
    async_: Ignored = None


class InputResult(InputObject):
    """The result of a tool."""

    type: Literal["function_call_output"]
    call_id: str
    output: ToolOutput
    name: Ignored = None
    caller: Ignored = None
    namespace: Ignored = None


class InputReasoningText(ConversationObject):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(InputObject):
    """Reasoning of an earlier answer. The chat template decides whether the prompt includes it."""

    type: Literal["reasoning"]
    content: Annotated[list[InputReasoningText], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    summary: Ignored = None
    encrypted_content: Ignored = None


def _kind(value: Any) -> str:
    given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"={given}" if given in _KINDS else "=message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("=message")]
    | Annotated[InputCall, Tag("=function_call")]
    | Annotated[InputResult, Tag("=function_call_output")]
    | Annotated[InputReasoning, Tag("=reasoning")],
    Discriminator(_kind),
]
FORMAT_PARAM = "text.format.schema"


class TextFormat(StrictModel):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = Field(None, description="Accepted: schemas are always honoured whole or refused.")
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    _structure: StructuredOutputsParams | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            needs = "needs" if self.type == "json_schema" else "does not take"
            raise bad_request(f"'text.format' of type {self.type!r} {needs} 'schema'", "text.format")
        if self.type != "text":
            self._structure = json_structure(self.schema_, FORMAT_PARAM)
        return self

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """The constraint on the text."""
        return self._structure


class TextConfig(StrictModel):
    """Options for the text of the answer."""

    format: TextFormat | None = None
    verbosity: Unsupported = None


class FunctionTool(StrictModel):
    """A function that the caller can run."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """The tool in the engine's form. As in OpenAI's API, it is strict by default."""
        parameters = EMPTY if self.parameters is None else self.parameters
        return Tool(self.name, self.description or "", parameters, self.strict is not False)


class NamedFunctionTool(StrictModel):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class NoReasoning(StrictModel):
    """The reasoning options, which cannot be chosen."""

    effort: Unsupported = None
    summary: Unsupported = None
    generate_summary: Unsupported = None


class ResponsesStreamOptions(StrictModel):
    """Optional contents of a stream."""

    include_obfuscation: OnlyFalse = None


class ResponsesRequest(ConversationFields, GenerationRequest):
    """The body of POST /v1/responses."""

    input: TextOr[Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: WordOr[NamedFunctionTool] | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Field(fail_fast=True, max_length=8),
        ]
        | None
    ) = Field(None, description="Log-probabilities come where they are asked for; reasoning is never encrypted.")
    store: OnlyFalse = Field(None, description="Nothing is stored; null means false here.")
    truncation: Literal["disabled"] | None = None
    background: OnlyFalse = None
    metadata: Metadata | None = Field(None, description="Given back.")

    previous_response_id: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    reasoning: NoReasoning | None = None
    max_tool_calls: Unsupported = None

    include_reasoning: bool | None = None

    @model_validator(mode="after")
    def _options_agree(self) -> ResponsesRequest:
        self._check_tools()
        has_format = self.text is not None and self.text.format is not None and self.text.format.type != "text"
        if self.structured_outputs is not None and has_format:
            raise bad_request("'structured_outputs' and 'text.format' exclude each other", "structured_outputs")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the request wants log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def structure_param(self) -> str:
        """See GenerationRequest."""
        return super().structure_param if self.structured_outputs is not None else FORMAT_PARAM

    def _formatted(self) -> StructuredOutputsParams | None:
        return None if self.text is None or self.text.format is None else self.text.format.structure

    def for_template(self) -> list[dict[str, Any]]:
        """The conversation in the form of chat templates."""
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        thought: dict[str, str] = {}  # reasoning that belongs to the next answer
        for item in self.input:
            match item:
                case InputReasoning(content=content):
                    thought = {"reasoning_content": "\n".join(part.text for part in content)} if content else {}
                    continue
                case InputMessage(role="assistant", content=content):
                    found.append({"role": "assistant", "content": content_text(content), **thought})
                case InputMessage(role=role, content=content):
                    found.append({"role": "system" if role == "developer" else role, "content": content_text(content)})
                case InputCall(call_id=call_id, name=name, arguments=arguments):
                    if thought or not (found and found[-1]["role"] == "assistant"):
                        found.append({"role": "assistant", "content": "", **thought})
                    function = {"name": name, "arguments": read_arguments(arguments)}
                    call = {"id": call_id, "type": "function", "function": function}
                    found[-1].setdefault("tool_calls", []).append(call)
                case InputResult(call_id=call_id, output=output):
                    found.append({"role": "tool", "content": content_text(output), "tool_call_id": call_id})
            thought = {}
        return found
