"""Grammars for arguments that are not one JSON object: each argument has a rule, and strings may have no quotes.

A schema is honoured whole or refused: keywords about an object as a whole, such as `minProperties`, are refused, and so
are `format` and some `pattern`s of strings without quotes. Arguments that a schema allows but does not list are never
written, except by tools that list none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.structured.grammar_source import escaped
from quire.structured.schema_references import resolve_pointer
from quire.structured.schemas import UnsupportedSchemaError
from quire.tools.argument_types import types_of, types_of_value

Written = Callable[[Any], str]
"""Writes a schema as a term of a grammar."""

_NOTES = frozenset(
    """$comment $defs $id $schema default definitions deprecated description examples nullable readOnly title writeOnly
    x-guidance""".split()
)
"""Keywords that constrain nothing."""

_OF_OBJECTS = _NOTES | {"type", "properties", "required", "additionalProperties"}
_OF_LISTS = _NOTES | {"type", "items", "minItems", "maxItems"}
_OF_STRINGS = _NOTES | {"type", "minLength", "maxLength", "pattern"}
_OF_SCALARS = ("boolean", "integer", "null", "number")

_ANY = r"(.|\n)*"

_MOST_ITEMS = 64
"""Maximum of minItems and maxItems: a grammar writes each item."""

_SPECIAL = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|([()|^$])", re.DOTALL)
"""Signs of an expression outside of escapes and classes."""


class MemberGrammar:
    """Collects the rules for the arguments of one tool.

    rules  lines in Lark's syntax
    """

    def __init__(self, prefix: str, root: Mapping[str, Any]) -> None:
        """prefix: of the names of rules. root: the prepared schema of the arguments."""
        self.rules: list[str] = []
        self._prefix = prefix
        self._root = root
        self._names: dict[str, str] = {}  # of the rules of references
        self._begun: set[str] = set()

    def begin(self, rule: str) -> bool:
        """Whether a rule is not written yet. The caller then writes it with `end`."""
        is_new = rule not in self._begun
        self._begun.add(rule)
        return is_new

    def end(self, rule: str, term: str) -> None:
        """Writes a rule."""
        self.rules.append(f"{rule}: {term}")

    def json(self, schema: Any) -> str:
        """A value as JSON."""
        own = dict(schema) if isinstance(schema, Mapping) else {} if schema is True else {"not": {}}
        if '"$ref": ' in (text := json.dumps(own)):
            if re.search(r'"\$ref": "(?!#/(?:\$defs|definitions)/)', text):
                raise UnsupportedSchemaError("$ref: only definitions of the same schema can be used here")
            own = {**{word: self._root[word] for word in ("$defs", "definitions") if word in self._root}, **own}
        own["x-guidance"] = self._root["x-guidance"]
        return self._rule(f"%json {json.dumps(own)}")

    def text(self, schema: Any, ends: str, least: int = 0) -> str:
        """A string without quotes, up to a mark that the string cannot have. least: number of characters."""
        own = schema if isinstance(schema, Mapping) else {}
        if "enum" in own:
            if any(ends in each for each in own["enum"]):
                raise UnsupportedSchemaError(f"enum: the model cannot write a constant with {ends}")
            return "(" + " | ".join(map(json.dumps, own["enum"])) + ")"
        self._check(own, _OF_STRINGS)
        least, most = max(least, own.get("minLength", 0)), own.get("maxLength", "")
        if most == 0 and not least:
            return '""'
        if most != "" and most < least:
            raise UnsupportedSchemaError("maxLength: it is below minLength")
        parts = [rf"/(.|\n){{{max(least, 1)},{most}}}/", rf"~/(.|\n)*{escaped(ends)}(.|\n)*/"]
        if "pattern" in own:
            parts.append(f"/{_searched(own['pattern'])}/")
        name = self._new_name().upper()
        self.rules.append(f"{name}: {' & '.join(parts)}")
        return name if least or "pattern" in own else f"{name}?"

    def value(self, schema: Any, text: Written, other: Written) -> str:
        """A value, written by `text` if it is a string and by `other` if it is not."""
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise UnsupportedSchemaError("an argument cannot have the schema false")
        if "$ref" in schema:
            return self._reference(schema, text, other)
        if "enum" in schema or "const" in schema:
            return self._constants(schema, text, other)
        if "anyOf" in schema:
            self._check(schema, _NOTES | {"anyOf"})
            return "(" + " | ".join(self.value(each, text, other) for each in schema["anyOf"]) + ")"
        types = types_of(schema, self._root)
        if "string" not in types:
            return other(schema)
        if types == {"string"}:
            return text(schema)
        given = schema.get("type")
        if given is None:
            self._check(schema, _NOTES)
            return "(" + " | ".join([text({}), other({"type": ["object", "array", *_OF_SCALARS]})]) + ")"
        others = [each for each in given if each != "string"]
        strings = {word: own for word, own in schema.items() if word in _OF_STRINGS}
        rest = {word: own for word, own in schema.items() if word not in _OF_STRINGS - _NOTES}
        return "(" + " | ".join([text({**strings, "type": "string"}), other({**rest, "type": others})]) + ")"

    def members(
        self,
        schema: Mapping[str, Any],
        member: Callable[[str, Any], str],
        separator: str,
        *,
        is_sorted: bool = False,
    ) -> str | None:
        """The members of an object in the order of the schema, with a separator between two. None if the schema lists
        no member and allows any.
        """
        self._check(schema, _OF_OBJECTS)
        listed = dict(schema.get("properties") or {})
        required = list(schema.get("required") or [])
        listed |= {name: True for name in required if name not in listed}
        if not listed:
            return None if schema.get("additionalProperties") is not False else '""'
        names = sorted(listed, key=str.lower) if is_sorted else list(listed)
        names = [name for name in names if listed[name] is not False or name in required]
        terms = [(member(name, listed[name]), name in required) for name in names]
        if not separator:
            return " ".join(f"{term}" if is_required else f"({term})?" for term, is_required in terms)
        # Backwards: the members from here on, first if none stands before them, then if one does.
        first, later = '""', '""'
        for term, is_required in reversed(terms):
            here = self._rule(f"{term} {later}")
            behind = self._rule(f"{json.dumps(separator)} {here}" + ("" if is_required else f" | {later}"))
            first = here if is_required else self._rule(f"{here} | {first}")
            later = behind
        return first

    def nested(self, schema: Any, object_: Written, value: Written, any_value: Callable[[], str]) -> str:
        """A value that is no string, with objects and lists in the same notation."""
        own = schema if isinstance(schema, Mapping) else {}
        types = types_of(own, self._root) - {"string"}
        terms = [self.json(own)] if types and types <= set(_OF_SCALARS) else []
        if not terms and (scalars := sorted(types.intersection(_OF_SCALARS))):
            self._check(own, _OF_OBJECTS | _OF_LISTS)
            terms.append(self.json({"type": scalars}))
        if "object" in types:
            terms.append(object_({**own, "type": "object"} if "array" not in types else {"type": "object"}))
        if "array" in types:
            terms.append(self._list(own if "object" not in types else {}, value, any_value))
        if {"object", "array"} <= types:
            self._check(own, _NOTES | {"type"})
        return "(" + " | ".join(terms) + ")"

    def _list(self, schema: Mapping[str, Any], value: Written, any_value: Callable[[], str]) -> str:
        self._check(schema, _OF_LISTS)
        item = value(schema["items"]) if schema.get("items", True) is not True else any_value()
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if max(least, most or 0) > _MOST_ITEMS:
            raise UnsupportedSchemaError(f"minItems and maxItems: at most {_MOST_ITEMS} for lists that are not JSON")
        if most == 0:
            return '"[" "]"'
        further = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {further} "]"' if least else f'"[" ({item} {further})? "]"'

    def _reference(self, schema: Mapping[str, Any], text: Written, other: Written) -> str:
        self._check(schema, _NOTES | {"$ref"})
        reference = schema["$ref"]
        target = self._root if reference == "#" else resolve_pointer(reference, self._root)
        if not isinstance(target, Mapping | bool):
            raise UnsupportedSchemaError(f"$ref: {reference} has no target")
        if reference not in self._names:
            name = self._names[reference] = self._new_name()
            self.rules.append(f"{name}: {self.value(target, text, other)}")
        return self._names[reference]

    def _constants(self, schema: Mapping[str, Any], text: Written, other: Written) -> str:
        self._check(schema, _NOTES | {"type", "enum", "const"})
        values = [schema["const"]] if "const" in schema else schema["enum"]
        types = types_of({"type": schema["type"]} if "type" in schema else {}, self._root)
        values = [each for each in values if types.intersection(types_of_value(each))]
        strings = [each for each in values if isinstance(each, str)]
        others = [each for each in values if not isinstance(each, str)]
        terms = [*([text({"enum": strings})] if strings else []), *([other({"enum": others})] if others else [])]
        if not terms:
            raise UnsupportedSchemaError("enum: no value fits the type")
        return "(" + " | ".join(terms) + ")"

    def _check(self, schema: Mapping[str, Any], allowed: frozenset[str] | set[str]) -> None:
        for word in schema:
            if word not in allowed:
                raise UnsupportedSchemaError(f"{word}: not supported in this model's form of calls")

    def _rule(self, term: str) -> str:
        name = self._new_name()
        self.rules.append(f"{name}: {term}")
        return name

    def _new_name(self) -> str:
        self._begun.add(name := f"{self._prefix}_m{len(self._begun)}")
        return name


def _searched(pattern: str) -> str:
    """An expression for whole texts in which a pattern, in Rust's syntax, is found."""
    signs = [match for match in _SPECIAL.finditer(pattern) if match[1]]
    begins = pattern.startswith("^")
    ends = bool(signs) and signs[-1][1] == "$" and signs[-1].end() == len(pattern)
    inner = pattern[begins : len(pattern) - ends]
    depth = 0
    for match in signs:
        sign, is_outer = match[1], depth == 0
        depth += (sign == "(") - (sign == ")")
        is_end = (begins and match.start() == 0) or (ends and match.end() == len(pattern))
        if (sign in "^$" and not is_end) or (sign == "|" and is_outer and (begins or ends)):
            raise UnsupportedSchemaError(f"pattern: its anchors are not supported in this model's calls, in {pattern}")
    found = f"{'' if begins else _ANY}({inner}){'' if ends else _ANY}"
    return re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], found)
