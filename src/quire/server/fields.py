"""Types of fields that several requests share, with the values they accept and their errors for other values."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from quire.engine.params import MAX_LOGIT_BIAS_IDS, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from quire.errors import RequestError
from quire.server.errors import bad_request, shown
from quire.server.json_complexity import check_string
from quire.structured.params import MAX_CHOICES, SERVER_ONLY_FIELDS, StructuredOutputsParams

MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_TEXT = 16, 64, 512
"""Maximum number of pairs, and of characters of their names and texts, as in OpenAI's API."""

MAX_USER = 1024
"""Maximum number of characters of `user`, which a response repeats."""

T = TypeVar("T")

TextOr = Annotated[
    Annotated[str, Tag("=string")] | Annotated[T, Tag("=parts")],
    Discriminator(lambda value: "=parts" if isinstance(value, list) else "=string"),
]
"""A text, or a list."""

WordOr = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("=word")] | Annotated[T, Tag("=tool")],
    Discriminator(lambda value: "=word" if isinstance(value, str) else "=tool"),
]
"""A choice of tools: a word, or the tool that must be called."""
Ignored = Annotated[Any, Field(description="Accepted and not used.")]
UNUSED: Any = Field(None, description="Accepted and not used.")
"""The default of a field that is not used."""
Unsupported = Annotated[None, Field(description="Not supported; only null is accepted.")]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Tokens = Annotated[int, Field(ge=0, le=2**31 - 1)]


def extension(about: str) -> Any:
    """A field that OpenAI's API does not have; null means not given."""
    return Field(None, description=f"Extension: {about}")


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
    """Describes the first item of `prompts` that differs in kind from the first one."""
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


def _structure(value: Any, info: ValidationInfo) -> StructuredOutputsParams | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("Must be an object")
    if isinstance(schema := value.get("json"), str):
        check_string(schema, info)
    try:
        if foreign := [name for name in SERVER_ONLY_FIELDS if name in value]:
            raise RequestError(f"structured_outputs: {foreign[0]!r} is not known", "structured_outputs")
        return StructuredOutputsParams.from_options(value)
    except RequestError as error:
        raise bad_request(str(error), error.param) from None


_TOKEN_SCHEMA: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": _TOKEN_SCHEMA, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": _TOKEN_SCHEMA, "minItems": 1}, "minItems": 1},
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
    "description": "Extension: the constraint on the text, in vLLM's form. Give one of the first five.",
}
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
Stops = Annotated[
    list[str] | None,
    PlainValidator(_stops, StopText | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS)] | None),
]
OnlyFalse = Annotated[bool | None, PlainValidator(_only_false), WithJsonSchema({"enum": [False, None]})]
TemplateVariables = Annotated[
    dict[str, Any] | None,
    PlainValidator(_template_variables),
    WithJsonSchema({"type": ["object", "null"], "description": "Extension: variables for the chat template."}),
]
Structured = Annotated[StructuredOutputsParams | None, PlainValidator(_structure), WithJsonSchema(_STRUCTURE_SCHEMA)]
Biases = Annotated[dict[int, float] | None, PlainValidator(_biases), WithJsonSchema(_BIAS_SCHEMA)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=MAX_METADATA_NAME)], Annotated[str, Field(max_length=MAX_METADATA_TEXT)]],
    BeforeValidator(_few_pairs),
    Field(max_length=MAX_METADATA),
]
User = Annotated[str, Field(max_length=MAX_USER)]
