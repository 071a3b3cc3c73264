"""The OpenAPI document: requests from the schema classes, answers from their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from quire.server import response_shapes, shapes
from quire.server.chat_schema import ChatRequest, TokenizeRequest
from quire.server.cluster_schema import DrainRequest, PlaceRequest, RestartRequest, RoleRequest
from quire.server.embeddings_schema import EmbeddingsRequest, RerankRequest, ScoreRequest
from quire.server.errors import TYPES
from quire.server.prefix_schema import DropRequest, PrefixRequest
from quire.server.responses_schema import ResponsesRequest
from quire.server.schema import CompletionRequest, DetokenizeRequest

_REF = "#/components/schemas/"
_REQUESTS = (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DrainRequest,
    DropRequest,
    EmbeddingsRequest,
    PlaceRequest,
    PrefixRequest,
    RerankRequest,
    ResponsesRequest,
    RestartRequest,
    RoleRequest,
    ScoreRequest,
    TokenizeRequest,
)
ANSWERS = (
    shapes.CacheInfo,
    shapes.ChatCompletion,
    shapes.ChatCompletionChunk,
    shapes.ClusterInfo,
    shapes.Completion,
    shapes.CompletionChunk,
    shapes.DroppedPrefix,
    shapes.Embeddings,
    shapes.ErrorResponse,
    response_shapes.ResponseEvent,
    shapes.ListedPrefix,
    shapes.ListedPrefixes,
    shapes.ModelInfo,
    shapes.ModelList,
    shapes.RerankResponse,
    response_shapes.Response,
    shapes.ScoreResponse,
    shapes.Status,
    shapes.DetokenizeResponse,
    shapes.TokenizeResponse,
    shapes.UsageChunk,
    shapes.Version,
    shapes.WarmPrefix,
)

BODY_ERRORS = (400, 408, 413, 503)
"""Statuses with which every endpoint may reject a body."""


def components() -> dict[str, Any]:
    """The named schemas of the document."""
    named: list[tuple[type, Literal["validation", "serialization"], TypeAdapter[Any]]] = [
        *((shape, "validation", TypeAdapter(shape)) for shape in _REQUESTS),
        *((shape, "serialization", TypeAdapter(shape)) for shape in ANSWERS),
    ]
    _, schemas = TypeAdapter.json_schemas(named, ref_template=_REF + "{model}")
    definitions: dict[str, Any] = schemas["$defs"]
    return definitions


def _named(shape: type) -> dict[str, str]:
    return {"$ref": _REF + shape.__name__}


def operation(
    answer: type | None,
    *errors: int,
    body: type[BaseModel] | None = None,
    query: Mapping[str, dict[str, Any]] | None = None,
    chunk: type | None = None,
    has_done: bool = True,
) -> dict[str, Any]:
    """FastAPI's keyword arguments that document a route: its body, answer and errors.

    answer  None: plain text
    query   the schemas of the parameters after the question mark, none of which is required
    chunk   the data of an event where the answer may be streamed
    has_done  whether the last event is [DONE]
    """
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if answer is not None:
        content = {"application/json": {"schema": _named(answer)}}
    if chunk is not None:
        text = f"Server-sent events: the data of each is a {chunk.__name__}"
        if has_done:
            text += ", of the last one `[DONE]`; where usage was"
            text += f" asked for, a {shapes.UsageChunk.__name__} stands before it."
        content["text/event-stream"] = {"schema": {"type": "string", "description": text}}
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": content}}
    for status in sorted({*errors, *(BODY_ERRORS if body is not None else ())}):
        responses[status] = {
            "description": TYPES[status],
            "content": {"application/json": {"schema": _named(shapes.ErrorResponse)}},
        }
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _named(body)}}}
    if query is not None:
        extra["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
    return {"responses": responses, "openapi_extra": extra}
