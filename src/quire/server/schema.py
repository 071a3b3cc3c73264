"""The requests of the API, field by field.

A parameter is honoured, accepted because it has no effect here, or rejected by name. A field of type `Unsupported`
takes only null, and any other name is unknown. Types are strict: "5" is not a number and 1 is not a boolean. The
OpenAPI document is generated from these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from quire.engine.params import MAX_LOGPROBS, MAX_REPETITION_PENALTY, MAX_SEED, MAX_SEQUENCES, MAX_STOP_TOKEN_IDS
from quire.errors import RequestError
from quire.server.cache_fields import Lifetime, Pin, Priority, Salt
from quire.server.errors import bad_request
from quire.server.fields import (
    UNUSED,
    Biases,
    OnlyFalse,
    Prompts,
    Stops,
    Structured,
    TokenId,
    Tokens,
    Unsupported,
    User,
    extension,
)
from quire.server.json_complexity import MAX_VALUES
from quire.structured.params import StructuredOutputsParams

_ADVISED = "Default: the model's value in `sampling_defaults` (GET /v1/models), else the API's default."


class StrictModel(BaseModel):
    """An object in a request. It is strict and rejects unknown names.

    Validation of a list stops at the first invalid item (`fail_fast`).
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    _num_fields: ClassVar[int] = 0

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Counts the fields once: a conversation has thousands of objects."""
        cls._num_fields = len(cls.model_fields)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_name(cls, value: Any) -> Any:
        """Keeps only one of many unknown names, because pydantic makes an error for each."""
        if not isinstance(value, dict) or len(value) <= cls._num_fields:
            return value
        known = {name: value[name] for name in cls.model_fields if name in value}
        unknown = next(name for name in value if name not in cls.model_fields)
        return known | {unknown: value[unknown]}

    def forget(self, *names: str) -> None:
        """Drops the values of fields that are not read again: requests live as long as their answers."""
        for name in names:
            self.__dict__[name] = None


class ModelRequest(StrictModel):
    """A request to a model. Its name is optional."""

    model: str | None = None


class JsonSchemaFormat(StrictModel):
    """A named schema."""

    name: str
    description: str | None = None
    strict: bool | None = Field(None, description="Accepted: schemas are always honoured whole or refused.")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="None: any JSON object.")


def refused_as(error: RequestError, param: str) -> RequestError:
    """Renames an error of `structured_outputs` after the request's own field; returns any other error unchanged."""
    if error.param != "structured_outputs" or param == error.param:
        return error
    return RequestError(f"'{param}': {str(error).removeprefix('structured_outputs: ')}", param)


def json_structure(schema: dict[str, Any] | None, param: str) -> StructuredOutputsParams:
    """The constraint for JSON of a schema, or for any JSON object. Called during pydantic's validation: large bodies
    are validated off the event loop and a schema may have 8 MB. Raises ApiError 400 that names `param`.
    """
    try:
        return StructuredOutputsParams(json_object=True) if schema is None else StructuredOutputsParams(json=schema)
    except RequestError as error:
        refusal = refused_as(error, param)
        raise bad_request(str(refusal), refusal.param) from None


FORMAT_PARAM = "response_format.json_schema.schema"


class ResponseFormat(StrictModel):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    _structure: StructuredOutputsParams | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            needs = "needs" if self.type == "json_schema" else "does not take"
            raise bad_request(f"'response_format' of type {self.type!r} {needs} 'json_schema'", "response_format")
        if self.type != "text":
            schema = None if self.json_schema is None else self.json_schema.schema_
            self._structure = json_structure(schema, FORMAT_PARAM)
        return self

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """The constraint on the text."""
        return self._structure


class StreamOptions(StrictModel):
    """Optional contents of a stream."""

    include_usage: bool | None = None
    """Whether a last chunk without choices has the token counts."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the token counts so far."""
    include_obfuscation: OnlyFalse = None


class GenerationRequest(StrictModel):
    """Parameters of every endpoint that generates."""

    model: str | None = Field(None, description="The served model's name; optional.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description=_ADVISED)
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description=_ADVISED)
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: Stops = None
    logit_bias: Biases = None
    user: User | None = UNUSED

    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = extension(f"0 or -1 is off. {_ADVISED}")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description=f"Extension. {_ADVISED}")
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_REPETITION_PENALTY)] | None = extension(
        f"1 is off. {_ADVISED}"
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = Field(
        None, description="Extension."
    )
    ignore_eos: bool | None = extension("generate past the model's end token.")
    min_tokens: Tokens | None = extension("minimum number of generated tokens.")
    skip_special_tokens: bool | None = extension("omit special tokens from the text (default).")
    include_stop_str_in_output: bool | None = extension("include the stop string that ended the text.")

    structured_outputs: Structured = None

    cache_salt: Salt = None
    cache_pin: Pin = None
    cache_priority: Priority = None
    cache_lifetime: Lifetime = None

    def structure(self) -> StructuredOutputsParams | None:
        """The constraint on the text of an answer."""
        return self.structured_outputs or self._formatted()

    @property
    def structure_param(self) -> str:
        """The name of the field with the constraint."""
        return "structured_outputs"

    def _formatted(self) -> StructuredOutputsParams | None:
        """The constraint of the endpoint's own field."""
        return None


class BaseCompletionRequest(GenerationRequest):
    """Parameters of completions and chats."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    return_token_ids: bool | None = extension("with the token ids of prompts and answers.")
    response_format: ResponseFormat | None = None

    @property
    def structure_param(self) -> str:
        """See GenerationRequest."""
        is_own = self.structured_outputs is not None or self.response_format is None
        return super().structure_param if is_own else FORMAT_PARAM

    def _formatted(self) -> StructuredOutputsParams | None:
        return None if self.response_format is None else self.response_format.structure

    @model_validator(mode="after")
    def _has_one_structure(self) -> BaseCompletionRequest:
        if self.structured_outputs is not None and self.response_format and self.response_format.type != "text":
            raise bad_request("'structured_outputs' and 'response_format' exclude each other", "structured_outputs")
        return self

    @model_validator(mode="after")
    def _options_need_stream(self) -> BaseCompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' is only allowed when 'stream' is true", "stream_options")
        return self


class CompletionRequest(BaseCompletionRequest):
    """The body of POST /v1/completions."""

    prompt: Prompts
    max_tokens: Tokens | None = Field(16, description="0 with echo scores the prompt and generates nothing.")
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = Field(None, description="Must equal n.")
    add_special_tokens: bool | None = extension("add the model's begin tokens to text prompts (default).")
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


class DetokenizeRequest(ModelRequest):
    """The body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_VALUES)]
    skip_special_tokens: bool | None = Field(None, description="Omit special tokens from the text; false by default.")
