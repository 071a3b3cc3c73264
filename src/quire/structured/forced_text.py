"""Bounds the text that a grammar can force in one piece.

llguidance computes forced text in one call that holds Python's lock, without a limit: `((a{1000}){1000}){1000}` forces
62,004 tokens in 4 s. The bounds here are upper bounds, linear in the size of the source. If a bound exceeds
MAX_FORCED_BYTES or is unknown, the grammar forces nothing: it allows the same texts, token by token. The bound is
unknown for recursive schemas, and for schemas in which several subschemas constrain the members of one value: a count
in one of them multiplies the items of another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from math import inf
from typing import Any

from quire.structured.schema_references import SchemaRoot, groups_in_place

MAX_FORCED_BYTES = 16 << 10
"""Maximum forced bytes. Literal text takes 5 us a byte, an expression up to 66: at most 0.1 s."""

EXPRESSION_COST = 8
"""Weight of a byte of an expression against literal text."""

SCALAR_BYTES = 24
"""Bytes of a number, or of the syntax around a value."""


def regex_bytes(pattern: str) -> float:
    """Upper bound of the bytes that an expression can force: its length, with repeated parts counted as often as their
    minimum. Infinite for an expression with flags, which are not parsed here.
    """
    if _FLAGS.search(pattern):
        return inf
    sizes, last = [0.0], 0.0  # sizes of the open groups, and of the last item
    place = 0
    while place < len(pattern):
        char = pattern[place]
        place += 1
        if char == "(":
            sizes.append(0.0)
        elif char == ")":
            if len(sizes) == 1:
                return inf
            last = sizes.pop()
            sizes[-1] += last
        elif char in "*+?":
            pass  # `last` stays: a count may follow
        elif (count := _COUNT.match(pattern, place - 1)) is not None:
            least = int(count[1][:12] or 0)
            sizes[-1] += last * max(0, least - 1)
            last *= max(1, least)
            place = count.end()
        else:
            if char == "[":
                place = _class_end(pattern, place - 1)
            elif char == "\\":
                braced = _BRACED.match(pattern, place - 1)
                place = braced.end() if braced is not None else place + 1
            last = 4.0
            sizes[-1] += last
    return sizes[0] * EXPRESSION_COST if len(sizes) == 1 else inf


_FLAGS = re.compile(r"\(\?(?![:P<])")

_BRACED = re.compile(r"\\[pPxuU]\{[^{}]*\}")
"""An escape that names a character by its property or number."""

_COUNT = re.compile(r"\{\s*(\d*)\s*(?:,\s*\d*\s*)?\}")


def _class_end(pattern: str, place: int) -> int:
    """The position after a class: classes nest, and a bracket that comes first is a character."""
    depth = 0
    while place < len(pattern):
        char = pattern[place]
        place += 2 if char == "\\" else 1
        if char == "[":
            depth += 1
            place += pattern.startswith("^", place)
            place += pattern.startswith("]", place)
        elif char == "]":
            depth -= 1
            if not depth:
                break
    return place


def schema_bytes(schema: Any) -> float:
    """Upper bound of the bytes that a JSON Schema can force; see the module."""
    try:
        text = json.dumps(schema)
        has_other_roots = text.count('"$id": ') > (isinstance(schema, Mapping) and "$id" in schema)
        return inf if has_other_roots else _Schema(schema).size(schema)
    except RecursionError:
        return inf


_MEMBERS = frozenset(
    """items prefixItems additionalItems unevaluatedItems contains minItems minContains properties
    additionalProperties patternProperties unevaluatedProperties propertyNames required minProperties
    dependentRequired dependencies""".split()
)
"""Keywords that constrain the members of a value."""

_UNKNOWN = object()
"""The target of a reference that cannot be resolved."""


class _Schema:
    """The bounds of a schema's subschemas, each computed once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._references = SchemaRoot(root)
        self._known: dict[int, float] = {}
        self._about_members: dict[int, bool] = {}

    def size(self, own: Any) -> float:
        """Upper bound of the bytes that a subschema can force."""
        if own is _UNKNOWN:
            return inf
        if not isinstance(own, Mapping):
            return SCALAR_BYTES
        known = self._known.get(id(own))
        if known is None:
            self._known[id(own)] = inf  # a recursive reference finds this
            known = self._known[id(own)] = self._computed(own)
        return known

    def _computed(self, own: Mapping[str, Any]) -> float:
        groups = self._groups(own)
        if (not _MEMBERS.isdisjoint(own)) + sum(any(map(self._is_about_members, each)) for each in groups) > 1:
            return inf
        found = sum(max(map(self.size, each)) for each in groups) + _scalar(own)
        for word in ("prefixItems", "items", "contains", "propertyNames"):
            several = own.get(word, [])
            found += sum(map(self.size, several if isinstance(several, list) else [several]))
        others = [own[word] for word in ("items", "additionalItems", "unevaluatedItems") if word in own]
        least = max(1, _count(own, "minItems"), _count(own, "minContains"))
        return found + least * sum(self.size(each) for each in others) + self._object(own)

    def _object(self, own: Mapping[str, Any]) -> float:
        properties, patterns = own.get("properties"), own.get("patternProperties")
        listed = properties if isinstance(properties, Mapping) else {}
        if listed and isinstance(patterns, Mapping) and patterns:
            return inf  # a property may match both
        found = sum(_json_bytes(name) + self.size(each) for name, each in listed.items())
        if own.get("dependencies") or own.get("dependentRequired"):
            return inf
        required = own.get("required")
        further = [name for name in required if name not in listed] if isinstance(required, list) else []
        found += sum(map(_json_bytes, further))
        more = [own[word] for word in ("additionalProperties", "unevaluatedProperties") if word in own]
        others = sum(self.size(each) for each in more)
        if isinstance(patterns, Mapping):
            others += sum(regex_bytes(name) + self.size(each) for name, each in patterns.items())
        return found + max(1, len(further), _count(own, "minProperties")) * others

    def _groups(self, own: Mapping[str, Any]) -> list[list[Any]]:
        """As `groups_in_place`, with the targets of references."""
        found = groups_in_place(own)
        for word in ("$ref", "$dynamicRef"):
            if isinstance(reference := own.get(word), str):
                target = self._root if reference == "#" else self._references.resolve(reference)
                found.append([target if isinstance(target, Mapping | bool) else _UNKNOWN])
        return found

    def _is_about_members(self, own: Any) -> bool:
        """Whether a schema, or a subschema of it for the same value, has keywords about members."""
        if not isinstance(own, Mapping):
            return own is _UNKNOWN
        if id(own) not in self._about_members:
            self._about_members[id(own)] = True  # for recursive references
            within = any(self._is_about_members(each) for group in self._groups(own) for each in group)
            self._about_members[id(own)] = within or not _MEMBERS.isdisjoint(own)
        return self._about_members[id(own)]


def _scalar(own: Mapping[str, Any]) -> float:
    """Bytes that a schema forces for a value without members, and for constants."""
    found = SCALAR_BYTES + _count(own, "minLength")
    limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    found += max((_json_bytes(own[word]) for word in limits if word in own), default=0.0)
    if "const" in own:
        found += _json_bytes(own["const"])
    if isinstance(own.get("enum"), list):
        found += max(map(_json_bytes, own["enum"]), default=0.0)
    if isinstance(own.get("pattern"), str):
        found += regex_bytes(own["pattern"])
    return found


def _count(own: Mapping[str, Any], word: str) -> float:
    value = own.get(word, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _json_bytes(value: Any) -> float:
    """Upper bound of the bytes of a value's JSON, with numbers written in full."""
    match value:
        case float():
            return float(len(format(Decimal(repr(value)), "f")))
        case Mapping():
            return sum(_json_bytes(name) + _json_bytes(each) + 4 for name, each in value.items()) + 2
        case list():
            return sum(_json_bytes(each) + 2 for each in value) + 2
    return float(len(json.dumps(value)))
