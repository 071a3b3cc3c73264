"""The answers of /v1/responses, field by field; see `shapes`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

# pydantic accepts the TypedDict of `typing` only from Python 3.12 on; typing_extensions comes with pydantic.
from typing_extensions import TypedDict

from quire.server.shapes import Count, PromptTokensDetails, TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[TokenLogprob]


class OutputMessage(TypedDict):
    """A message of the model."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningText(TypedDict):
    """The text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    """The reasoning that the model writes before its answer."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: Annotated[list[Any], Field(max_length=0)]
    content: list[ReasoningText]


class OutputCall(TypedDict):
    """A call."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class InputDetails(PromptTokensDetails):
    """Prompt tokens that came from the cache."""

    cache_write_tokens: Count


class OutputDetails(TypedDict):
    """The number of reasoning tokens."""

    reasoning_tokens: Count


class ResponseUsage(TypedDict):
    """Token counts of a response."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class IncompleteDetails(TypedDict):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class Response(TypedDict):
    """The answer of /v1/responses. It repeats parameters of the request in the request's form."""

    id: str
    object: Literal["response"]
    created_at: Count
    completed_at: Count | None
    model: str
    status: ItemStatus
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    metadata: dict[str, str]
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    top_p: float
    top_logprobs: Count
    max_output_tokens: Count | None
    text: dict[str, Any]
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any]
    tools: list[dict[str, Any]]
    truncation: Literal["disabled"]
    background: Literal[False]
    service_tier: Literal["default"]
    user: str | None
    usage: ResponseUsage | None


class ResponseEvent(TypedDict):
    """An event of a streamed response. Its other fields depend on its type."""

    type: str
    sequence_number: Count
    response: NotRequired[Response]
    output_index: NotRequired[Count]
    item_id: NotRequired[str]
    item: NotRequired[OutputMessage | OutputReasoning | OutputCall]
    content_index: NotRequired[Count]
    part: NotRequired[OutputText | ReasoningText]
    delta: NotRequired[str]
    text: NotRequired[str]
    arguments: NotRequired[str]
    name: NotRequired[str]
    logprobs: NotRequired[list[TokenLogprob]]
    code: NotRequired[str | None]
    message: NotRequired[str]
    param: NotRequired[str | None]
