"""The requests of the API, field by field.

A parameter is honoured, accepted because it has no effect here, or rejected by name. A field of type `Unsupported`
takes only null, and any other name is unknown. Types are strict: "5" is not a number and 1 is not a boolean. The
OpenAPI document is generated from these classes.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quire.engine.params import (
    MAX_LOGIT_BIAS_IDS,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_SEQUENCES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from quire.engine.structured import MAX_CHOICES, StructuredOutputsParams
from quire.errors import RequestError
from quire.server.cache_fields import Lifetime, Pin, Priority, Salt
from quire.server.errors import bad_request, shown
from quire.server.structure import MAX_VALUES
from quire.tools.calls import EMPTY, Tool, ToolChoice

MAX_MESSAGES = 16384
"""As many messages as a context of 65,536 tokens can hold, with at least four tokens each."""

MAX_TOOLS, MAX_CALLS = 128, 128
"""Tools of a request, and calls of an earlier answer."""

MAX_PARTS = 1024
"""Parts of one message. Clients send one per paragraph or document."""

MAX_METADATA, MAX_MODALITIES = 16, 8
"""Number of pairs and of names. OpenAI takes 16 pairs and has two modalities."""


Unsupported = Annotated[None, Field(description="Not supported; only null is accepted.")]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Tokens = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _only_false(value: Any) -> bool | None:
    # A Literal would accept 0 as false.
    if value is not None and value is not False:
        raise PydanticCustomError("literal_error", "Only false is supported")
    return False


def _faulty_item(forms: str, fault: str) -> PydanticCustomError:
    # pydantic would read braces in the message as placeholders.
    return PydanticCustomError("faulty_item", "{reason}", {"reason": f"{forms}; {fault}"})


def is_token(value: Any) -> bool:
    """Whether a value may be a token id."""
    return type(value) is int and 0 <= value < 2**31


_PROMPT_FORMS = "Must be a string, a list of token ids, or a list of one of these, and not empty"


def _prompts(value: Any) -> list[str | list[int]]:
    """Converts the four forms of `prompt` to a list of texts and lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(each, str) for each in value):
            return list(value)
        if all(map(is_token, value)):
            return [value]
        if all(isinstance(each, list) and all(map(is_token, each)) for each in value):
            return list(value)
        raise _faulty_item(_PROMPT_FORMS, _fault(value))
    raise ValueError(_PROMPT_FORMS)


def _fault(prompts: list[Any]) -> str:
    """Describes the first item of `prompts` that is of another kind than the first one."""
    kind = type(prompts[0]) if isinstance(prompts[0], str | list) else int
    for place, prompt in enumerate(prompts):
        if kind is list and isinstance(prompt, list):
            if (at := next((at for at, token in enumerate(prompt) if not is_token(token)), None)) is not None:
                return f"[{place}][{at}] is {shown(prompt[at])}"
        elif kind is list or not (isinstance(prompt, str) if kind is str else is_token(prompt)):
            return f"[{place}] is {shown(prompt)}"
    raise AssertionError(f"{len(prompts)} prompts are of one kind")


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_STOP_STRING_CHARS


def _stops(value: Any) -> list[str] | None:
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not (isinstance(stops, list) and len(stops) <= MAX_STOP_STRINGS and all(map(_is_stop, stops))):
        forms = f"Must be a string of 1 to {MAX_STOP_STRING_CHARS} characters, or a list of at most {MAX_STOP_STRINGS}"
        if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
            raise _faulty_item(forms, f"the list has {len(value)}")
        if isinstance(value, list) and (bad := [at for at, stop in enumerate(value) if not _is_stop(stop)]):
            raise _faulty_item(forms, f"[{bad[0]}] is {shown(value[bad[0]])}")
        raise ValueError(forms)
    return stops


def _template_variables(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("Must be an object")
    return value


def _few_pairs(value: Any) -> Any:
    # pydantic would check all pairs before it counts them.
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"Must have at most {MAX_METADATA} pairs")
    return value


def _biases(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS_IDS:
        raise ValueError(f"Must be an object of at most {MAX_LOGIT_BIAS_IDS} token ids")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < 2**31):
            raise _faulty_item("Its keys must be token ids", f"{shown(key)} is none")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise _faulty_item("Its values must be numbers from -100 to 100", f"that of {key} is {shown(bias)}")
        biases[int(key)] = float(bias)
    return biases


def _structure(value: Any) -> StructuredOutputsParams | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("Must be an object")
    try:
        if "reasoning" in value:
            raise RequestError("structured_outputs: 'reasoning' is not known", "structured_outputs")
        return StructuredOutputsParams.from_options(value)
    except RequestError as error:
        raise bad_request(str(error), error.param) from None


