"""Llama 3.1, 3.2 and 3.3: the answer is one call, and its arguments are called parameters."""

from quire.tools.format import ToolFormat

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
