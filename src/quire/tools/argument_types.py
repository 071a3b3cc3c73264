"""The JSON types of a tool's arguments, for formats that write strings without quotes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.structured.schema_references import resolve_pointer

EVERY_TYPE = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))

_MOST_DEPTH = 8


def types_of(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """The types that a schema may allow: a superset where the schema has keywords that are not read here.

    root  the schema that is the base of references
    """
    if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
        return EVERY_TYPE
    found = EVERY_TYPE
    given = schema.get("type")
    if isinstance(given, str | list):
        named = {given} if isinstance(given, str) else {each for each in given if isinstance(each, str)}
        found &= named | ({"integer"} if "number" in named else set())
    values = schema["enum"] if isinstance(schema.get("enum"), list) else None
    values = [schema["const"]] if "const" in schema else values
    if values is not None:
        found &= frozenset(name for each in values for name in types_of_value(each))
    if "$ref" in schema:
        found &= types_of(resolve_pointer(schema["$ref"], root), root, depth + 1)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            found &= frozenset().union(*(types_of(each, root, depth + 1) for each in schema[word]))
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= types_of(each, root, depth + 1)
    return found


def types_of_value(value: Any) -> tuple[str, ...]:
    """The types of a JSON value: an integer is a number, too."""
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("number", "integer") if value.is_integer() else ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
    return ("object",)


def property_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The types of an argument with this name."""
    properties = schema.get("properties")
    return types_of(properties.get(name) if isinstance(properties, Mapping) else None, schema)


def json_of_bare(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that was written without quotes if it is a string: the text itself if it is the JSON of
    another type that is allowed, else the text as a string.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = text
    is_string = isinstance(value, str) and "string" in types
    if value is text or is_string or not types.intersection(types_of_value(value)):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
