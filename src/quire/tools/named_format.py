"""Formats in which a call is a name and arguments in a notation of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import RequestError
from quire.structured.grammar_source import TokenOf, escaped
from quire.tools.calls import Call, Tool, ToolChoice
from quire.tools.format import Message, ToolFormat, calls_of
from quire.tools.notations import Notation

_MEMBER_BYTES = 128
"""Upper bound of the bytes around one argument, in any notation."""


@dataclass(frozen=True)
class NamedFormat(ToolFormat):
    """A call is a name and its arguments. See ToolFormat for what stands around calls.

    notation  how a call is written
    """

    notation: Notation = field(kw_only=True)

    def _write_call(self, call: Call, number: int) -> str:
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError(f"arguments of a call of {call.name} are no JSON object", "messages")
        return self.notation.write(call.name, arguments, call.id)

    def _spelled(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Each call is a message of its own, with the name as `metadata`, as GLM 4's templates take it."""
        found: list[Message] = []
        for message in messages:
            calls = calls_of(message)
            if message["role"] == "tool":
                found.append({"role": self.results_role, "content": message.get("content") or ""})
            elif message.get("content") or not calls:
                found.append({**message, "content": message.get("content") or ""})
            found += [{"role": "assistant", "metadata": call.name, "content": call.arguments} for call in calls]
        return found

    def _other(self, tools: Sequence[Tool]) -> str:
        """Any text whose first line is not the name of a tool: the next line would decide too late."""
        names = "|".join(escaped(tool.name) for tool in tools)
        return rf"/(.|\n)*/ & ~/[ \t\r\n]*({names})[ \t]*\n(.|\n)*/"

    def _rules(self, place: int, tool: Tool, choice: ToolChoice, token_of: TokenOf) -> str:
        return "\n".join(self.notation.rules(f"call_{place}", tool.name, self._schema(tool, choice), token_of))

    def _forced_bytes(self, tools: Sequence[Tool], choice: ToolChoice) -> float:
        most = max((json.dumps(tool.arguments).count('"') for tool in tools), default=0)
        return super()._forced_bytes(tools, choice) + most * _MEMBER_BYTES


@dataclass(frozen=True)
class InstructedFormat(NamedFormat):
    """A format that no template teaches: the first message of the user begins with the instructions, because templates
    of these models have no system message. Calls become text, and results become messages of the user. Neighbouring
    messages of one role become one: the templates demand that roles alternate.
    """

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool], template: str = "") -> list[Message]:
        """See ToolFormat."""
        found: list[dict[str, Any]] = []
        for message in messages:
            role, text = message["role"], message.get("content") or ""
            if role == "tool":
                role, text = "user", f"```tool_output\n{text}\n```"
            elif calls := calls_of(message):
                text = f"{text}\n{self.write(calls)}" if text else self.write(calls)
            if found and found[-1]["role"] == role:
                found[-1]["content"] = _together(found[-1]["content"], text)
            else:
                found.append({**{key: own for key, own in message.items() if key != "tool_calls"},
                              "role": role, "content": text})  # fmt: skip
        if not tools:
            return list(found)
        assert self.make_instructions is not None
        instructions = self.make_instructions(tools)
        place = next((place for place, message in enumerate(found) if message["role"] == "user"), None)
        if place is None:
            return [*found, {"role": "user", "content": instructions}]
        found[place] = {**found[place], "content": _together(instructions, found[place]["content"])}
        return list(found)


def _together(one: Any, other: Any) -> Any:
    """Two contents as one. A content is a text or a list of parts."""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else list(each) for each in (one, other)]
    return parts[0] + parts[1]
