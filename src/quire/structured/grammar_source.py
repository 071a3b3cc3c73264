"""Converts a request's constraint into grammars of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import inf
from typing import Any

from quire.errors import RequestError
from quire.structured import schemas
from quire.structured.forced_text import MAX_FORCED_BYTES, regex_bytes, schema_bytes
from quire.structured.params import StructuredOutputsParams

MAX_GBNF_CHARS = 8192
"""Maximum number of characters of a GBNF grammar: the converter's time grows with the square of its rules."""

TokenOf = Callable[[str], int | None]
"""Returns the id of the added token with this text; None if there is none."""


def source_of(wanted: StructuredOutputsParams, token_of: TokenOf) -> str:
    """The grammar in llguidance's form: a JSON list of grammars, the first of which is the start.

    Raises UnsupportedSchemaError, ValueError and the errors of llguidance's converters.
    """
    constraint, forced_bytes = constraint_grammar(wanted)
    parts: list[dict[str, Any]] = [{"name": "constraint", **constraint}]
    options = "" if forced_bytes <= MAX_FORCED_BYTES else '%llguidance {"no_forcing": true}\n'
    if wanted.reasoning is not None:
        begins, ends = wanted.reasoning
        parts.insert(0, {"name": "text", "lark_grammar": options + _with_reasoning(begins, ends, token_of)})
    elif options:
        parts.insert(0, {"name": "text", "lark_grammar": options + "start: @constraint"})
    return json.dumps({"grammars": parts})


def _with_reasoning(begins: str, ends: str, token_of: TokenOf) -> str:
    """The start grammar: reasoning, then the constraint. begins: "" if the prompt has begun the reasoning."""
    begin, end = lark_term(begins, token_of), lark_term(ends, token_of)
    if token_of(ends) is None:
        free = [f"free[lazy]: /(.|\\n)*{escaped(ends)}/"]
    else:
        free = [f"free: TEXT? {end}", f"TEXT: {text_without(ends)}"]
    start = f"start: {f'({begin} thought)?' if begins else 'thought'} @constraint"
    return "\n".join([start, "thought: free BLANK?", *free, r"BLANK: /[ \n]+/"])


def lark_term(text: str, token_of: TokenOf) -> str:
    """A text as a term of Lark: its added token, if there is one, because the model was trained with that token."""
    token_id = token_of(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def text_without(text: str) -> str:
    """A term of Lark for any text without this one; texts that spell an added token count as it."""
    return rf"/(.|\n)+/ & ~/(.|\n)*{escaped(text)}(.|\n)*/"


def term_of(wanted: StructuredOutputsParams) -> tuple[str, float]:
    """The constraint as a term of Lark, and an upper bound of the bytes that it forces in one piece; see forced_text.
    Raises RequestError for a grammar, which has rules of its own.
    """
    if wanted.kind == "grammar":
        raise RequestError("structured_outputs: a grammar cannot be combined with tools", "structured_outputs")
    found, num_forced = constraint_grammar(wanted)
    if "json_schema" in found:
        return f"%json {json.dumps(found['json_schema'])}", num_forced
    return str(found["lark_grammar"]).removeprefix("start: "), num_forced


def constraint_grammar(wanted: StructuredOutputsParams) -> tuple[dict[str, Any], float]:
    """The grammar of the constraint alone, and an upper bound of the bytes that it forces."""
    from llguidance import regex_to_lark

    match wanted.kind:
        case "json":
            schema = schemas.prepare_schema(json.loads(wanted.text))
            return {"json_schema": schema}, schema_bytes(schema)
        case "json_object":
            schema = schemas.prepare_schema({"type": "object"})
            return {"json_schema": schema}, schema_bytes(schema)
        case "regex":
            return {"lark_grammar": f"start: /{regex_to_lark(wanted.text)}/"}, regex_bytes(wanted.text)
        case "choice":
            assert wanted.choice is not None
            # One expression is one item of the parser; thousands of alternatives would be too many items.
            term = regex_to_lark("|".join(map(escaped, wanted.choice)))
            return {"lark_grammar": f"start: /{term}/"}, max(len(each.encode()) for each in wanted.choice)
        case _:
            return {"lark_grammar": _as_lark(wanted.text)}, 0.0 if wanted.may_force else inf


def escaped(text: str) -> str:
    """An expression that matches only this text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~/-]", r"\\\g<0>", text).replace("\n", r"\n")


def _as_lark(text: str) -> str:
    """A grammar in Lark's syntax. A grammar without a start rule and without llguidance's directive is GBNF."""
    if any(_LARK.match(line) for line in text.splitlines()):
        return text
    if len(text) > MAX_GBNF_CHARS:
        raise ValueError(f"a grammar in GBNF may have {MAX_GBNF_CHARS:,} characters, and it has {len(text):,}")
    from llguidance.gbnf_to_lark import gbnf_to_lark

    return str(gbnf_to_lark(text))


_LARK = re.compile(r"[ \t]*(%llguidance\b|start[ \t]*(\[[^\]]*\][ \t]*)?:(?!:))")
