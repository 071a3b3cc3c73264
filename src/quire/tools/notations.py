"""How formats whose calls are not one JSON object write a call: a name, and arguments in a notation of their own."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from quire.structured.grammar_source import TokenOf, lark_term
from quire.structured.schemas import UnsupportedSchemaError
from quire.tools.argument_readers import ESCAPE, ArgumentsReader, EscapeReader, JsonReader, PythonReader, TagReader
from quire.tools.member_grammar import MemberGrammar

_JSON_KEY = re.compile(r"[^\s=:,(){}\[\]\"'<]+")


class Notation(ABC):
    """A call between a format's opener and closer.

    head         matches what stands before the arguments; its first group is the name
    head_begins  matches at least every beginning of such a text
    """

    head: re.Pattern[str]
    head_begins: re.Pattern[str]

    @abstractmethod
    def reader(self, schema: Mapping[str, Any]) -> ArgumentsReader:
        """Reads the arguments of one call. schema: of the tool's arguments."""

    @abstractmethod
    def write(self, name: str, arguments: Mapping[str, Any], id_: str) -> str:
        """The text of a call. id_: of the call, for formats that write it."""

    @abstractmethod
    def rules(self, rule: str, name: str, schema: Mapping[str, Any], token_of: TokenOf) -> list[str]:
        """The rules of a grammar for calls of a tool. schema: of its arguments, prepared. Raises UnsupportedSchemaError
        for a schema that this notation cannot honour.
        """


class JsonNotation(Notation):
    """A name, a mark, and the arguments as a JSON object. id_mark: stands before an id of nine characters, which some
    models write between the name and the mark; "": they do not.
    """

    def __init__(self, mark: str, id_mark: str = "") -> None:
        self._mark, self._id_mark = mark, id_mark
        id_ = rf"(?:{re.escape(id_mark)}[\w-]*)?" if id_mark else ""
        self.head = re.compile(rf"([\w.-]+)[ \t]*{id_}{re.escape(mark)}[ \t\r\n]*(?=\{{)")
        opens = re.escape((id_mark or mark)[0])
        self.head_begins = re.compile(rf"[\w.-]*[ \t]*(?:{opens}[^{{]*)?")

    def reader(self, schema: Mapping[str, Any]) -> ArgumentsReader:
        """See Notation."""
        return JsonReader()

    def write(self, name: str, arguments: Mapping[str, Any], id_: str) -> str:
        """See Notation."""
        return f"{name}{self._id_mark and self._id_mark + id_}{self._mark}{_json(arguments)}"

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], token_of: TokenOf) -> list[str]:
        """See Notation."""
        arguments = f"{rule}_arguments"
        head = json.dumps(name) + (f" {lark_term(self._id_mark, token_of)} /[a-zA-Z0-9]{{9}}/" if self._id_mark else "")
        # A mark that is no token is one literal with the name: a text without a call may begin with the name alone.
        is_plain = token_of(self._mark) is None and not self._id_mark
        begin = json.dumps(name + self._mark) if is_plain else f"{head} {lark_term(self._mark, token_of)}"
        return [
            f"{rule}: {begin} {arguments}",
            f"{arguments}: %json {json.dumps(schema)}",
        ]


class TagNotation(Notation):
    """A name, then a pair of tags for each argument. Strings have no quotes."""

    head = re.compile(r"([\w.-]+)\s*(?=<arg_key>|</tool_call>)")
    head_begins = re.compile(r"[\w.-]*\s*(?:<[/\w]{0,10})?")

    def reader(self, schema: Mapping[str, Any]) -> ArgumentsReader:
        """See Notation."""
        return TagReader(schema, "</tool_call>")

    def write(self, name: str, arguments: Mapping[str, Any], id_: str) -> str:
        """See Notation."""
        members = [
            f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else _json(value)}</arg_value>\n"
            for key, value in arguments.items()
        ]
        return "".join([f"{name}\n", *members])

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], token_of: TokenOf) -> list[str]:
        """See Notation. Newer models leave out the line breaks, so that they are optional."""
        grammar = MemberGrammar(rule, schema)
        tags = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
        begin, middle, value, end = (lark_term(tag, token_of) for tag in tags)

        def written(term: str) -> str:
            return f'"\\n"? {value} {term} {end} "\\n"?'

        def member(key: str, own: Any) -> str:
            if "</arg_key>" in key or key != key.strip():
                raise UnsupportedSchemaError(f"properties: the model cannot write the name {key!r}")
            term = grammar.value(own, lambda text: grammar.text(text, "</arg_value>"), grammar.json)
            return f"{begin} {json.dumps(key)} {middle} {written(term)}"

        members = grammar.members(schema, member, "")
        if members is None:  # any arguments
            key, text = grammar.text({}, "</arg_key>", 1), grammar.text({}, "</arg_value>")
            members = f"({begin} {key} {middle} {written(text)})*"
        return [f'{rule}: {json.dumps(name)} "\\n"? {members}', *grammar.rules]


