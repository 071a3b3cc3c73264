"""Prepares JSON Schemas for llguidance: sets the style of JSON, drops annotations, refuses unenforceable keywords."""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.structured.ecma_regex import HOSTNAME, RegexTranslationError, RustRegex, to_rust
from quire.structured.negation import measure_json
from quire.structured.schema_drafts import drop_unknown_keywords
from quire.structured.schema_references import SchemaRoot, is_resource, resolve_pointer
from quire.structured.schema_rewriter import SchemaRewriter, SchemaTooLongError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

JSON_STYLE: dict[str, Any] = {
    "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "coerce_one_of": False,
    "lenient": False, "json_allowed_escapes": 'bfnrt\\"',
}  # fmt: skip
"""The style of JSON, and that schemas are honoured whole or refused. Unicode escapes are off: with `\\u0061` a model
could write a listed name twice."""

_NEEDS_UNICODE_ESCAPES = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Control characters without a short escape."""

_MAY_NEED_UNICODE_ESCAPES = re.compile(r"\\u00(?:[01]|7f)")
"""Matches the JSON of schemas with such characters, and of some others."""

KNOWN_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""Formats that are enforced. llguidance refuses any other."""

_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")

_EXACT = 1 << 53
"""Largest integer of a schema that llguidance does not round."""

_MAX_DIGITS = 15
"""llguidance 1.9.1 rounds bounds with more significant digits, and allows numbers beyond them."""

