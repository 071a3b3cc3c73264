"""JSON Schemas as llguidance takes them: how JSON is written, and which annotations mean nothing here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

JSON_STYLE: Any = {
    "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "coerce_one_of": False,
    "lenient": False,
}  # fmt: skip
"""How JSON is written, and that schemas are honoured whole or refused."""

KNOWN_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""Formats that texts are held to. llguidance refuses any other."""

DISPUTED = "$id-beside-$ref"

_SCHEMA = (
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_SCHEMAS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED_SCHEMAS = ("$defs", "definitions", "dependentSchemas", "dependencies", "patternProperties", "properties")
"""Keywords with a schema, with a list of schemas, and with schemas by name."""


def written(schema: Mapping[str, Any] | bool) -> Mapping[str, Any] | bool:
    """A schema whose JSON is written on one line, with a space after each comma and colon. Formats that are not known
    are left out: by JSON Schema 2020-12 (Validation, section 7.2.1) they are annotations. A subschema that has both $id
    and $ref becomes one that llguidance refuses, with their names in its error: in draft 7 the $id means nothing there,
    and later it changes what the $ref points to.
    """
    if schema is False:
        return False
    found = {} if schema is True else dict(schema)
    open_schemas = [found]
    while open_schemas:
        own = open_schemas.pop()
        if isinstance(own.get("format"), str) and own["format"] not in KNOWN_FORMATS:
            del own["format"]
        if own is not found and "$id" in own and "$ref" in own:
            own.clear()
            own["$ref"] = f"#/{DISPUTED}"
        for holder, place in _places(own):
            holder[place] = dict(holder[place])
            open_schemas.append(holder[place])
    return {**found, "x-guidance": JSON_STYLE}


def _places(schema: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields where the subschemas of a schema stand that are objects: (list or object, index or name). Puts a copy of
    each such list or object into the schema first, so that writing to it does not change the original.
    """
    for word in _SCHEMA:
        if isinstance(schema.get(word), Mapping):
            yield schema, word
    for word in _SCHEMAS:
        if isinstance(schema.get(word), list):
            schema[word] = several = list(schema[word])
            yield from ((several, place) for place, each in enumerate(several) if isinstance(each, Mapping))
    for word in _NAMED_SCHEMAS:
        if isinstance(schema.get(word), Mapping):
            schema[word] = named = dict(schema[word])
            yield from ((named, name) for name, each in named.items() if isinstance(each, Mapping))
