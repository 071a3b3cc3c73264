"""The tools and the reasoning of a chat request: the constraint on its answers, and their parser."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.errors import RequestError
from quire.server.chat_schema import ChatRequest
from quire.server.responses_schema import ResponsesRequest
from quire.server.schema import refused_as
from quire.structured.params import MAX_GRAMMAR_CHARS, StructuredOutputsParams
from quire.structured.schemas import UnsupportedSchemaError, prepare_schema
from quire.tools.answer_parser import AnswerParser, call_parser
from quire.tools.calls import Tool
from quire.tools.format import ToolFormat
from quire.tools.formats import format_of
from quire.tools.reasoning import ReasoningFormat, ReasoningParser, reasoning_of

if TYPE_CHECKING:
    from quire.models.tokenizer import Tokenizer
    from quire.server.engines import ServedEngine

LAST_TOKENS = 8
"""Number of tokens at the end of a prompt in which a mark of reasoning is looked for."""

BLAME_SECONDS = 2.0
"""Maximum time for finding the tool that caused a refusal. Compiling one tool may take 0.5 s."""


@dataclass(frozen=True)
class Tooling:
    """The tools of a request, and the model's formats of calls and reasoning.

    tokenizer       tokenizer of the model
    tools           tools that the model may call
    params          for each tool, the place of its parameters in the request
    reasoning       None: the model does not reason, or its reasoning stays in the text
    structure       constraint on the text after the reasoning
    shows_special   whether calls are written with special tokens
    is_parallel     whether an answer may have several calls
    has_constraint  whether an answer is either calls or a constrained text
    around          marks around the text of an answer that are no part of it
    """

    tokenizer: Tokenizer
    format: ToolFormat
    tools: tuple[Tool, ...] = ()
    params: tuple[str, ...] = ()
    reasoning: ReasoningFormat | None = None
    structure: StructuredOutputsParams | None = None
    shows_special: bool = False
    is_parallel: bool = True
    has_constraint: bool = False
    around: tuple[str, ...] = ()

    @classmethod
    async def of(cls, body: ChatRequest | ResponsesRequest, tokenizer: Tokenizer) -> Tooling:
        """Reads a request. Rewrites the schemas of tools on a thread: large ones take a tenth of a second."""
        return await asyncio.to_thread(cls._of, body, tokenizer) if body.tools else cls._of(body, tokenizer)

    @classmethod
    def _of(cls, body: ChatRequest | ResponsesRequest, tokenizer: Tokenizer) -> Tooling:
        choice = body.chosen
        template = tokenizer.chat_template if choice.mode == "none" else tokenizer.tool_template
        format_ = format_of(template)
        known = reasoning_of(template)
        reasoning = None if body.include_reasoning is False else known
        around = () if known is None else known.around
        if choice.mode == "none":
            shows = reasoning is not None and tokenizer.added_id(reasoning.ends) in tokenizer.special_ids
            return cls(tokenizer, format_, (), (), reasoning, body.structure(), shows, around=around)
        tools = tuple(param.tool() for param in body.tools or ())
        inner = "function.parameters" if isinstance(body, ChatRequest) else "parameters"
        params = tuple(f"tools[{index}].{inner}" for index in range(len(tools)))
        wanted = body.structure()
        held = [tool for tool in tools if tool.strict or choice.mode == "required"]
        num_chars = sum(len(json.dumps(tool.parameters)) for tool in held)
        if num_chars > MAX_GRAMMAR_CHARS:
            reason = f"parameters of tools have {num_chars:,} characters; at most {MAX_GRAMMAR_CHARS:,} are allowed"
            raise RequestError(f"'tools': {reason}", "tools")
        try:
            structure = format_.structure(tools, choice, tokenizer.added_id, wanted)
        except UnsupportedSchemaError as error:
            raise _refused(error, dict(zip(params, tools, strict=True)), body.structure_param) from None
        marks = (*format_.shown_marks, *([] if reasoning is None else [reasoning.ends]))
        shows = any(tokenizer.added_id(mark) in tokenizer.special_ids for mark in marks)
        has_constraint = wanted is not None and choice.mode == "auto"
        parallel = choice.parallel
        return cls(tokenizer, format_, tools, params, reasoning, structure, shows, parallel, has_constraint, around)

    def answer_parser(self, prompt_ids: Sequence[int]) -> AnswerParser:
        """A parser for one answer to a prompt."""
        calls = None
        if self.tools:
            most, is_exact = None if self.is_parallel else 1, self.structure is not None
            calls = call_parser(self.format, self.tools, most=most, is_exact=is_exact, is_either=self.has_constraint)
        if self.reasoning is None or self._prompt_ends_with(self.reasoning.ends, prompt_ids):  # the prompt disables it
            return AnswerParser(None, calls, self.around)
        is_inside = self._prompt_ends_with(self.reasoning.begins, prompt_ids)
        return AnswerParser(ReasoningParser(self.reasoning, is_inside=is_inside), calls, self.around)

    def constraint(self, prompt_ids: Sequence[int]) -> StructuredOutputsParams | None:
        """The constraint on an answer to a prompt."""
        if self.structure is None or self.reasoning is None or self._prompt_ends_with(self.reasoning.ends, prompt_ids):
            return self.structure
        begins = "" if self._prompt_ends_with(self.reasoning.begins, prompt_ids) else self.reasoning.begins
        return replace(self.structure, reasoning=(begins, self.reasoning.ends))

    async def find_fault(self, engine: ServedEngine, cache_salt: str) -> RequestError | None:
        """The error of the first tool whose parameters cannot be honoured; None if no such tool is found."""
        found = await refusals(engine, self.tools, cache_salt, most=1)
        return next((refused_as(error, self.params[place]) for place, error in found.items()), None)

    def _prompt_ends_with(self, mark: str, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends with this mark of reasoning."""
        return self.tokenizer.decode(prompt_ids[-LAST_TOKENS:], skip_special=False).rstrip().endswith(mark)


async def refusals(
    engine: ServedEngine, tools: Sequence[Tool], cache_salt: str, most: int = 128
) -> dict[int, RequestError]:
    """Why parameters of tools cannot be honoured, by index of the tool. Stops after `most` or after BLAME_SECONDS."""
    found: dict[int, RequestError] = {}
    deadline = time.monotonic() + BLAME_SECONDS
    for place, tool in enumerate(tools):
        if len(found) == most or time.monotonic() > deadline:
            break
        try:
            await engine.compile_grammar(StructuredOutputsParams(json=tool.arguments), cache_salt)
        except RequestError as error:
            found[place] = error
    return found


def _refused(error: UnsupportedSchemaError, tools: Mapping[str, Tool], param: str) -> RequestError:
    """The error of the first tool whose parameters cannot be honoured, else the error of the constraint in `param`."""
    for name, tool in tools.items():
        try:
            prepare_schema(tool.arguments)
        except UnsupportedSchemaError as own:
            error, param = own, name
            break
    return RequestError(f"'{param}': the schema cannot be honoured: {error}", param)