class PythonNotation(Notation):
    """A call with keyword arguments, as in Python. Forced values are JSON."""

    head = re.compile(r"([^\W\d][\w.-]*)\s*\(")
    head_begins = re.compile(r"(?:[^\W\d][\w.-]*\s*)?")

    def reader(self, schema: Mapping[str, Any]) -> ArgumentsReader:
        """See Notation."""
        return PythonReader(schema)

    def write(self, name: str, arguments: Mapping[str, Any], id_: str) -> str:
        """See Notation."""
        return f"{name}({', '.join(f'{key}={_json(value)}' for key, value in arguments.items())})"

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], token_of: TokenOf) -> list[str]:
        """See Notation."""
        grammar = MemberGrammar(rule, schema)

        def member(key: str, own: Any) -> str:
            return f"{json.dumps(_plain_key(key) + '=')} {grammar.json(own)}"

        members = grammar.members(schema, member, ", ")
        if members is None:
            one = f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {grammar.json({})}'
            members = f'({one} (", " {one})*)?'
        return [f'{rule}: {json.dumps(name + "(")} {members} ")"', *grammar.rules]


class EscapeNotation(Notation):
    """FunctionGemma's calls: `call:name{city:<escape>Bern<escape>,days:3}`."""

    head = re.compile(r"call:\s*([\w.-]+)\s*\{")
    head_begins = re.compile(r"[\w:.-]*(?::\s*[\w.-]*\s*)?")

    def reader(self, schema: Mapping[str, Any]) -> ArgumentsReader:
        """See Notation."""
        return EscapeReader(schema)

    def write(self, name: str, arguments: Mapping[str, Any], id_: str) -> str:
        """See Notation."""
        return f"call:{name}{self._write(dict(arguments))}"

    def _write(self, value: Any) -> str:
        match value:
            case str():
                return f"{ESCAPE}{value}{ESCAPE}"
            case Mapping():
                return "{" + ",".join(f"{key}:{self._write(each)}" for key, each in _sorted(value)) + "}"
            case list():
                return "[" + ",".join(map(self._write, value)) + "]"
        return _json(value)

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], token_of: TokenOf) -> list[str]:
        """See Notation. Names are in the order in which the model's template writes them."""
        grammar = MemberGrammar(rule, schema)
        mark = lark_term(ESCAPE, token_of)

        def text(own: Any) -> str:
            return f"{mark} {grammar.text(own, ESCAPE)} {mark}"

        def value(own: Any) -> str:
            return grammar.value(own, text, nested)

        def nested(own: Any) -> str:
            return grammar.nested(own, object_, value, any_value)

        def object_(own: Mapping[str, Any]) -> str:
            members = grammar.members(own, lambda key, each: f"{json.dumps(_plain_key(key) + ':')} {value(each)}", ",",
                                      is_sorted=True)  # fmt: skip
            return f'"{{" {any_members() if members is None else members} "}}"'

        def any_members() -> str:
            one = f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {any_value()}'
            return f'({one} ("," {one})*)?'

        def any_value() -> str:
            known = f"{rule}_any"
            if grammar.begin(known):
                scalar = grammar.json({"type": ["number", "boolean", "null"]})
                items = f'"[" ({known} ("," {known})*)? "]"'
                grammar.end(known, f'{text({})} | {scalar} | {items} | "{{" {any_members()} "}}"')
            return known

        return [f"{rule}: {json.dumps(f'call:{name}')} {object_(schema)}", *grammar.rules]


def _sorted(value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The members of an object in the order of jinja2's `dictsort`."""
    return sorted(value.items(), key=lambda member: str(member[0]).lower())


def _plain_key(key: str) -> str:
    if not _JSON_KEY.fullmatch(key):
        raise UnsupportedSchemaError(f"properties: the model cannot write the name {key!r}")
    return key


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