_SCHEMA = (
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_SCHEMAS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED_SCHEMAS = ("$defs", "definitions", "dependentSchemas", "dependencies", "patternProperties", "properties")
"""Keywords with a schema, with a list of schemas, and with schemas by name."""


_CHECKED = frozenset(
    (*_LIMITS, *_COUNTS, "$id", "$ref", "const", "dependencies", "dependentRequired", "dependentSchemas", "enum",
     "format", "oneOf", "pattern", "patternProperties", "properties", "required")
)  # fmt: skip
"""Keywords that are checked or changed before the rewriting."""

_NAMES_AND_DEFINITIONS = frozenset({"$anchor", "$defs", "$dynamicAnchor", "$id", "definitions"})


class UnsupportedSchemaError(ValueError):
    """A schema has a keyword that llguidance does not enforce. The message begins with the keyword."""


def prepare_schema(schema: Mapping[str, Any] | bool) -> Mapping[str, Any] | bool:
    """Prepares a schema whose JSON is written on one line, with a space after each comma and colon. Unknown formats are
    dropped: in JSON Schema 2020-12 (Validation, section 7.2.1) they are annotations. A `oneOf` whose alternatives
    differ by a `discriminator` (OpenAPI 3.1; pydantic writes it) becomes an `anyOf`. Raises UnsupportedSchemaError.
    """
    if schema is False:
        return False
    text = "{}" if schema is True else json.dumps(schema)
    found: dict[str, Any] = json.loads(text)
    root = SchemaRoot(found)
    may_have_controls, has_controls = _MAY_NEED_UNICODE_ESCAPES.search(text) is not None, False
    every = list[tuple[SchemaPath | None, dict[str, Any]]]()
    for path, own in _subschemas(found):  # which descends into each schema after this iteration
        drop_unknown_keywords(own, found.get("$schema"))
        every.append((path, own))
    for path, own in every:
        if _CHECKED.isdisjoint(own):
            continue
        if isinstance(own.get("format"), str) and own["format"] not in KNOWN_FORMATS:
            del own["format"]
        reference = own.get("$ref")
        if own is not found and "$id" in own and "$ref" in own:
            # In draft 7 the $id has no meaning there. Later it changes the target of the $ref.
            raise UnsupportedSchemaError("$id beside $ref: drafts disagree about what it means" + _at(path))
        if isinstance(reference, str) and "#/" in reference[1:] and root.has_resources:
            raise UnsupportedSchemaError(
                "$ref: a pointer into another schema that has an $id; use an $anchor there" + _at(path)
            )
        if (reason := _rounded(own) or _repeated(own)) is not None:
            raise UnsupportedSchemaError(reason + _at(path))
        own.update(
            {word: int(own[word]) for word in _COUNTS if isinstance(own.get(word), float) and own[word] % 1 == 0}
        )
        has_controls |= _translate(own, path) or (may_have_controls and _has_controls(own))
    unions = _DiscriminatedUnions(root, 2 * len(text))
    for _, own in every:
        if isinstance(own.get("oneOf"), list) and isinstance(own.get("discriminator"), dict):
            unions.apply(own)
    inner_first = [*(own for _, own in reversed(every)), *unions.copies]
    try:
        SchemaRewriter(root, unions.narrowed).apply(inner_first)
    except SchemaTooLongError as error:
        raise UnsupportedSchemaError(str(error)) from None
    style = dict(JSON_STYLE)
    if has_controls:
        if (named := _place(found, _names_in_the_open)) is not None or _names_in_the_open(found):
            reason = "a control character in the schema needs the escape \\u, with which a name could come twice"
            raise UnsupportedSchemaError(f"properties: {reason}; use additionalProperties: false{_at(named)}")
        del style["json_allowed_escapes"]
    return {**found, "x-guidance": style}


class _DiscriminatedUnions:
    """Turns each `oneOf` whose alternatives differ by a discriminator into an `anyOf`.

    root      the whole schema
    left      words and characters that may still be read: limits the time for definitions that are used many times
    copies    copies of alternatives with further requirements; a definition itself may have other uses
    narrowed  ids of schemas with such alternatives
    """

    def __init__(self, root: SchemaRoot, left: int) -> None:
        self._root = root
        self._left = left
        self._references: dict[tuple[int, str], dict[str, str]] = {}  # to copies of definitions
        self.copies: list[dict[str, Any]] = []
        self.narrowed = set[int]()

    def apply(self, schema: dict[str, Any]) -> None:
        """Changes a schema if its alternatives are objects, each with its own values of the discriminator's property.
        It makes the property required, even if it has a default, so that no text fits two alternatives.
        """
        name, alternatives = schema["discriminator"].get("propertyName"), schema["oneOf"]
        self._left -= len(alternatives)
        if self._left < 0 or not isinstance(name, str) or "anyOf" in schema:
            return
        objects = [self._definition(each) for each in alternatives]
        if not self._have_distinct_values(name, objects) or not isinstance(self._root.schema.get("$defs", {}), dict):
            return
        chosen = [self._requiring(name, *pair) for pair in zip(alternatives, objects, strict=True)]
        if self._left < 0:
            return
        if any(each is not given for each, given in zip(chosen, alternatives, strict=True)):
            self.narrowed.add(id(schema))
        del schema["oneOf"]
        schema["anyOf"] = chosen
        del schema["discriminator"]  # llguidance refuses it beside recursive references

    def _definition(self, schema: Any) -> Any:
        """The target of a schema that is only a reference; any other schema unchanged."""
        is_reference = isinstance(schema, dict) and "$ref" in schema and len(schema) == 1
        return self._root.resolve(schema["$ref"]) if is_reference else schema

    def _have_distinct_values(self, name: str, objects: list[Any]) -> bool:
        values = set[str]()
        for each in objects:
            if self._left < 0 or not isinstance(each, dict) or each.get("type") != "object":
                return False
            properties, required = each.get("properties"), each.get("required", [])
            own = properties.get(name) if isinstance(properties, dict) else None
            if not isinstance(own, dict) or not isinstance(required, list):
                return False
            for value in own["enum"] if isinstance(own.get("enum"), list) else [own.get("const")]:
                self._left -= 1
                if not isinstance(value, str) or value in values:
                    return False
                values.add(value)
            self._left -= len(required)
        return True

    def _requiring(self, name: str, given: Any, definition: dict[str, Any]) -> Any:
        """An alternative that requires a property: the given one if it does, else a copy or a reference to a copy.
        llguidance allows no other keyword beside a reference to a recursive definition.
        """
        required = definition.get("required", [])
        if name in required:
            return given
        if (known := self._references.get((id(definition), name))) is not None:
            return known
        self._left -= measure_json(definition, max(self._left, 0)).size
        if self._left < 0:
            return given
        copy = {word: value for word, value in definition.items() if word not in _NAMES_AND_DEFINITIONS}
        copy["required"] = [*required, name]
        self.copies.append(copy)
        if given is definition:
            return copy
        definitions = self._root.schema.setdefault("$defs", {})
        number = len(definitions)
        while f"narrowed-{number}" in definitions:
            number += 1
        definitions[f"narrowed-{number}"] = copy
        reference = {"$ref": f"#/$defs/narrowed-{number}"}
        self._references[id(definition), name] = reference
        return reference


def _has_controls(schema: Mapping[str, Any]) -> bool:
    """Whether a fitting text can need the escape \\u for a value or a name that the schema lists."""
    todo: list[Any] = [schema.get(word) for word in ("const", "enum", "required")]
    for word in ("properties", "dependentRequired", "dependentSchemas", "dependencies"):
        if isinstance(named := schema.get(word), dict):
            todo += named
            todo += [each for each in named.values() if isinstance(each, list)]
    while todo:
        match todo.pop():
            case str() as text if _NEEDS_UNICODE_ESCAPES.search(text):
                return True
            case list() as values:
                todo += values
            case dict() as values:
                todo += values
                todo += values.values()
    return False


def _names_in_the_open(schema: Mapping[str, Any]) -> bool:
    """Whether objects may have properties besides those that a schema names."""
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        return False
    patterns = schema.get("patternProperties")
    if schema.get("properties") or schema.get("required"):
        return schema.get("additionalProperties") is not False or bool(patterns)
    return bool(patterns) and schema.get("additionalProperties") is not False


def _translate(schema: dict[str, Any], path: SchemaPath | None) -> bool:
    """Translates the expressions of a schema. Returns whether one has control characters; see RustRegex. Raises
    UnsupportedSchemaError.
    """
    has_controls = False
    given, plain, length = HOSTNAME
    if schema.get("pattern") == given and schema.get("format") == "hostname":
        most = schema.get("maxLength", length)
        schema |= {"pattern": plain, "maxLength": min(most, length) if _is_count(most) else most}
    if isinstance(schema.get("pattern"), str):
        found = _translated("pattern", schema["pattern"], path)
        schema["pattern"], has_controls = found.rust, found.has_controls
    if isinstance(named := schema.get("patternProperties"), dict):
        properties: dict[str, Any] = {}
        for pattern, each in named.items():
            found = _translated("patternProperties", pattern, path)
            has_controls |= found.has_controls
            # Different expressions may have the same translation.
            before = properties.get(found.rust)
            properties[found.rust] = each if before is None else {"allOf": [before, each]}
        schema["patternProperties"] = properties
    return has_controls


def _translated(word: str, pattern: str, path: SchemaPath | None) -> RustRegex:
    try:
        return to_rust(pattern)
    except RegexTranslationError as error:
        shown = pattern if len(pattern) <= 200 else pattern[:200] + "..."
        raise UnsupportedSchemaError(f"{word}: {error}, in {shown}{_at(path)}") from None


def _rounded(schema: Mapping[str, Any]) -> str | None:
    """Why the numbers of a schema cannot be honoured; None if they can."""
    values = [(word, schema[word]) for word in (*_LIMITS, "const", "enum") if word in schema]
    while values:
        word, value = values.pop()
        # A bound of 1e20 is an integer, too; a constant is written unchanged.
        is_integer = isinstance(value, int) or (word in _LIMITS and isinstance(value, float) and value % 1 == 0)
        if is_integer and abs(value) > _EXACT:
            return f"{word}: integers beyond 2^53 are rounded"
        is_fraction = isinstance(value, float) and value % 1 and word in _LIMITS
        if is_fraction and len(Decimal(repr(value)).as_tuple().digits) > _MAX_DIGITS:
            return f"{word}: {value!r} is rounded; write at most {_MAX_DIGITS} digits"
        if word in ("const", "enum") and isinstance(value, list | Mapping):
            values += ((word, each) for each in (value.values() if isinstance(value, Mapping) else value))
    return None


def _is_count(value: Any) -> TypeIs[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _repeated(schema: Mapping[str, Any]) -> str | None:
    """Why the number of properties cannot be enforced; None if it can. A text may repeat a name that is not listed."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    if _is_count(least) and least > max(1, num_required) and is_open:
        return "minProperties: names that are not listed may come twice, so only required ones are counted"
    return None


def schema_error_text(schema: Any, error: str) -> str:
    """The text for a user about an error of llguidance, with the keyword and its place if these are known."""
    error = error.strip()
    if error.startswith("Unimplemented keys") and (words := re.findall(r'"([^"]*)"', error)):
        return f"{', '.join(words)}: not supported{_at(_place(schema, lambda own: words[0] in own))}"
    if error.startswith("oneOf constraints"):
        reason = (
            "a text could have two of its forms; use anyOf, or give each a required property with a const of its own"
        )
        return f"oneOf: {reason}{_at(_place(schema, lambda own: 'oneOf' in own))}"
    if error.startswith("recursion limit exceeded"):
        return "it is nested too deep for llguidance, which takes some 60 objects in one another"
    if (found := _ELSEWHERE.match(error)) is not None:
        is_draft = str(schema.get("$schema", "")).startswith(found[1])
        return f"{'$schema' if is_draft else '$ref'}: {found[1]} is not known, and nothing is fetched"
    if error.startswith(("Pointer ", "Anchor ")):
        return f"$ref: {error}"
    return _explained_expression(schema, error) or error


def _explained_expression(schema: Any, error: str) -> str | None:
    """The text for a user about an error in an expression, with the original expression; None for other errors."""
    given = list(_expressions(schema))
    names = {rust: expression for _, expression, rust, _ in given}
    if (both := _NOT_DISJOINT.search(error)) is not None:
        shown = " and ".join(names.get(each, each) for each in both.groups())
        path = _place(schema, lambda own: bool(own.get("patternProperties")))
        return f"patternProperties: a name could match both {shown}{_at(path)}"
    if (wrong := _ANCHOR.search(error)) is not None:
        rust, reason = wrong[2], f"{'^' if wrong[1] == 'Start' else '$'} is not supported there"
    elif (wrong := _EXPRESSION.search(error)) is not None:
        rust, reason = wrong[1], wrong[2]
    else:
        return None
    exact = [each for each in given if each[2] == rust]
    for word, expression, _, path in exact or given[: len(given) == 1]:
        return f"{word}: {reason}, in {expression}{_at(path)}"
    return f"pattern: {reason}"


def _expressions(schema: Any) -> Iterator[tuple[str, str, str, SchemaPath | None]]:
    """Yields the regular expressions of a schema: keyword, expression, translation, and place."""
    for path, own in _subschemas(schema):
        given = own.get("patternProperties")
        found = [("patternProperties", each) for each in given] if isinstance(given, Mapping) else []
        for word, expression in [("pattern", own.get("pattern")), *found]:
            if isinstance(expression, str):
                with contextlib.suppress(RegexTranslationError):
                    yield word, expression, to_rust(expression).rust, path


_ELSEWHERE = re.compile(r"Resource '(.*?)' is not present in a registry")
_NOT_DISJOINT = re.compile(r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint")
_ANCHOR = re.compile(r"lookarounds not supported yet; (Start|End) in regex /(.*)/")
_EXPRESSION = re.compile(r"regex parse error:\n +(.*)\n[ ^]+\nerror: (.*)")


class SchemaPath(NamedTuple):
    """The place of a subschema. parent: place of the enclosing schema, None for the root; name: its name there."""

    parent: SchemaPath | None
    name: str


def _at(path: SchemaPath | None) -> str:
    names: list[str] = []
    while path is not None:
        names.append(path.name if len(path.name) <= 60 else path.name[:60] + "...")
        path = path.parent
    text = ".".join(names[::-1])
    return f" (at {text if len(text) <= 200 else '...' + text[-200:]})" if names else ""


def _place(schema: Any, is_meant: Callable[[Mapping[str, Any]], bool]) -> SchemaPath | None:
    """The place of the first subschema that `is_meant` accepts."""
    return next((path for path, own in _subschemas(schema) if is_meant(own)), None)


def _subschemas(root: Any) -> Iterator[tuple[SchemaPath | None, dict[str, Any]]]:
    """All subschemas that are objects, with their places, outer ones first. Follows keywords with schemas, and targets
    of references.
    """
    todo: deque[tuple[SchemaPath | None, Any, Any]] = deque(
        [(None, root, root)]
    )  # place, schema, and the base of its pointers
    seen = set[int]()
    while todo:
        path, own, base = todo.popleft()
        if not isinstance(own, dict) or id(own) in seen:
            continue
        seen.add(id(own))
        yield path, own
        base = own if is_resource(own, root) else base
        if isinstance(reference := own.get("$ref"), str):
            todo.append((SchemaPath(None, reference), resolve_pointer(reference, base), base))
        for word, value in own.items():
            if isinstance(value, list) and word in _SCHEMAS:
                todo += ((SchemaPath(path, f"{word}[{place}]"), each, base) for place, each in enumerate(value) if each)
            elif isinstance(value, dict) and word in _NAMED_SCHEMAS:
                todo += ((SchemaPath(path, f"{word}.{name}"), each, base) for name, each in value.items() if each)
            elif isinstance(value, dict) and word in _SCHEMA:
                todo.append((SchemaPath(path, word), value, base))
