"""The OpenAPI document: requests from the schema classes, answers from their shapes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from quire.server import shapes
from quire.server.errors import error_type

Endpoint = Callable[[Request], Awaitable[Response]]

_REF = "#/components/schemas/"

BODY_ERRORS = (400, 408, 413, 415, 503)
"""Statuses with which every endpoint may reject a body."""


class ApiDocument:
    """The document of an application: its routes, and the schemas of all bodies and answers in them."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._bodies: dict[type, None] = {}
        self._answers: dict[type, None] = {shapes.ErrorResponse: None, shapes.UsageChunk: None}

    def add(
        self, method: str, paths: str, name: str, about: str, answer: Endpoint, *described: Any, **more: Any
    ) -> None:
        """Adds a route.

        paths            separated by spaces; the document has only the first one
        name, about      in the document
        described, more  see `operation`
        """

        async def endpoint(request: Request) -> Response:
            return await answer(request)

        path, *others = paths.split()
        route = {"name": name, "description": about, **self.operation(*described, **more)}
        self._app.add_api_route(path, endpoint, methods=[method], **route)
        for other in others:
            self._app.add_api_route(other, endpoint, methods=[method], include_in_schema=False)

    def make(self, *, has_keys: bool) -> dict[str, Any]:
        """The document. has_keys: whether requests need a key."""
        found = get_openapi(title=self._app.title, version=self._app.version, routes=self._app.routes)
        named: list[tuple[type, Literal["validation", "serialization"], TypeAdapter[Any]]] = [
            *((shape, "validation", TypeAdapter(shape)) for shape in self._bodies),
            *((shape, "serialization", TypeAdapter(shape)) for shape in self._answers),
        ]
        _, schemas = TypeAdapter.json_schemas(named, ref_template=_REF + "{model}")
        found["components"] = {"schemas": schemas["$defs"]}
        if has_keys:
            found["components"]["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            }
            found["security"] = [{"key": []}, {"header": []}]
        for described in (each for methods in found["paths"].values() for each in methods.values()):
            described["responses"].pop("422", None)  # FastAPI's own; ours are 400
        return found

    def operation(
        self,
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
            self._answers[answer] = None
            content = {"application/json": {"schema": _named(answer)}}
        if chunk is not None:
            self._answers[chunk] = None
            text = f"Server-sent events: the data of each is a {chunk.__name__}"
            if has_done:
                text += ", of the last one `[DONE]`; where usage was"
                text += f" asked for, a {shapes.UsageChunk.__name__} stands before it."
            content["text/event-stream"] = {"schema": {"type": "string", "description": text}}
        responses: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": content}}
        for status in sorted({*errors, *(BODY_ERRORS if body is not None else ())}):
            responses[status] = {
                "description": error_type(status),
                "content": {"application/json": {"schema": _named(shapes.ErrorResponse)}},
            }
        extra: dict[str, Any] = {}
        if body is not None:
            self._bodies[body] = None
            extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _named(body)}}}
        if query is not None:
            extra["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
        return {"responses": responses, "openapi_extra": extra}


def _named(shape: type) -> dict[str, str]:
    return {"$ref": _REF + shape.__name__}