TOKEN_SCHEMA: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": TOKEN_SCHEMA, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": TOKEN_SCHEMA, "minItems": 1}, "minItems": 1},
    ]
}
_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS},
            "maxItems": MAX_STOP_STRINGS,
        },
        {"type": "null"},
    ]
}
_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS_IDS,
        },
        {"type": "null"},
    ]
}
_STRUCTURE_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "json": {"type": ["object", "string", "boolean"]},
                "json_object": {"const": True},
                "regex": {"type": "string"},
                "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_CHOICES},
                "grammar": {"type": "string"},
                "disable_any_whitespace": {"type": "boolean"},
            },
            "additionalProperties": False,
        },
        {"type": "null"},
    ],
    "description": "Extension: what the text must be, as vLLM takes it. One of the first five.",
}
Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
Stops = Annotated[list[str] | None, PlainValidator(_stops), WithJsonSchema(_STOP_SCHEMA)]
OnlyFalse = Annotated[bool | None, PlainValidator(_only_false), WithJsonSchema({"enum": [False, None]})]
TemplateVariables = Annotated[
    dict[str, Any] | None,
    PlainValidator(_template_variables),
    WithJsonSchema({"type": ["object", "null"], "description": "Extension: variables for the chat template."}),
]
Structured = Annotated[StructuredOutputsParams | None, PlainValidator(_structure), WithJsonSchema(_STRUCTURE_SCHEMA)]
Biases = Annotated[dict[int, float] | None, PlainValidator(_biases), WithJsonSchema(_BIAS_SCHEMA)]


_ADVISED = "Default: the model's value in `sampling_defaults` (GET /v1/models), else the API's default."
Metadata = Annotated[dict[str, str], BeforeValidator(_few_pairs), Field(max_length=MAX_METADATA)]


class Model(BaseModel):
    """An object in a request. It is strict and rejects unknown names.

    Validation of a list stops at the first invalid item (`fail_fast`).
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_name(cls, value: Any) -> Any:
        """Keeps only one of many unknown names, because pydantic makes an error for each."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {name: value[name] for name in cls.model_fields if name in value}
        unknown = next(name for name in value if name not in cls.model_fields)
        return known | {unknown: value[unknown]}


class JsonSchemaFormat(Model):
    """A named schema."""

    name: str
    description: str | None = None
    strict: bool | None = Field(None, description="Accepted: schemas are always honoured whole or refused.")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="None: any JSON object.")


def refused_as(error: RequestError, param: str) -> RequestError:
    """An error of `structured_outputs` under the name that a request has for it; any other error as it is."""
    if error.param != "structured_outputs" or param == error.param:
        return error
    return RequestError(f"'{param}': {str(error).removeprefix('structured_outputs: ')}", param)


class ResponseFormat(Model):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            needs = "needs" if self.type == "json_schema" else "does not take"
            raise bad_request(f"'response_format' of type {self.type!r} {needs} 'json_schema'", "response_format")
        return self

    def structure(self) -> StructuredOutputsParams | None:
        """What it wants of the text. Raises RequestError."""
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.schema_
        return StructuredOutputsParams(json_object=True) if schema is None else StructuredOutputsParams(json=schema)


class StreamOptions(Model):
    """Optional contents of a stream."""

    include_usage: bool | None = None
    """A last chunk without choices has the token counts."""
    continuous_usage_stats: bool | None = None
    """Every chunk has the token counts so far."""
    include_obfuscation: OnlyFalse = None


