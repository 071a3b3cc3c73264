"""The call format of a model family: how it writes calls, and the grammar and the conversation that follow from it."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.structured import schemas
from quire.structured.forced_text import MAX_FORCED_BYTES, SCALAR_BYTES, schema_bytes
from quire.structured.grammar_source import TokenOf, escaped, lark_term, term_of, text_without
from quire.structured.params import StructuredOutputsParams
from quire.tools.calls import Call, Tool, ToolChoice

Message = Mapping[str, Any]
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """A call is written as {"name": ..., KEY: {...}}.

    name               of the format
    marks              texts that identify the format in a chat template; one is enough
    excluded_marks     texts in a chat template that rule the format out even if it has a mark
    tokens             further texts of the format that become tokens if the tokenizer has them
    opener             text before the first call
    separator          text between two calls; None: an answer has at most one
    closer             text after the last call
    key                key of the arguments
    name_key, id_key   keys of the name, and of an id that stands before it; id_key "": calls have no id
    other_openers      other texts that open a call
    at_start           whether an answer may begin with a call without an opener
    make_instructions  writes the system message that teaches the format; None: the chat template teaches it
    id_length          characters of a call's id after `id_prefix`
    results_role       role of results in templates that do not render calls; "": all templates of the format do
    lists_in_system    whether such templates take the tools as JSON text beside the system message's content
    """

    name: str
    marks: tuple[str, ...]
    excluded_marks: tuple[str, ...] = field(default=(), kw_only=True)
    tokens: tuple[str, ...] = field(default=(), kw_only=True)
    opener: str
    separator: str | None
    closer: str
    key: str = "arguments"
    name_key: str = field(default="name", kw_only=True)
    id_key: str = field(default="", kw_only=True)
    other_openers: tuple[str, ...] = ()
    at_start: bool = False
    make_instructions: Callable[[Sequence[Tool]], str] | None = None
    id_prefix: str = "call_"
    id_length: int = 24
    results_role: str = field(default="", kw_only=True)
    lists_in_system: bool = field(default=False, kw_only=True)

    def new_id(self) -> str:
        """An id for a call."""
        return self.id_prefix + "".join(secrets.choice(_LETTERS) for _ in range(self.id_length))

    @property
    def shown_marks(self) -> tuple[str, ...]:
        """The texts in calls that become tokens if the tokenizer has them."""
        around = "".join([self.opener, self.separator or "", self.closer, *self.other_openers])
        return (*(mark for mark in self.marks if mark in around), *self.tokens)

    def write(self, calls: Sequence[Call]) -> str:
        """The text of calls."""
        texts = [self._write_call(call, number) for number, call in enumerate(calls)]
        return self.opener + (self.separator or "").join(texts) + self.closer

    def _write_call(self, call: Call, number: int) -> str:
        id_ = f'"{self.id_key}": "{number}", ' if self.id_key else ""
        return f'{{{id_}"{self.name_key}": {json.dumps(call.name)}, "{self.key}": {call.arguments}}}'

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool], template: str = "") -> list[Message]:
        """Rewrites a conversation for a template without tools: the system message describes the tools, calls become
        text, and results become messages of the user. For a template that takes tools but no calls, calls become text,
        too. For other templates it changes only ids, if these are too long.
        """
        if self.results_role and "tool_calls" not in template:
            return self._spelled(messages, tools)
        if self.make_instructions is None:
            return list(messages) if self.id_prefix else [self._with_ids(message) for message in messages]
        found: list[Message] = [_as_text(self, message) for message in messages]
        if not tools:
            return found
        instructions = self.make_instructions(tools)
        if found and found[0]["role"] == "system":
            return [{**found[0], "content": f"{found[0]['content']}\n\n{instructions}"}, *found[1:]]
        return [{"role": "system", "content": instructions}, *found]

    def _spelled(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The conversation for a template that does not render calls."""
        found: list[Message] = []
        for message in messages:
            if message["role"] == "tool":
                found.append({"role": self.results_role, "content": message.get("content") or ""})
            else:
                found.append(_as_text(self, message))
        if not tools or not self.lists_in_system:
            return found
        listed = json.dumps([tool.for_template()["function"] for tool in tools], ensure_ascii=False)
        if found and found[0]["role"] == "system":
            return [{**found[0], "tools": listed}, *found[1:]]
        return [{"role": "system", "content": "You are a helpful assistant with some tools.", "tools": listed}, *found]

    def _with_ids(self, message: Message) -> Message:
        """Shortens the ids of a message to the length that the template demands. Ids of other servers may be longer."""
        found = dict(message)
        if (given := message.get("tool_call_id")) is not None:
            found["tool_call_id"] = self._id(given)
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [{**call, "id": self._id(call["id"])} for call in calls]
        return found

    def _id(self, given: str) -> str:
        if len(given) == self.id_length and given.isalnum() and given.isascii():
            return given
        return hashlib.sha256(given.encode(errors="replace")).hexdigest()[: self.id_length]

    def grammar(
        self, tools: Sequence[Tool], choice: ToolChoice, token_of: TokenOf, constraint: str | None = None
    ) -> str | None:
        """The grammar of an answer, in Lark's syntax. None if the model may write anything: calls are not required, no
        tool is strict, and the text has no constraint.

        If the answer must call, the arguments of every tool fit its schema; otherwise only those of strict tools do.

        constraint  constraint on a text without calls, as a term of Lark; None: any text
        """
        wanted = [tool for tool in tools if choice.name in ("", tool.name)]
        is_free = choice.mode == "auto" and constraint is None and not any(tool.strict for tool in wanted)
        if choice.mode == "none" or is_free:
            return None
        opener, separator, closer = (
            self._terms(text, token_of) for text in (self.opener, self.separator or "", self.closer)
        )
        several = choice.parallel and self.separator is not None
        calls = " ".join(["call", f"({' '.join([*separator, 'call'])})*" if several else "", *closer])
        rules = [
            "call: " + " | ".join(f"call_{place}" for place in range(len(wanted))),
            *(self._rules(place, tool, choice, token_of) for place, tool in enumerate(wanted)),
        ]
        if choice.mode == "required":
            start = [f"start: {' '.join(opener)} {calls}"]
        elif constraint is not None:
            start = [f"start: {' '.join(opener)} {calls} | form", f"form: {constraint}"]
        elif not opener:
            start = [f"start: {calls} | OTHER", f"OTHER: {self._other(wanted)}"]
        else:
            first, *_ = self._pieces(self.opener)
            if token_of(first) is None:
                head = [f"head[lazy]: /(.|\\n)*{escaped(first)}/", r"TEXT: /(.|\n)+/"]
            else:
                head = [f"head: TEXT? {opener[0]}", f"TEXT: {text_without(first)}"]
            start = [f"start: {'calls*' if choice.parallel else 'calls?'} TEXT?"]
            start += [f"calls: head {' '.join(opener[1:])} {calls}", *head]
        return "\n".join(["%llguidance {}", *start, *rules])

    def structure(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        token_of: TokenOf,
        wanted: StructuredOutputsParams | None = None,
    ) -> StructuredOutputsParams | None:
        """The constraint on an answer; None without one. wanted: the constraint on a text without calls."""
        constraint, num_forced = (None, 0.0) if wanted is None else term_of(wanted)
        grammar = self.grammar(tools, choice, token_of, constraint)
        if grammar is None:
            return None
        most = max(self._forced_bytes(tools, choice), num_forced)
        reasoning = None if wanted is None else wanted.reasoning
        return StructuredOutputsParams(grammar=grammar, may_force=most <= MAX_FORCED_BYTES, reasoning=reasoning)

    def _forced_bytes(self, tools: Sequence[Tool], choice: ToolChoice) -> float:
        """Upper bound of the bytes that calls can force in one piece; see forced_text. Calls are chosen freely."""
        held = [tool for tool in tools if choice.mode == "required" or tool.strict]
        around = len(self.opener + (self.separator or "") + self.closer) + len(self.key)
        sizes = (schema_bytes(schemas.prepare_schema(tool.arguments)) + 6 * len(tool.name) for tool in held)
        return around + SCALAR_BYTES + max(sizes, default=0.0)

    def _terms(self, text: str, token_of: TokenOf) -> list[str]:
        """A text as terms of a grammar. Marks in it become tokens if the tokenizer has them."""
        return [lark_term(piece, token_of) for piece in self._pieces(text)]

    def _pieces(self, text: str) -> list[str]:
        """Splits a text at its marks, and keeps the marks."""
        marks = (*self.marks, *self.tokens)
        pieces = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
        return [piece for piece in pieces if piece]

    def _other(self, tools: Sequence[Tool]) -> str:
        """An answer that is not calls, as a term of Lark, in a format whose calls have no opener."""
        return r"/[ \n]*([^{ \n](.|\n)*)?/"

    def _schema(self, tool: Tool, choice: ToolChoice) -> Any:
        """The schema that arguments must fit, prepared."""
        return schemas.prepare_schema(
            tool.arguments if choice.mode == "required" or tool.strict else {"type": "object"}
        )

    def _rules(self, place: int, tool: Tool, choice: ToolChoice, token_of: TokenOf) -> str:
        schema = json.dumps(self._schema(tool, choice))
        head = json.dumps(f'"{self.name_key}": {json.dumps(tool.name)}, "{self.key}": ')
        begin = json.dumps("{" + (f'"{self.id_key}": "' if self.id_key else ""))
        id_ = r'/[0-9]{1,3}/ "\", "' if self.id_key else ""
        return f'call_{place}: {begin} {id_} {head} arguments_{place} "}}"\narguments_{place}: %json {schema}'


def calls_of(message: Message) -> list[Call]:
    """The calls of an earlier answer. Their arguments may be given as an object or as its text."""
    given = [(call.get("id", ""), call["function"]) for call in message.get("tool_calls") or ()]
    return [Call(id_, function["name"], _written(function.get("arguments", {}))) for id_, function in given]


def _written(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_text(format_: ToolFormat, message: Message) -> dict[str, Any]:
    calls = calls_of(message)
    content = message.get("content") or ""
    if message["role"] == "tool":
        result = json.dumps({"tool_call_id": message.get("tool_call_id"), "result": content}, ensure_ascii=False)
        return {"role": "user", "content": result}
    if not calls:
        return {**message, "content": content}
    text = format_.write(calls)
    return {"role": message["role"], "content": f"{content}\n{text}" if content else text}
