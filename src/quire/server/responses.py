"""POST /v1/responses: answers conversations in the newer form of OpenAI's API, without memory between requests."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.server.errors import ApiError
from quire.server.event_stream import EventStream, unless_disconnected
from quire.server.json_encoding import encoded, pieces
from quire.server.logprobs import TokenTextCache, chat_logprobs
from quire.server.responses_output import Event, ResponseOutputBuilder
from quire.server.responses_schema import FunctionTool, ResponsesRequest
from quire.server.service import PromptJob, Service
from quire.server.shapes import EncodedList, TokenLogprob
from quire.server.tooling import Tooling, refusals
from quire.server.usage import Usage
from quire.tools.answer_parser import AnswerParser
from quire.tools.calls import AnswerDelta, ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from quire.engine.outputs import CompletionOutput, RequestOutput
    from quire.server.protocol import EngineProtocol

LOGPROB_BYTES = 90
"""About those of a log-probability in an answer."""


async def create_response(service: Service, request: Request) -> Response:
    """Answer one request, as a whole or as a stream."""
    async with service.body_reader.read(request, ResponsesRequest) as body:
        service.check_model(body.model)
        salt = service.tenants.salt(request.state.tenant, body.cache_salt)
        tooling = await unless_disconnected(request.receive, _tooling(service.engine, body, salt))
        ids = await service.request_tokenizer.encode_chat(
            lambda: [_PlainMessage(each) for each in body.messages()],
            body.chat_template_kwargs,
            tools=tooling.tools,
            param="input",
        )
        params = service.params(
            body,
            len(ids),
            body.max_output_tokens,
            param="input",
            length_param="max_output_tokens",
            logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
            structure=tooling.constraint(ids),
            shows_special=tooling.shows_special,
        )
        tenant = request.state.tenant
        job = PromptJob(ids, params, service.hints(body, tenant), tenant)
        # Written once, off the event loop: every event about the whole response has them.
        tools = await asyncio.to_thread(_written_tools, body.tools) if body.tools else EncodedList[Any]()
        answer = ResponseGeneration(service, body, job, tooling.answer_parser(ids), tools)
        body.forget("tools", "input", "chat_template_kwargs", "prompt_cache_key", "safety_identifier")
    await service.admit([job], request.receive, body.structure_param, tooling.find_fault)
    if body.stream:
        return EventStream(answer.events(), service.config.ping_seconds, answer.failed)
    return await unless_disconnected(request.receive, answer.full_response())


async def _tooling(engine: EngineProtocol, body: ResponsesRequest, salt: str) -> Tooling:
    """The tools of a request. One that does not say whether it is strict is, as in OpenAI's API; but it is not where
    its schema cannot be honoured and the model is free to call.
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
        # Of tools that are only too many together, each one is at fault.
        refused = await refusals(engine, [tool.tool() for tool in unsaid], salt)
        for place in refused or range(len(unsaid)):
            unsaid[place].strict = False
        return await Tooling.of(body, engine.tokenizer)


def _written_tools(tools: Iterable[FunctionTool]) -> EncodedList[Any]:
    """The tools as a response tells of them."""
    return EncodedList(encoded(tool.model_dump() | {"strict": tool.strict is not False} for tool in tools))


@dataclass(frozen=True)
class _PlainMessage:
    """A message that is in the form of chat templates already."""

    message: Mapping[str, Any]

    def for_template(self) -> dict[str, Any]:
        return dict(self.message)