class Tuning(Model):
    """Parameters of every endpoint that generates."""

    model: str | None = Field(None, description="The served model's name; optional.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description=_ADVISED)
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description=_ADVISED)
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: Stops = None
    logit_bias: Biases = None
    user: str | None = Field(None, description="Accepted and not used.")

    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None, description=f"Extension: 0 or -1 is off. {_ADVISED}"
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description=f"Extension. {_ADVISED}")
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_REPETITION_PENALTY)] | None = Field(
        None, description=f"Extension: 1 is off. {_ADVISED}"
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = Field(
        None, description="Extension."
    )
    ignore_eos: bool | None = Field(None, description="Extension: generate past the model's end token.")
    min_tokens: Tokens | None = Field(None, description="Extension: minimum number of generated tokens.")
    skip_special_tokens: bool | None = Field(
        None, description="Extension: omit special tokens from the text (default)."
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="Extension: include the stop string that ended the text."
    )

    structured_outputs: Structured = None

    cache_salt: Salt = None
    cache_pin: Pin = None
    cache_priority: Priority = None
    cache_lifetime: Lifetime = None

    def structure(self) -> StructuredOutputsParams | None:
        """What the text of an answer must be. Raises RequestError that names `structure_param`."""
        try:
            return self.structured_outputs or self._formatted()
        except RequestError as error:
            raise refused_as(error, self.structure_param) from None

    @property
    def structure_param(self) -> str:
        """The field that says what the text must be."""
        return "structured_outputs"

    def _formatted(self) -> StructuredOutputsParams | None:
        """What the endpoint's own field for the form says."""
        return None


class Sampling(Tuning):
    """Parameters of completions and chats."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    return_token_ids: bool | None = Field(None, description="Extension: with the token ids of prompts and answers.")
    response_format: ResponseFormat | None = None

    @property
    def structure_param(self) -> str:
        """See Tuning."""
        is_own = self.structured_outputs is not None or self.response_format is None
        return super().structure_param if is_own else "response_format.json_schema.schema"

    def _formatted(self) -> StructuredOutputsParams | None:
        return None if self.response_format is None else self.response_format.structure()

    @model_validator(mode="after")
    def _has_one_structure(self) -> Sampling:
        if self.structured_outputs is not None and self.response_format and self.response_format.type != "text":
            raise bad_request("'structured_outputs' and 'response_format' exclude each other", "structured_outputs")
        return self

    @model_validator(mode="after")
    def _options_need_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' is only allowed when 'stream' is true", "stream_options")
        return self


class CompletionRequest(Sampling):
    """The body of POST /v1/completions."""

    prompt: Prompts
    max_tokens: Tokens | None = Field(16, description="0 with echo scores the prompt and generates nothing.")
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = Field(None, description="Must equal n.")
    add_special_tokens: bool | None = Field(
        None, description="Extension: add the model's begin tokens to text prompts (default)."
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(None, description="Extension.")

    suffix: Unsupported = None

    @model_validator(mode="after")
    def _options_agree(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            message = f"'best_of' is {self.best_of} and 'n' is {self.n or 1}; they must be equal"
            raise bad_request(message, "best_of", "unsupported_value")
        if self.stream and self.prompt_logprobs is not None:
            message = "'prompt_logprobs' is not supported when 'stream' is true; ask for 'echo' and 'logprobs'"
            raise bad_request(message, "prompt_logprobs", "unsupported_value")
        return self


class TextPart(Model):
    """A piece of a message."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("=string")]
    | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS), Tag("=parts")],
    Discriminator(lambda value: "=parts" if isinstance(value, list) else "=string"),
]


class CalledFunction(Model):
    """What an earlier answer called. arguments: JSON text."""

    name: str
    arguments: str

    def parsed(self) -> Any:
        """The arguments as chat templates take them: an object, or the text if it is none."""
        try:
            found = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return self.arguments
        return found if isinstance(found, dict) else self.arguments


class MadeCall(Model):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int, Field(ge=0)] | None = Field(None, description="As in streamed calls; not used.")


MadeCalls = Annotated[list[MadeCall], Field(fail_fast=True, max_length=MAX_CALLS)]
NoItems = Annotated[list[Any], Field(max_length=0)]


class BaseMessage(Model):
    """What messages of all roles have in common."""

    name: str | None = None

    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None

    def for_template(self) -> dict[str, Any]:
        """The message in the form of chat templates."""
        return {} if self.name is None else {"name": self.name}


def joined(content: str | list[TextPart] | None) -> str:
    """Content as one text, with parts joined by newlines."""
    return content or "" if not isinstance(content, list) else "\n".join(part.text for part in content)


class GivenMessage(BaseMessage):
    """What somebody says to the model. `developer` means `system`, because the served models know only that role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]  # the last two are messages of other classes
    content: Content

    annotations: Unsupported = None
    tool_calls: Unsupported = None
    tool_call_id: Unsupported = None

    def for_template(self) -> dict[str, Any]:
        """See BaseMessage."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": joined(self.content), **super().for_template()}


class AssistantMessage(BaseMessage):
    """An earlier answer, as servers give it."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: MadeCalls | None = None
    annotations: NoItems | None = None
    tool_call_id: Unsupported = None

    def for_template(self) -> dict[str, Any]:
        """See BaseMessage."""
        calls = [
            {"id": call.id, "type": "function",
             "function": {"name": call.function.name, "arguments": call.function.parsed()}}
            for call in self.tool_calls or ()
        ]  # fmt: skip
        message: dict[str, Any] = {"role": "assistant", "content": joined(self.content), **super().for_template()}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message | {"tool_calls": calls} if calls else message


class ToolMessage(BaseMessage):
    """What a tool that an answer called has said."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str

    annotations: Unsupported = None
    tool_calls: Unsupported = None

    def for_template(self) -> dict[str, Any]:
        """See BaseMessage."""
        message = {"role": "tool", "content": joined(self.content), "tool_call_id": self.tool_call_id}
        return message | super().for_template()


