"""Constraints on the text of an answer, with vLLM's names. Knows values and their limits, not grammars or tokens."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.errors import RequestError

MAX_GRAMMAR_CHARS = 262_144
"""Maximum number of characters of a grammar, of a regular expression or of a schema as JSON."""

MAX_CHOICES = 4096

SERVER_ONLY_FIELDS = ("reasoning", "may_force")
"""Fields that the server sets. Clients may not set them."""

CONSTRAINT_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """A constraint on the text of an answer: exactly one of these. Checked on construction; immutable.

    A schema, an expression or a grammar is compiled before the first step. The request is refused if its constraint
    cannot be guaranteed. Raises RequestError, with `param` set to "structured_outputs".

    Differs from vLLM: JSON is written on one line, with a space after each comma and colon (`disable_any_whitespace` is
    accepted without effect). So a model cannot generate endless blanks, and more tokens are forced.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON Schema, as an object or as JSON text; draft 2020-12."""
    json_object: bool | None = None
    """Any JSON object. The only value is true."""
    regex: str | None = None
    """An expression that the whole text matches, in the syntax of Rust's regex crate: no look-around."""
    choice: tuple[str, ...] | list[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar, in Lark's or in GBNF's syntax."""
    disable_any_whitespace: bool = False
    """Accepted without effect, for compatibility with vLLM."""
    may_force: bool = False
    """Whether the tokens that a grammar forces are proposed as drafts: only if it is known to force little text in one
    piece, which is unknown for a client's grammar."""
    reasoning: tuple[str, str] | list[str] | None = None
    """The marks around reasoning before the text. An empty first mark: the prompt has begun the reasoning, which must
    then come."""

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINT_KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise _wrong(f"one of {', '.join(CONSTRAINT_KINDS)} must be given, not {' and '.join(given) or 'none'}")
        if not isinstance(self.disable_any_whitespace, bool):
            raise _wrong("disable_any_whitespace must be true or false")
        if self.reasoning is not None:
            object.__setattr__(self, "reasoning", self._marks())
        (kind,) = given
        is_text = kind in ("regex", "grammar")
        checked = _bounded(kind, getattr(self, kind)) if is_text else getattr(self, f"_{kind}")()
        object.__setattr__(self, kind, checked)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> StructuredOutputsParams:
        """Parses the constraint from JSON. Null means not given."""
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in options.items() if value is not None}
        for name in ("disable_fallback", "disable_additional_properties"):  # vLLM's options with their defaults
            if given.get(name) is False:
                del given[name]
        if unknown := sorted(given.keys() - known):
            raise _wrong(
                f"{reprlib.repr(unknown[0])} is not known; it takes {', '.join(sorted(known - {*SERVER_ONLY_FIELDS}))}"
            )
        return cls(**given)

    @property
    def kind(self) -> str:
        """The kind of the given constraint."""
        return next(name for name in CONSTRAINT_KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """The constraint as text: the JSON of a schema or of choices, and the other kinds unchanged."""
        given = getattr(self, self.kind)
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    def _marks(self) -> tuple[str, str]:
        match self.reasoning:
            case (str() as begins, str() as ends) if ends:
                return begins, ends
        raise _wrong("reasoning must be two texts, the second one not empty")

    def _json(self) -> str:
        schema = self.json
        if isinstance(schema, str):
            _bounded("the schema", schema)
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise _wrong(f"the schema is not JSON: {error}") from None
        if not isinstance(schema, Mapping | bool):
            raise _wrong("json must be a schema: an object, true or false")
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong(f"the schema is not JSON: {error}") from None
        return _bounded("the schema", text)

    def _json_object(self) -> bool:
        if self.json_object is not True:
            raise _wrong("json_object must be true")
        return True

    def _choice(self) -> tuple[str, ...]:
        given = self.choice
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
            raise _wrong("choice must be a list of texts")
        choices = tuple(given)
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise _wrong(f"choice has {len(choices)} texts; it must have 1 to {MAX_CHOICES}")
        if bad := [each for each in choices if not isinstance(each, str) or not each]:
            raise _wrong(f"choice must be a list of texts that are not empty, and one is {reprlib.repr(bad[0])}")
        _bounded("choice", "".join(choices))
        return choices


def _bounded(name: str, text: Any) -> str:
    if not isinstance(text, str) or not text:
        raise _wrong(f"{name} must be a text that is not empty")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise _wrong(f"{name} has {len(text):,} characters; at most {MAX_GRAMMAR_CHARS:,} are allowed")
    return text


def _wrong(reason: str) -> RequestError:
    return RequestError(f"structured_outputs: {reason}", "structured_outputs")
