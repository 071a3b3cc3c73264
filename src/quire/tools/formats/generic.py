"""Any other model: it is told how, and answers with an object of calls."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quire.tools.calls import Tool
from quire.tools.format import ToolFormat


def _instructions(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions:\n"
        f"{listed}\n"
        "To call some, answer with nothing but JSON of this form:\n"
        '{"tool_calls": [{"name": "a function", "arguments": {"a parameter": "a value"}}]}\n'
        "Then you are given the results. If no function helps, answer in words."
    )


GENERIC = ToolFormat(
    "generic",
    marks=(),
    opener='{"tool_calls": [',
    separator=", ",
    closer="]}",
    other_openers=('{"tool_calls":[',),
    make_instructions=_instructions,
)
