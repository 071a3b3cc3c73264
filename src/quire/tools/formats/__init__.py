"""The formats of calls, a row each: the first one with a mark in the model's chat template is the model's."""

from __future__ import annotations

from quire.tools.format import ToolFormat
from quire.tools.formats.generic import GENERIC
from quire.tools.formats.hermes import HERMES
from quire.tools.formats.llama import LLAMA
from quire.tools.formats.mistral import MISTRAL

FORMATS = (MISTRAL, HERMES, LLAMA)


def format_of(template: str) -> ToolFormat:
    """The format of a model by its chat template; the generic one if none is known."""

    def is_written(marks: tuple[str, ...]) -> bool:
        return any(mark in template for mark in marks)

    return next((each for each in FORMATS if is_written(each.marks) and not is_written(each.excluded_marks)), GENERIC)
