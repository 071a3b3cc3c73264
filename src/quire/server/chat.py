"""POST /v1/chat/completions: answers conversations."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from quire.server import shapes
from quire.server.answers import ScoredAnswer, extend
from quire.server.errors import json_response
from quire.server.logprobs import Names, chat_logprobs
from quire.server.schema import ChatRequest
from quire.server.service import Chunks, Job, Service, Usage
from quire.server.shapes import Items
from quire.server.wire import EventStream, event, unless_disconnected

if TYPE_CHECKING:
    from quire.engine.outputs import CompletionOutput, RequestOutput


async def create_chat(service: Service, request: Request) -> Response:
    """Answer one request, as a whole or as a stream."""
    async with service.bodies.read(request, ChatRequest) as body:
        service.check_model(body.model)
        ids = await service.texts.encode_chat(body.messages, body.chat_template_kwargs)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = service.params(body, len(ids), max_tokens, param="messages", logprobs=logprobs)
        tenant = request.state.tenant
        chat = Chat(service, body, Job(ids, params, service.hints(body, tenant), tenant))
        await service.admit([chat.job])
    if body.stream:
        return EventStream(chat.events())
    return await unless_disconnected(request.receive, chat.whole())


@dataclass
class Choice:
    """One answer so far."""

    text: str = ""
    logprobs: bytearray = field(default_factory=bytearray)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def _opening(chunks: Chunks, index: int) -> bytes:
    """The first chunk of a choice."""
    delta: shapes.MessageDelta = {"role": "assistant", "content": ""}
    return event(_chunk(chunks, {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}))


def _chunk(chunks: Chunks, choice: shapes.ChatDelta) -> shapes.ChatCompletionChunk:
    return {**chunks.head(), "choices": [choice]}


class Chat:
    """A running request."""

    def __init__(self, service: Service, body: ChatRequest, job: Job) -> None:
        self.service = service
        self.body = body
        self.job = job
        self.names = Names(service.engine.tokenizer)
        self.usage = Usage(prompt_tokens=len(job.prompt_ids))
        self.head: shapes.Head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.engine.model_name,
        }

    async def whole(self) -> Response:
        """The answer in one piece."""
        choices = [Choice() for _ in range(self.job.params.n)]
        with ExitStack() as held:
            grow = held.enter_context(self.service.unsent.hold())
            async with aclosing(self._items()) as items:
                async for _, item in items:
                    for output in item.outputs:
                        choice = choices[output.index]
                        choice.text += output.text
                        grow(extend(choice.logprobs, self._logprobs(output)))
                        self.usage.completion_tokens += len(output.token_ids)
                        if output.finish_reason is not None:
                            choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
            answers: list[shapes.ChatChoice] = [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": {"content": Items(choice.logprobs), "refusal": None} if self.body.logprobs else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for index, choice in enumerate(choices)
            ]
            content: shapes.ChatCompletion = {**self.head, "choices": answers, "usage": self.usage.as_dict()}
            return ScoredAnswer(content, held.pop_all()) if self.body.logprobs else json_response(content)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events: a chunk with the role of every choice, then the text."""
        chunks = Chunks(self.head, self.usage, self.body.stream_options)
        opened = False
        async with aclosing(self._items()) as items:
            async for _, item in items:
                news = b""
                if not opened:
                    opened = True
                    news = b"".join(_opening(chunks, index) for index in range(self.job.params.n))
                for output in item.outputs:
                    self.usage.completion_tokens += len(output.token_ids)
                    found = self._logprobs(output)
                    if not (output.text or found or output.finish_reason):
                        continue
                    choice: shapes.ChatDelta = {
                        "index": output.index,
                        "delta": {"content": output.text} if output.text or found else {},
                        "logprobs": {"content": found, "refusal": None} if found else None,
                        "finish_reason": output.finish_reason,
                    }
                    if output.finish_reason:
                        choice["stop_reason"] = output.stop_reason
                    news += event(_chunk(chunks, choice))
                if news:
                    yield news
        yield chunks.end()

    def _items(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields the engine's output."""

        async def opens(_: int, item: RequestOutput) -> None:
            self.usage.saw(item)

        return self.service.run([self.job], self.head["id"], opens)

    def _logprobs(self, output: CompletionOutput) -> list[shapes.ScoredToken]:
        if not self.body.logprobs or not output.logprobs:
            return []
        return chat_logprobs(output.token_ids, output.logprobs, self.body.top_logprobs or 0, self.names)
