"""Finds what a JSON pointer in a schema's reference points to."""

from __future__ import annotations

import functools
import re
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


def resolve_reference(reference: Any, root: dict[str, Any]) -> Any:
    """What a reference in a schema points to. None if that is not known: a schema with an `$id` below the root has
    references that start elsewhere.
    """
    return None if has_resources(root) else resolve_pointer(reference, root)


def has_resources(root: dict[str, Any]) -> bool:
    """Whether a schema may have another one inside that has an `$id`, and so pointers that start there. The answer is
    kept for the last few schemas.
    """
    return _has_resources(_Same(root))


def is_resource(schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether pointers in a schema start at it, and not at the root. Up to draft 7 an `$id` that begins with # is an
    anchor.
    """
    own = schema.get("id" if re.match(r"https?://json-schema\.org/draft-0[34]/", str(root.get("$schema"))) else "$id")
    return isinstance(own, str) and not own.startswith("#")


class _Same:
    """A schema as a key: it equals itself only."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema

    def __hash__(self) -> int:
        return id(self.schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.schema is other.schema


@functools.lru_cache(8)
def _has_resources(root: _Same) -> bool:
    todo: list[Any] = list(root.schema.values())
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            if is_resource(each, root.schema):
                return True
            todo += [value for value in each.values() if isinstance(value, dict | list)]
        elif isinstance(each, list):
            todo += [value for value in each if isinstance(value, dict | list)]
    return False
