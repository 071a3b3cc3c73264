"""Tools, the choice among them, and what an answer consists of: text and calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.errors import RequestError

EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Parameters of a tool that takes none."""


@dataclass(frozen=True)
class Tool:
    """A function that the caller can run.

    parameters  JSON Schema of its arguments, an object
    strict      whether arguments must fit the schema even when calling is optional
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: EMPTY)
    strict: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """The schema of the arguments. It always asks for an object: llguidance cannot satisfy another type."""
        given, conditions = self.parameters.get("type", "object"), self.parameters.get("allOf", [])
        if given == "object" or not isinstance(conditions, list):
            return {"type": "object", **self.parameters}
        return {**self.parameters, "type": "object", "allOf": [*conditions, {"type": given}]}

    def for_template(self) -> dict[str, Any]:
        """The tool in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def parse_tool(given: Mapping[str, Any]) -> Tool:
    """Parses a tool of OpenAI's API. Raises RequestError for anything else."""
    match given:
        case {"type": "function", "function": {"name": str() as name, **rest}}:
            parameters, description = rest.get("parameters"), rest.get("description")
            if isinstance(parameters, Mapping | None) and isinstance(description, str | None):
                schema = EMPTY if parameters is None else dict(parameters)
                return Tool(name, description or "", schema, rest.get("strict") is True)
    raise RequestError(
        'a tool is {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}', "tools"
    )


@dataclass(frozen=True)
class ToolChoice:
    """Whether the answer may, must or must not call, and which tool.

    name      the only tool; "" for any
    parallel  whether an answer may have several calls
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str = ""
    parallel: bool = True


@dataclass(frozen=True)
class Call:
    """A call in an earlier answer. arguments: JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class TextDelta:
    """A piece of text outside calls."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """A piece of the reasoning that the model writes before its answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The start of the index-th call of an answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


AnswerDelta = TextDelta | ReasoningDelta | CallStart | ArgumentsDelta
