"""Mistral's instruction models: a list of calls behind a token of its own, and ids of nine letters and digits."""

from quire.tools.format import ToolFormat

MISTRAL = ToolFormat(
    "mistral",
    marks=("[TOOL_CALLS]",),
    opener="[TOOL_CALLS] [",
    separator=", ",
    closer="]",
    other_openers=("[TOOL_CALLS][", "[TOOL_CALLS]"),
    # Newer models write a name and its arguments.
    excluded_marks=("[ARGS]",),
    id_prefix="",
    id_length=9,
)
