"""Finds what a JSON pointer in a schema's reference points to."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def resolve_pointer(reference: Any, base: Any) -> Any:
    """What a JSON pointer points to (RFC 6901, section 6) that starts at `base`; None if the reference is of another
    kind, or points nowhere.
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
    """Schemas in a schema that are about the same value: all groups hold, and of each group one schema or several."""
    found = [[each] for each in schema["allOf"]] if isinstance(schema.get("allOf"), list) else []
    found += [schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list) and schema[word]]
    found += [[schema[word]] for word in ("if", "then", "else", "not") if word in schema]
    for word in ("dependentSchemas", "dependencies"):
        if isinstance(named := schema.get(word), Mapping):
            found += [[each] for each in named.values()]
    return found


class SchemaRoot:
    """A whole schema, at which the references in it start."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema

    def resolve(self, reference: Any) -> Any:
        """What a reference in the schema points to. None if that is not known: a schema with an `$id` below the root
        has references that start elsewhere.
        """
        return None if self.has_resources else resolve_pointer(reference, self.schema)

    @functools.cached_property
    def has_resources(self) -> bool:
        """Whether there may be another schema inside that has an `$id`, and so pointers that start there."""
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
    """Whether pointers in a schema start at it, and not at the root. Up to draft 7 an `$id` that begins with # is an
    anchor.
    """
    own = schema.get("id" if re.match(r"https?://json-schema\.org/draft-0[34]/", str(root.get("$schema"))) else "$id")
    return isinstance(own, str) and not own.startswith("#")
