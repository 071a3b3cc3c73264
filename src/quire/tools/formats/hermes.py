"""Hermes 2 Pro, Qwen 2.5 and Qwen 3, and others after them: each call within tags of its own."""

from quire.tools.format import ToolFormat

HERMES = ToolFormat(
    "hermes",
    marks=("<tool_call>",),
    opener="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    closer="\n</tool_call>",
    other_openers=("<tool_call>",),
    # Qwen3-Coder and GLM write arguments as tags.
    excluded_marks=("<function=", "<arg_key>"),
)
