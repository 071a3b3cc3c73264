"""Resolves JSON pointers in the references of a schema."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def resolve_pointer(reference: Any, base: Any) -> Any:
    """The target of a JSON pointer (RFC 6901, section 6) that starts at `base`; None if the reference is no JSON
    pointer or has no target.
    """
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = base
    for word in reference[2:].split("/"):
        name = unquote(word).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and len(name) < 9 and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def groups_in_place(schema: Mapping[str, Any]) -> list[list[Any]]:
    """Subschemas that apply to the same value. All groups must hold; of a group, one schema or several."""
    found = [[each] for each in schema["allOf"]] if isinstance(schema.get("allOf"), list) else []
    found += [schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list) and schema[word]]
    found += [[schema[word]] for word in ("if", "then", "else", "not") if word in schema]
    for word in ("dependentSchemas", "dependencies"):
        if isinstance(named := schema.get(word), Mapping):
            found += [[each] for each in named.values()]
    return found


class SchemaRoot:
    """A whole schema, which is the base of its references."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema

    def resolve(self, reference: Any) -> Any:
        """The target of a reference in the schema. None if it is unknown: a schema with an `$id` below the root is the
        base of other references.
        """
        return None if self.has_resources else resolve_pointer(reference, self.schema)

    @functools.cached_property
    def has_resources(self) -> bool:
        """Whether a subschema may have an `$id`, and thus be the base of pointers."""
        todo: list[Any] = list(self.schema.values())
        while todo:
            each = todo.pop()
            if isinstance(each, dict):
                if is_resource(each, self.schema):
                    return True
                todo += each.values()
            elif isinstance(each, list):
                todo += each
        return False


def is_resource(schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a schema is the base of the pointers in it, instead of the root. Up to draft 7 an `$id` that begins with
    # is an anchor.
    """
    own = schema.get("id" if re.match(r"https?://json-schema\.org/draft-0[34]/", str(root.get("$schema"))) else "$id")
    return isinstance(own, str) and not own.startswith("#")
