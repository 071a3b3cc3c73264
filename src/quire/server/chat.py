"""POST /v1/chat/completions: answers conversations."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.structured import StructuredOutputsParams
from quire.server import shapes
from quire.server.answers import ScoredAnswer, extend
from quire.server.errors import json_response
from quire.server.logprobs import Names, chat_logprobs
from quire.server.schema import ChatRequest
from quire.server.service import Chunks, Job, Service, Usage
from quire.server.shapes import Items
from quire.server.wire import EventStream, event, unless_disconnected
from quire.tools.calls import CallArguments, CallBegins, Part, Text, Tool
from quire.tools.format import ToolFormat
from quire.tools.formats import format_of
from quire.tools.parser import CallParser

if TYPE_CHECKING:
    from quire.engine.outputs import CompletionOutput, RequestOutput
    from quire.server.protocol import Tokenizer


async def create_chat(service: Service, request: Request) -> Response:
    """Answer one request, as a whole or as a stream."""
    async with service.bodies.read(request, ChatRequest) as body:
        service.check_model(body.model)
        tooling = Tooling.of(body, service.engine.tokenizer)
        ids = await service.texts.encode_chat(body.messages, body.chat_template_kwargs, tools=tooling.tools)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        params = service.params(
            body,
            len(ids),
            max_tokens,
            param="messages",
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structure=tooling.structure,
            shows_special=tooling.shows_special,
        )
        tenant = request.state.tenant
        chat = Chat(service, body, Job(ids, params, service.hints(body, tenant), tenant), tooling)
        await service.admit([chat.job])
    if body.stream:
        return EventStream(chat.events())
    return await unless_disconnected(request.receive, chat.whole())


@dataclass(frozen=True)
class Tooling:
    """The tools of a request, and how the model calls them.

    tools          that it may call
    structure      what this makes of the answer's text
    shows_special  whether calls are written with special tokens
    """

    format: ToolFormat
    tools: tuple[Tool, ...] = ()
    structure: StructuredOutputsParams | None = None
    shows_special: bool = False

    @classmethod
    def of(cls, body: ChatRequest, tokenizer: Tokenizer) -> Tooling:
        """Those of a request."""
        format_, choice = format_of(tokenizer.chat_template), body.chosen
        if choice.mode == "none":
            return cls(format_)
        tools = tuple(param.tool() for param in body.tools or ())

        def special(text: str) -> int | None:
            token_id = tokenizer.token_id(text)
            return token_id if token_id in tokenizer.special_ids else None

        grammar = format_.grammar(tools, choice, special)
        shows = any(special(mark) is not None for mark in format_.marks)
        return cls(format_, tools, None if grammar is None else StructuredOutputsParams(grammar=grammar), shows)

    def parser(self) -> CallParser | None:
        """For one answer; None without tools."""
        return CallParser(self.format, {tool.name for tool in self.tools}) if self.tools else None


@dataclass
class Choice:
    """One answer so far."""

    parser: CallParser | None
    text: str = ""
    calls: list[shapes.ToolCall] = field(default_factory=list)
    logprobs: bytearray = field(default_factory=bytearray)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def parts(self, output: CompletionOutput) -> list[Part]:
        """What is new in the answer. Notes why it has ended, if it has."""
        if self.parser is None:
            found: list[Part] = [Text(output.text)] if output.text else []
        else:
            found = self.parser.push(output.text)
            if output.finish_reason is not None:
                found += self.parser.flush()
        if output.finish_reason is not None:
            has_called = output.finish_reason == "stop" and self.parser is not None and self.parser.num_calls > 0
            self.finish_reason = "tool_calls" if has_called else output.finish_reason
            self.stop_reason = output.stop_reason
        return found

    def add(self, part: Part) -> None:
        """Adds it to the whole answer."""
        match part:
            case Text(text):
                self.text += text
            case CallBegins(_, id_, name):
                self.calls.append({"id": id_, "type": "function", "function": {"name": name, "arguments": ""}})
            case CallArguments(index, text):
                self.calls[index]["function"]["arguments"] += text

    @property
    def message(self) -> shapes.ChatMessage:
        """The whole answer."""
        found: shapes.ChatMessage = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            found["content"], found["tool_calls"] = self.text or None, self.calls
        return found


def _delta(part: Part) -> shapes.MessageDelta:
    """A part of an answer in a chunk."""
    match part:
        case Text(text):
            return {"content": text}
        case CallBegins(index, id_, name):
            function: shapes.FunctionDelta = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id_, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _opening(chunks: Chunks, index: int) -> bytes:
    """The first chunk of a choice."""
    delta: shapes.MessageDelta = {"role": "assistant", "content": ""}
    return event(_chunk(chunks, {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}))


def _chunk(chunks: Chunks, choice: shapes.ChatDelta) -> shapes.ChatCompletionChunk:
    return {**chunks.head(), "choices": [choice]}


class Chat:
    """A running request."""

    def __init__(self, service: Service, body: ChatRequest, job: Job, tooling: Tooling) -> None:
        self.service = service
        self.body = body
        self.job = job
        self.choices = [Choice(tooling.parser()) for _ in range(job.params.n)]
        self.names = Names(service.engine.tokenizer)
        self.usage = Usage(prompt_tokens=len(job.prompt_ids))
        self.head = service.head("chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion")

    async def whole(self) -> Response:
        """The answer in one piece."""
        with ExitStack() as held:
            grow = held.enter_context(self.service.unsent.hold())
            async with aclosing(self._items()) as items:
                async for _, item in items:
                    for output in item.outputs:
                        choice = self.choices[output.index]
                        for part in choice.parts(output):
                            choice.add(part)
                        grow(extend(choice.logprobs, self._logprobs(output)))
                        self.usage.completion_tokens += len(output.token_ids)
            answers: list[shapes.ChatChoice] = [
                {
                    "index": index,
                    "message": choice.message,
                    "logprobs": {"content": Items(choice.logprobs), "refusal": None} if self.body.logprobs else None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for index, choice in enumerate(self.choices)
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
                    news += b"".join(event(_chunk(chunks, delta)) for delta in self._deltas(output))
                if news:
                    yield news
        yield chunks.end()

    def _deltas(self, output: CompletionOutput) -> list[shapes.ChatDelta]:
        """The chunks of an output: one for each part, the first with the log-probabilities, the last with the end."""
        choice, found = self.choices[output.index], self._logprobs(output)
        parts: list[shapes.MessageDelta] = [_delta(part) for part in choice.parts(output)]
        if not parts and found:
            parts = [{"content": ""}]
        elif not parts and choice.finish_reason is not None:
            parts = [{}]
        deltas: list[shapes.ChatDelta] = [
            {"index": output.index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts
        ]
        if found:
            deltas[0]["logprobs"] = {"content": found, "refusal": None}
        if choice.finish_reason is not None:
            deltas[-1]["finish_reason"], deltas[-1]["stop_reason"] = choice.finish_reason, choice.stop_reason
        return deltas

    def _items(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields the engine's output."""

        async def opens(_: int, item: RequestOutput) -> None:
            self.usage.saw(item)

        return self.service.run([self.job], self.head["id"], opens)

    def _logprobs(self, output: CompletionOutput) -> list[shapes.ScoredToken]:
        if not self.body.logprobs or not output.logprobs:
            return []
        return chat_logprobs(output.token_ids, output.logprobs, self.body.top_logprobs or 0, self.names)
