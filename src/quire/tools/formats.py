"""The call formats, one row each. A model has the first format with a mark in its chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quire.tools.calls import Tool
from quire.tools.format import ToolFormat
from quire.tools.named_format import InstructedFormat, NamedFormat
from quire.tools.notations import EscapeNotation, JsonNotation, PythonNotation, TagNotation


def format_of(template: str) -> ToolFormat:
    """The format for a chat template; the generic one if no known format matches."""

    def is_written(marks: tuple[str, ...]) -> bool:
        return any(mark in template for mark in marks)

    return next(
        (each for each in ALL_FORMATS if is_written(each.marks) and not is_written(each.excluded_marks)), GENERIC
    )


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
    # Qwen3-Coder writes arguments as tags, and so does GLM.
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
    # See MISTRAL_ARGS.
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
"""Formats in which a call is one JSON object."""

MISTRAL_ARGS = NamedFormat(
    "mistral-args",
    marks=("[ARGS]",),
    # See MISTRAL_IDS.
    excluded_marks=("[CALL_ID]",),
    tokens=("[TOOL_CALLS]",),
    opener="[TOOL_CALLS]",
    separator="[TOOL_CALLS]",
    closer="",
    id_prefix="",
    id_length=9,
    notation=JsonNotation("[ARGS]"),
)
"""Ministral 3, Magistral and Devstral: a token, the name, a token, the arguments, for each call."""

MISTRAL_IDS = NamedFormat(
    "mistral-ids",
    marks=("[CALL_ID]",),
    tokens=("[TOOL_CALLS]", "[ARGS]"),
    opener="[TOOL_CALLS]",
    separator="[TOOL_CALLS]",
    closer="",
    id_prefix="",
    id_length=9,
    notation=JsonNotation("[ARGS]", "[CALL_ID]"),
)
"""Mistral Small 3.2: as MISTRAL_ARGS, with an id between name and arguments."""

GLM = NamedFormat(
    "glm",
    marks=("<arg_key>",),
    tokens=("<tool_call>", "</tool_call>", "</arg_key>", "<arg_value>", "</arg_value>"),
    opener="<tool_call>",
    separator="</tool_call>\n<tool_call>",
    closer="</tool_call>",
    notation=TagNotation(),
)
"""GLM 4.5 and later: tags around each call, and around each name and value of an argument."""

GLM_DENSE = NamedFormat(
    "glm4",
    marks=("<|observation|>",),
    tokens=("<|assistant|>",),
    opener="",
    separator="<|assistant|>",
    closer="",
    other_openers=("<|assistant|>",),
    at_start=True,
    results_role="observation",
    notation=JsonNotation("\n"),
)
"""GLM 4 of 2024 and early 2025: the answer is a line with the name and then the arguments."""

OLMO = NamedFormat(
    "olmo",
    marks=("<function_calls>",),
    tokens=("</function_calls>",),
    opener="<function_calls>",
    separator="\n",
    closer="</function_calls>",
    notation=PythonNotation(),
)
"""OLMo 3: tags around lines with calls as in Python."""

FUNCTION_GEMMA = NamedFormat(
    "functiongemma",
    marks=("<start_function_call>",),
    tokens=("<end_function_call>", "<escape>"),
    opener="<start_function_call>",
    separator="<end_function_call><start_function_call>",
    closer="<end_function_call>",
    notation=EscapeNotation(),
)
"""FunctionGemma: tokens around each call and around each string."""


def _gemma_instructions(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions:\n"
        f"{listed}\n"
        "To call some, write a block like this one, with a line for each call, names of arguments, and JSON values:\n"
        '```tool_code\na_function(a_parameter="a value", another_parameter=1)\n```\n'
        "Then you are given the results in a block of tool_output. If no function helps, answer in words."
    )


GEMMA = InstructedFormat(
    "gemma",
    marks=("<start_of_turn>",),
    opener="```tool_code\n",
    separator="\n",
    closer="\n```",
    other_openers=("```tool_code", "```tool_call"),
    make_instructions=_gemma_instructions,
    notation=PythonNotation(),
)
"""Gemma 2 and 3: blocks of code with calls as in Python, which the first message explains."""

NAMED_FORMATS = (MISTRAL_ARGS, MISTRAL_IDS, GLM, GLM_DENSE, OLMO, FUNCTION_GEMMA, GEMMA)
"""Formats in which a call is a name and arguments."""

ALL_FORMATS: tuple[ToolFormat, ...] = (*FORMATS, *NAMED_FORMATS)