def _kind_of_message(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return f"={role}" if role in ("assistant", "tool") else "=given"


Message = Annotated[
    Annotated[GivenMessage, Tag("=given")]
    | Annotated[AssistantMessage, Tag("=assistant")]
    | Annotated[ToolMessage, Tag("=tool")],
    Discriminator(_kind_of_message),
]


def check_continued(messages: list[Any] | None, opens: bool | None, continues: bool | None) -> None:
    """Raises ApiError 400 if the last message is to be gone on with and cannot be."""
    if continues and opens:
        message = "'continue_final_message' and 'add_generation_prompt' exclude each other"
        raise bad_request(message, "continue_final_message")
    if continues and (not messages or messages[-1].role != "assistant" or not joined(messages[-1].content)):
        message = "'continue_final_message' needs an assistant's last message with text"
        raise bad_request(message, "continue_final_message")


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class Function(Model):
    """A function that the caller can run."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object; null: no parameters.")
    strict: bool | None = Field(None, description="Whether arguments fit the schema also where calls are optional.")


class ToolParam(Model):
    """A tool: a function."""

    type: Literal["function"]
    function: Function

    def tool(self) -> Tool:
        """Without what JSON needs."""
        given = self.function
        parameters = EMPTY if given.parameters is None else given.parameters
        return Tool(given.name, given.description or "", parameters, bool(given.strict))


def check_tools(names: list[str], named: str | None, choice: Any) -> None:
    """Raises ApiError 400 for tools that contradict each other, or their choice.

    named   the tool that must be called; None: none is named
    choice  as it was given
    """
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise bad_request(f"'tools' has {twice!r} twice", "tools")
    if choice not in (None, "none", "auto") and not names:
        raise bad_request("'tool_choice' asks for a call, and there are no 'tools'", "tool_choice")
    if named is not None and named not in names:
        raise bad_request(f"'tool_choice' names {named!r}, which is not in 'tools'", "tool_choice")


class NamedFunction(Model):
    """The name of a function."""

    name: str


class NamedTool(Model):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def _kind_of_choice(value: Any) -> str:
    return "=word" if isinstance(value, str) else "=tool"


ToolChoiceParam = (
    Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("=word")] | Annotated[NamedTool, Tag("=tool")],
        Discriminator(_kind_of_choice),
    ]
    | None
)


class ChatRequest(Sampling):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="The older name of max_completion_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=MAX_MODALITIES)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(None, description="Extension.")
    echo: bool | None = Field(None, description="Extension: begin the answer with the last message, an assistant's.")
    add_generation_prompt: bool | None = Field(None, description="Extension: begin an answer (default).")
    continue_final_message: bool | None = Field(
        None, description="Extension: go on with the last message, an assistant's, in place of beginning an answer."
    )
    include_reasoning: bool | None = Field(None, description="Extension: split reasoning off the answer (default).")

    tools: Annotated[list[ToolParam], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam = None
    parallel_tool_calls: bool | None = Field(None, description="Whether an answer may have several calls (default).")
    chat_template_kwargs: TemplateVariables = None
    service_tier: Literal["auto", "default"] | None = None
    store: OnlyFalse = None
    metadata: Metadata | None = Field(None, description="Accepted and not used.")
    prompt_cache_key: str | None = Field(None, description="Accepted and not used.")
    safety_identifier: str | None = Field(None, description="Accepted and not used.")

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
        if self.echo and not (last == "assistant" and (self.continue_final_message or not self.opens)):
            raise bad_request("'echo' needs an assistant's last message that the answer goes on with", "echo")
        if self.stream and self.prompt_logprobs is not None:
            message = "'prompt_logprobs' is not supported when 'stream' is true"
            raise bad_request(message, "prompt_logprobs", "unsupported_value")
        names = [tool.function.name for tool in self.tools or ()]
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        check_tools(names, named, self.tool_choice)
        return self

    @property
    def opens(self) -> bool:
        """Whether the prompt ends with the beginning of an answer."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    @property
    def chosen(self) -> ToolChoice:
        """Whether the answer may or must call, and what."""
        parallel = self.parallel_tool_calls is not False
        match self.tool_choice:
            case NamedTool(function=NamedFunction(name=name)):
                return ToolChoice("required", name, parallel=False)
            case "required":
                return ToolChoice("required", parallel=parallel)
            case "none":
                return ToolChoice("none")
        return ToolChoice("auto" if self.tools else "none", parallel=parallel)


class TokenizeRequest(Model):
    """The body of POST /tokenize: a text or a conversation."""

    model: str | None = None
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


class DetokenizeRequest(Model):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_VALUES)]
    skip_special_tokens: bool | None = Field(None, description="Omit special tokens from the text; false by default.")
