"""Hermes 2 Pro, Qwen 2.5 and Qwen 3, and others after them: each call within tags of its own."""

from quire.tools.format import ToolFormat

HERMES = ToolFormat(
    "hermes",
    marks=("<tool_call>",),
    opens="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    closes="\n</tool_call>",
    also=("<tool_call>",),
    # Qwen3-Coder and GLM write arguments as tags.
    unless=("<function=", "<arg_key>"),
)