class ResponseGeneration:
    """A running request."""

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        job: PromptJob,
        answer_parser: AnswerParser,
        tools: EncodedList[Any],
    ) -> None:
        self.service = service
        self.body = body
        self.job = job
        self.answer_parser = answer_parser
        self.tools = tools
        self.token_texts = TokenTextCache(service.engine.tokenizer)
        self.usage = Usage(prompt_tokens=len(job.prompt_ids))
        self.output = ResponseOutputBuilder()
        self.head = service.head("resp_", "response")
        self.status, self.num_reasoning, self.num_undecided = "in_progress", 0, 0
        self.is_too_long = False
        self.scores: list[TokenLogprob] = []
        self.num_sent = self.num_scores = 0

    async def full_response(self) -> Response:
        """The answer in one piece."""
        with ExitStack() as held:
            grow = held.enter_context(self.service.answer_limiter.hold())
            grow(sum(map(len, self.tools.parts)))
            async with aclosing(self._items()) as items:
                async for _, item in items:
                    for output in item.outputs:
                        grow(LOGPROB_BYTES * sum(map(len, output.logprobs or ())))
                        for _ in self._events(output):
                            pass
            content = await self.service.make_answer(self.num_scores, lambda: b"".join(pieces(self._response())))
            return Response(content, media_type="application/json")

    def failed(self, error: ApiError) -> bytes:
        """The event of an error within a stream."""
        said = error.body()["error"]
        told = {name: said[name] for name in ("code", "message", "param")}
        return self._sent([{"type": "error", **told}])

    def _sent(self, events: Iterable[Event]) -> bytes:
        """Events as they are sent."""
        found = bytearray()
        for event in events:
            numbered = event | {"sequence_number": self.num_sent}
            found += b"event: %s\ndata: " % event["type"].encode()
            for piece in pieces(numbered):
                found += piece
            found += b"\n\n"
            self.num_sent += 1
        return bytes(found)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        opened = False
        with self.service.answer_limiter.hold("tools", "tools") as grow:
            grow(sum(map(len, self.tools.parts)))
            async with aclosing(self._items()) as items:
                async for _, item in items:
                    news = b""
                    if not opened:
                        opened = True
                        news = self._sent(self._about(kind) for kind in ("created", "in_progress"))
                    for output in item.outputs:
                        events = self._events(output)
                        # The last ones have all log-probabilities, several times.
                        num_scores = self.num_scores if output.finish_reason is not None else 0
                        news += await self.service.make_answer(num_scores, functools.partial(self._sent, events))
                    if news:
                        yield news
        yield await self.service.make_answer(self.num_scores, lambda: self._sent([self._about(self.status)]))

    def _about(self, kind: str) -> Event:
        """An event about the whole response."""
        return {"type": f"response.{kind}", "response": self._response()}

    def _events(self, output: CompletionOutput) -> Iterator[Event]:
        """What an output of the engine adds."""
        self.usage.completion_tokens += len(output.token_ids)
        scores, was_beside, was_reasoning = (
            self._scores(output),
            self.answer_parser.is_outside_text,
            self.answer_parser.is_reasoning,
        )
        parts = self.answer_parser.read(output.text, is_last=output.finish_reason is not None)
        self._count_reasoning(len(output.token_ids), was_reasoning, parts)
        # Of tokens whose text is held back; those of reasoning, calls and marks have no place.
        self.scores += scores
        for part in parts:
            own = self.scores if isinstance(part, TextDelta) else []
            yield from self.output.add(part, own)
            if own or not isinstance(part, TextDelta):
                self.scores = []
        if was_beside or self.answer_parser.is_outside_text:
            self.scores = []
        if output.finish_reason is not None:
            self.is_too_long = output.finish_reason == "length"
            self.status = "incomplete" if self.is_too_long or self.answer_parser.is_cut else "completed"
            yield from self.output.finish(self.status)

    def _count_reasoning(self, num_tokens: int, was_reasoning: bool, parts: list[AnswerDelta]) -> None:
        """Counts tokens of reasoning, its marks included: they may be several tokens that are held back."""
        if was_reasoning or self.answer_parser.is_reasoning or any(isinstance(part, ReasoningDelta) for part in parts):
            self.num_reasoning += self.num_undecided + num_tokens
        self.num_undecided = 0 if parts or self.answer_parser.is_reasoning else self.num_undecided + num_tokens

    def _scores(self, output: CompletionOutput) -> list[TokenLogprob]:
        if not self.body.wants_logprobs or not output.logprobs:
            return []
        self.num_scores += sum(map(len, output.logprobs))
        return chat_logprobs(output.token_ids, output.logprobs, self.body.top_logprobs or 0, self.token_texts)

    def _items(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async def on_first_output(_: int, item: RequestOutput) -> None:
            self.usage.record(item)

        return self.service.run([self.job], self.head["id"], on_first_output)

    def _response(self) -> dict[str, Any]:
        """The response as it is now."""
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
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "total_tokens": counts["total_tokens"],
        }
