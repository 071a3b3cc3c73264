"""Mistral's instruction models: a list of calls behind a token of its own, and ids of nine letters and digits."""

from quire.tools.format import ToolFormat

MISTRAL = ToolFormat(
    "mistral",
    marks=("[TOOL_CALLS]",),
    opens="[TOOL_CALLS] [",
    between=", ",
    closes="]",
    also=("[TOOL_CALLS][", "[TOOL_CALLS]"),
    # Newer models write a name and its arguments.
    unless=("[ARGS]",),
    id_begins="",
    num_id=9,
)
