"""POST /v1/responses: answers conversations in the newer form of OpenAI's API, without memory between requests."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.server.collector import AnswerCollector, ChoiceDelta, Renderer
from quire.server.errors import ApiError
from quire.server.event_stream import unless_disconnected
from quire.server.json_encoding import encoded, pieces
from quire.server.logprobs import chat_logprobs
from quire.server.responses_output import NamedEvent, ResponseOutputBuilder
from quire.server.responses_schema import FunctionTool, ResponsesRequest
from quire.server.service import PromptJob, Service
from quire.server.shapes import EncodedList, TokenLogprob
from quire.server.tooling import Tooling, refusals
from quire.tools.calls import TextDelta

if TYPE_CHECKING:
    from quire.server.engines import ServedEngine

LOGPROB_BYTES = 90
"""Approximate number of bytes of a log-probability in an answer."""


async def create_response(service: Service, request: Request) -> Response:
    """Answer one request, as a whole or as a stream."""
    async with service.body_reader.read(request, ResponsesRequest) as body:
        service.check_model(body.model)
        salt = service.tenants.salt(request.state.tenant, body.cache_salt)
        tooling = await unless_disconnected(request.receive, _tooling(service.engine, body, salt))
        ids = await service.request_tokenizer.encode_chat(
            body.for_template,
            body.chat_template_kwargs,
            tools=tooling.tools,
            param="input",
        )
        job = service.job(
            body,
            ids,
            request.state.tenant,
            body.max_output_tokens,
            param="input",
            length_param="max_output_tokens",
            logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
            tooling=tooling,
        )
        # Encoded once, off the event loop: every event about the whole response repeats them.
        tools = await asyncio.to_thread(_written_tools, body.tools) if body.tools else EncodedList[Any]()
        collector = AnswerCollector(ResponseRenderer(service, body, job, tools), [tooling.answer_parser(ids)])
        body.forget("tools", "input", "chat_template_kwargs", "prompt_cache_key", "safety_identifier")
    await service.admit([job], request.receive, tooling.find_fault)
    return await collector.answer(request, stream=body.stream)


async def _tooling(engine: ServedEngine, body: ResponsesRequest, salt: str) -> Tooling:
    """The tools of a request. As in OpenAI's API, a tool is strict by default. But it is not strict if its schema
    cannot be honoured and calling it is optional.
    """
    unsaid = [tool for tool in body.tools or () if tool.strict is None]
    if body.chosen.mode != "auto" or not unsaid:
        return await Tooling.of(body, engine.tokenizer)
    try:
        tooling = await Tooling.of(body, engine.tokenizer)
        if tooling.structure is not None:
            await engine.compile_grammar(tooling.structure, salt)
        return tooling
    except RequestError:
        # If the tools are only too large together, none of them is strict.
        refused = await refusals(engine, [tool.tool() for tool in unsaid], salt)
        for place in refused or range(len(unsaid)):
            unsaid[place].strict = False
        return await Tooling.of(body, engine.tokenizer)


def _written_tools(tools: Iterable[FunctionTool]) -> EncodedList[Any]:
    """The tools in the form of a response."""
    return EncodedList(encoded(tool.model_dump() | {"strict": tool.strict is not False} for tool in tools))


class ResponseRenderer(Renderer):
    """Writes a response. Numbers the events of its stream."""

    def __init__(self, service: Service, body: ResponsesRequest, job: PromptJob, tools: EncodedList[Any]) -> None:
        super().__init__(service, [job], "resp_", "response")
        self.body = body
        self.job = job
        self.tools = tools
        if body.stream:
            self.large = ("tools", "tools")
        self.output = ResponseOutputBuilder()
        self.status = "in_progress"
        self.is_too_long = False
        self.scores: list[TokenLogprob] = []
        self.num_sent = self.num_scores = 0

    def begin(self, grow: Callable[[int], None]) -> None:
        """See Renderer. Counts the tools, which many events repeat."""
        super().begin(grow)
        grow(sum(map(len, self.tools.parts)))

    async def prepare(self, prompt: int, logprobs: list[Any]) -> None:
        """See Renderer. Nothing to do: a response has no part about the prompt."""

    def add(self, event: ChoiceDelta) -> None:
        """See Renderer."""
        self.grow(LOGPROB_BYTES * sum(map(len, event.logprobs or ())))
        for _ in self._events(event):
            pass

    async def whole(self, held: ExitStack) -> Response:
        """See Renderer."""
        content = await self.service.make_answer(self.num_scores, lambda: b"".join(pieces(self._response())))
        return Response(content, media_type="application/json")

    async def render(self, deltas: Iterable[ChoiceDelta], begun: int | None) -> Iterable[bytes]:
        """See Renderer."""
        ready = list(deltas)
        first = () if begun is None else map(self._about, ("created", "in_progress"))
        make = functools.partial(self._sent, itertools.chain(first, *map(self._events, ready)))
        # The last events repeat all log-probabilities.
        is_large = self.num_scores and any(delta.finish_reason is not None for delta in ready)
        news = await self.service.make_answer(self.num_scores, make) if is_large else make()
        return (news,) if news else ()

    async def end(self) -> bytes:
        """See Renderer. The last event has the whole response."""
        return await self.service.make_answer(self.num_scores, lambda: self._sent([self._about(self.status)]))

    def failed(self, error: ApiError) -> bytes:
        """See Renderer."""
        body = error.body()["error"]
        shown = {name: body[name] for name in ("code", "message", "param")}
        return self._sent([{"type": "error", **shown}])

    def _sent(self, events: Iterable[NamedEvent]) -> bytes:
        """Encodes and numbers events."""
        found = bytearray()
        for event in events:
            numbered = event | {"sequence_number": self.num_sent}
            found += b"event: %s\ndata: " % event["type"].encode()
            for piece in pieces(numbered):
                found += piece
            found += b"\n\n"
            self.num_sent += 1
        return bytes(found)

    def _about(self, kind: str) -> NamedEvent:
        """An event with the whole response."""
        return {"type": f"response.{kind}", "response": self._response()}

    def _events(self, event: ChoiceDelta) -> Iterator[NamedEvent]:
        """Yields the events of a delta."""
        # Includes tokens whose text was held back. A response has no log-probabilities of reasoning, calls and marks.
        self.scores += self._logprobs(event)
        for part in event.parts:
            own = self.scores if isinstance(part, TextDelta) else []
            yield from self.output.add(part, own)
            if own or not isinstance(part, TextDelta):
                self.scores = []
        if not event.is_all_text:
            self.scores = []
        if event.finish_reason is not None:
            self.is_too_long = event.finish_reason == "length"
            self.status = "incomplete" if self.is_too_long or event.is_cut else "completed"
            yield from self.output.finish(self.status)

    def _logprobs(self, event: ChoiceDelta) -> list[TokenLogprob]:
        if not self.body.wants_logprobs or not event.logprobs:
            return []
        self.num_scores += sum(map(len, event.logprobs))
        return chat_logprobs(event.token_ids, event.logprobs, self.body.top_logprobs or 0, self.token_texts)

    def _response(self) -> dict[str, Any]:
        """The response in its current state."""
        body, params = self.body, self.job.params
        has_ended = self.status != "in_progress"
        choice: Any = "auto" if body.tool_choice is None else body.tool_choice
        wanted = None if body.text is None or body.text.format is None else body.text.format
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "completed_at": int(time.time()) if has_ended else None,
            "model": self.head["model"],
            "status": self.status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self.is_too_long else None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "output": self.output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "max_output_tokens": body.max_output_tokens,
            "text": {
                "format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
            },
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": self.tools,
            "truncation": "disabled",
            "background": False,
            "service_tier": "default",
            "user": body.user,
            "usage": self._usage() if has_ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        counts = self.usage.as_dict()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **counts["prompt_tokens_details"]},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.usage.reasoning_tokens},
            "total_tokens": counts["total_tokens"],
        }
