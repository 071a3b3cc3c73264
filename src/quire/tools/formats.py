"""The call formats, one row each. A model has the first format with a mark in its chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quire.tools.calls import Tool
from quire.tools.format import ToolFormat


def format_of(template: str) -> ToolFormat:
    """The format for a chat template; the generic one if no known format matches."""

    def is_written(marks: tuple[str, ...]) -> bool:
        return any(mark in template for mark in marks)

    return next((each for each in FORMATS if is_written(each.marks) and not is_written(each.excluded_marks)), GENERIC)


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
"""The generic format: a system message explains it, and the model answers with one JSON object that lists the calls."""

HERMES = ToolFormat(
    "hermes",
    marks=("<tool_call>",),
    opener="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    closer="\n</tool_call>",
    other_openers=("<tool_call>",),
    tokens=("</tool_call>",),
    # Qwen3-Coder and GLM write arguments as tags.
    excluded_marks=("<function=", "<arg_key>"),
)
"""Hermes 2 Pro, Qwen 2.5, Qwen 3 and successors, SmolLM3, Granite 4: tags around each call."""

LLAMA = ToolFormat(
    "llama",
    marks=("<|python_tag|>", '"parameters": dictionary of argument name'),
    opener="",
    separator=None,
    closer="",
    key="parameters",
    other_openers=("<|python_tag|>",),
    at_start=True,
)
"""Llama 3.1, 3.2 and 3.3: the answer is one call, and the key of its arguments is "parameters"."""

MISTRAL = ToolFormat(
    "mistral",
    marks=("[TOOL_CALLS]",),
    opener="[TOOL_CALLS] [",
    separator=", ",
    closer="]",
    other_openers=("[TOOL_CALLS][", "[TOOL_CALLS]"),
    # Newer models write a name and then its arguments, without a list.
    excluded_marks=("[ARGS]",),
    id_prefix="",
    id_length=9,
)
"""Mistral's instruction models: a token, then a list of calls, whose ids have nine letters and digits."""

GRANITE = ToolFormat(
    "granite",
    marks=("<|tool_call|>",),
    # Phi's tokens have the same name.
    excluded_marks=("<|tool|>",),
    opener="<|tool_call|>[",
    separator=", ",
    closer="]",
    other_openers=("<|tool_call|> [", "<|tool_call|>", "<tool_call>[", "<tool_call>"),
    results_role="tool_response",
)
"""Granite 3: a token, then a list of calls."""

PHI = ToolFormat(
    "phi",
    marks=("<|tool|>", "<|tool_call|>"),
    tokens=("<|/tool_call|>",),
    opener="<|tool_call|>[",
    separator=", ",
    closer="]<|/tool_call|>",
    other_openers=("<|tool_call|> [", "<|tool_call|>"),
    results_role="tool_response",
    lists_in_system=True,
)
"""Phi-4-mini: a list of calls between two tokens. Its template takes the tools in the system message."""

COHERE = ToolFormat(
    "cohere",
    marks=("<|START_ACTION|>",),
    tokens=("<|END_ACTION|>",),
    opener="<|START_ACTION|>[\n    ",
    separator=",\n    ",
    closer="\n]<|END_ACTION|>",
    key="parameters",
    name_key="tool_name",
    id_key="tool_call_id",
    other_openers=("<|START_ACTION|>[", "<|START_ACTION|>"),
)
"""Command R7B and Command A: a list of calls between two tokens, each with its number in the answer."""

FORMATS = (MISTRAL, HERMES, LLAMA, GRANITE, PHI, COHERE)
