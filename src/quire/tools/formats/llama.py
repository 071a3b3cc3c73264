"""Llama 3.1, 3.2 and 3.3: the answer is one call, and its arguments are called parameters."""

from quire.tools.format import ToolFormat

LLAMA = ToolFormat(
    "llama",
    marks=("<|python_tag|>", '"parameters": dictionary of argument name'),
    opens="",
    between=None,
    closes="",
    key="parameters",
    also=("<|python_tag|>",),
    at_start=True,
)
