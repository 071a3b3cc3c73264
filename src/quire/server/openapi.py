"""The OpenAPI document: requests from the schema classes, and the parts of answers that clients may rely on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from quire.server.errors import TYPES
from quire.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/"
_REQUESTS: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest)

BODY_ERRORS = (400, 408, 413, 503)
"""Statuses with which every endpoint may reject a body."""

_STRING = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "number", "minimum": 0}
_RATE = {"type": "number", "minimum": 0, "maximum": 1}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _answer(choice: dict[str, Any]) -> dict[str, Any]:
    return _object(
        id=_STRING,
        object=_STRING,
        created=_COUNT,
        model=_STRING,
        choices={"type": "array", "items": choice},
        usage=_object(
            prompt_tokens=_COUNT,
            completion_tokens=_COUNT,
            total_tokens=_COUNT,
            prompt_tokens_details=_object(cached_tokens=_COUNT),
        ),
    )


_FINISH = {"type": "string", "enum": ["stop", "length"]}
_MODEL = _object(
    id=_STRING,
    object=_STRING,
    created=_COUNT,
    owned_by=_STRING,
    max_model_len=_COUNT,
    sampling_defaults={
        "type": "object",
        "additionalProperties": {"type": "number"},
        "description": "Defaults that the model's authors recommend, for parameters that a request omits; parameters"
        " not listed have the API's default.",
    },
)
_ANSWERS: dict[str, dict[str, Any]] = {
    "Error": _object(
        error=_object(message=_STRING, type=_STRING, param=_nullable(_STRING), code=_nullable(_STRING)),
    ),
    "Completion": _answer(
        _object(index=_COUNT, text=_STRING, logprobs=_nullable({"type": "object"}), finish_reason=_FINISH)
    ),
    "ChatCompletion": _answer(
        _object(
            index=_COUNT,
            message=_object(role=_STRING, content=_STRING),
            logprobs=_nullable({"type": "object"}),
            finish_reason=_FINISH,
        )
    ),
    "Model": _MODEL,
    "Models": _object(object=_STRING, data={"type": "array", "items": {"$ref": _REF + "Model"}}),
    "Tokens": _object(tokens={"type": "array", "items": _COUNT}, count=_COUNT, max_model_len=_COUNT),
    "Text": _object(prompt=_STRING),
    "Status": _object(status=_STRING),
    "Version": _object(version=_STRING),
    "Prefix": _object(
        id=_STRING,
        space=_STRING,
        parent=_nullable(_STRING),
        start=_COUNT,
        tokens=_COUNT,
        text=_nullable(_STRING),
        sharers=_COUNT,
        hits=_COUNT,
        computed=_COUNT,
        hit_rate=_RATE,
        bytes=_COUNT,
        idle_seconds=_NUMBER,
        pinned_seconds={"anyOf": [_NUMBER, {"type": "string", "enum": ["forever"]}, {"type": "null"}]},
    ),
    "Cache": _object(
        prefixes={"type": "array", "items": {"$ref": _REF + "Prefix"}},
        num_prefixes=_COUNT,
        truncated={"type": "boolean"},
        scope={"type": "string", "enum": ["all", "tenant"]},
        totals=_object(
            bytes_total=_COUNT,
            bytes_used=_COUNT,
            bytes_cached=_COUNT,
            bytes_free=_COUNT,
            bytes_pinned=_COUNT,
            bytes_saved=_COUNT,
            bytes_evicted=_COUNT,
            bytes_retention_freed=_COUNT,
            cached_tokens=_COUNT,
            computed_tokens=_COUNT,
            hit_rate=_RATE,
        ),
    ),
}


def components() -> dict[str, Any]:
    """The named schemas of the document."""
    _, requests = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=_REF + "{model}")
    definitions: dict[str, Any] = requests["$defs"]
    return definitions | _ANSWERS


def operation(
    answer: str,
    *errors: int,
    body: str | None = None,
    query: Mapping[str, dict[str, Any]] | None = None,
    stream: bool = False,
    text: bool = False,
) -> dict[str, Any]:
    """FastAPI's keyword arguments that document a route: its body, answer and errors.

    query  schemas of the query parameters, all optional
    """
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": _REF + answer}}}
    if text:
        content = {"text/plain": {"schema": _STRING}}
    if stream:
        content["text/event-stream"] = {"schema": _STRING}
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": content}}
    for status in sorted({*errors, *(BODY_ERRORS if body is not None else ())}):
        error = {"application/json": {"schema": {"$ref": _REF + "Error"}}}
        responses[status] = {"description": TYPES[status], "content": error}
    extra: dict[str, Any] = {}
    if body is not None:
        schema = {"schema": {"$ref": _REF + body}}
        extra["requestBody"] = {"required": True, "content": {"application/json": schema}}
    if query is not None:
        extra["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
    return {"responses": responses, "openapi_extra": extra}
