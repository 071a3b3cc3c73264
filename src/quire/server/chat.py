"""POST /v1/chat/completions: answers conversations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from starlette.requests import Request
from starlette.responses import Response

from quire.server import shapes
from quire.server.chat_schema import ChatRequest, content_text
from quire.server.errors import json_response
from quire.server.event_stream import EventStream, event, unless_disconnected
from quire.server.json_encoding import LargeJsonResponse, encoded, extend
from quire.server.logprobs import TokenTextCache, chat_logprobs, check_prompt_logprobs, prompt_logprobs
from quire.server.service import PromptJob, Service
from quire.server.shapes import EncodedList
from quire.server.tooling import Tooling
from quire.server.usage import StreamChunks, Usage
from quire.tools.answer_parser import AnswerParser
from quire.tools.calls import AnswerDelta, ArgumentsDelta, CallStart, ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from quire.engine.outputs import CompletionOutput, RequestOutput


async def create_chat(service: Service, request: Request) -> Response:
    """Answer one request, as a whole or as a stream."""
    async with service.body_reader.read(request, ChatRequest) as body:
        service.check_model(body.model)
        tooling = await Tooling.of(body, service.engine.tokenizer)
        ids = await service.request_tokenizer.encode_chat(
            body.messages,
            body.chat_template_kwargs,
            body.begins_answer,
            tooling.tools,
            continues=bool(body.continue_final_message),
        )
        is_new = body.max_completion_tokens is not None
        max_tokens = body.max_completion_tokens if is_new else body.max_tokens
        params = service.params(
            body,
            len(ids),
            max_tokens,
            param="messages",
            length_param="max_completion_tokens" if is_new else "max_tokens",
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            structure=tooling.constraint(ids),
            shows_special=tooling.shows_special,
        )
        tenant = request.state.tenant
        job = PromptJob(ids, params, service.hints(body, tenant), tenant)
        check_prompt_logprobs({"prompt_logprobs": body.prompt_logprobs}, 1, len(ids))
        chat = ChatGeneration(service, body, job, [tooling.answer_parser(ids) for _ in range(params.n)])
        body.forget("messages", "chat_template_kwargs", "tools", "metadata", "prompt_cache_key", "safety_identifier")
        body.forget("user")
    await service.admit([job], request.receive, body.structure_param, tooling.find_fault)
    if body.stream:
        return EventStream(chat.events(), service.config.ping_seconds)
    return await unless_disconnected(request.receive, chat.full_response())


@dataclass
class ChatChoiceBuilder:
    """One answer so far."""

    answer_parser: AnswerParser
    text: str = ""
    reasoning: str = ""
    calls: list[shapes.ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: bytearray = field(default_factory=bytearray)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def parts(self, output: CompletionOutput) -> list[AnswerDelta]:
        """What is new in the answer. Notes why it has ended, if it has."""
        reason = output.finish_reason
        found = self.answer_parser.read(output.text, is_last=reason is not None)
        if reason is not None:
            calls = self.answer_parser.num_calls and not self.answer_parser.is_cut
            self.finish_reason = "tool_calls" if reason == "stop" and calls else reason
            self.stop_reason = output.stop_reason
        return found

    def add(self, part: AnswerDelta) -> None:
        """Adds it to the whole answer."""
        match part:
            case TextDelta(text):
                self.text += text
            case ReasoningDelta(text):
                self.reasoning += text
            case CallStart(_, id_, name):
                self.calls.append({"id": id_, "type": "function", "function": {"name": name, "arguments": ""}})
            case ArgumentsDelta(index, text):
                self.calls[index]["function"]["arguments"] += text

    def message(self, before: str) -> shapes.ChatMessage:
        """The whole answer. before: what stands before its text."""
        text = before + self.text
        found: shapes.ChatMessage = {"role": "assistant", "content": text, "refusal": None}
        if self.calls:
            found["content"], found["tool_calls"] = text or None, self.calls
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        return found


def _delta(part: AnswerDelta) -> shapes.MessageDelta:
    """A part of an answer in a chunk."""
    match part:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case CallStart(index, id_, name):
            function: shapes.FunctionDelta = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id_, "type": "function", "function": function}]}
        case ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _chunk(chunks: StreamChunks, choice: shapes.ChatDelta) -> shapes.ChatCompletionChunk:
    return cast(shapes.ChatCompletionChunk, {**chunks.head(), "choices": [choice]})


class ChatGeneration:
    """A running request."""

    def __init__(self, service: Service, body: ChatRequest, job: PromptJob, readers: list[AnswerParser]) -> None:
        self.service = service
        self.body = body
        self.job = job
        self.choices = [ChatChoiceBuilder(answer_parser) for answer_parser in readers]
        self.before = content_text(body.messages[-1].content) if body.echo else ""
        self.scores: bytes | None = None
        self.token_texts = TokenTextCache(service.engine.tokenizer)
        self.usage = Usage(prompt_tokens=len(job.prompt_ids))
        self.head = service.head("chatcmpl-", "chat.completion.chunk" if body.stream else "chat.completion")

    async def full_response(self) -> Response:
        """The answer in one piece."""
        with ExitStack() as held:
            grow = held.enter_context(self.service.answer_limiter.hold())
            async with aclosing(self._items()) as items:
                async for _, item in items:
                    for output in item.outputs:
                        choice = self.choices[output.index]
                        for part in choice.parts(output):
                            choice.add(part)
                        if self.body.return_token_ids:
                            choice.token_ids += output.token_ids
                        grow(extend(choice.logprobs, self._logprobs(output)))
                        self.usage.completion_tokens += len(output.token_ids)
            choices = [self._answer(index, choice) for index, choice in enumerate(self.choices)]
            content = cast(shapes.ChatCompletion, {**self.head, "choices": choices, "usage": self.usage.as_dict()})
            if self.scores is not None:
                content["prompt_logprobs"] = EncodedList(self.scores)
            if self.body.return_token_ids:
                content["prompt_token_ids"] = self.job.prompt_ids
            is_scored = self.body.logprobs or self.scores is not None
            return LargeJsonResponse(content, held.pop_all()) if is_scored else json_response(content)

    def _answer(self, index: int, choice: ChatChoiceBuilder) -> shapes.ChatChoice:
        """A whole choice."""
        found: shapes.ChatChoice = {
            "index": index,
            "message": choice.message(self.before),
            "logprobs": {"content": EncodedList(choice.logprobs), "refusal": None} if self.body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events: a chunk with the role of every choice, then the text."""
        chunks = StreamChunks(self.head, self.usage, self.body.stream_options)
        opened = False
        async with aclosing(self._items()) as items:
            async for _, item in items:
                news = b""
                if not opened:
                    opened = True
                    news = b"".join(event(chunk) for chunk in self._first_chunks(chunks))
                for output in item.outputs:
                    self.usage.completion_tokens += len(output.token_ids)
                    news += b"".join(event(_chunk(chunks, delta)) for delta in self._deltas(output))
                if news:
                    yield news
        yield chunks.end()

    def _first_chunks(self, chunks: StreamChunks) -> Iterator[shapes.ChatCompletionChunk]:
        """The first chunk of every choice."""
        for index in range(self.job.params.n):
            delta: shapes.MessageDelta = {"role": "assistant", "content": self.before}
            chunk = _chunk(chunks, {"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            if self.body.return_token_ids and not index:
                chunk["prompt_token_ids"] = self.job.prompt_ids
            yield chunk

    def _deltas(self, output: CompletionOutput) -> list[shapes.ChatDelta]:
        """The chunks of an output: one for each part, the first with what is told of its tokens, the last with the
        end.
        """
        choice, scored = self.choices[output.index], self._logprobs(output)
        parts = [_delta(part) for part in choice.parts(output)]
        has_ended, has_ids = choice.finish_reason is not None, bool(self.body.return_token_ids and output.token_ids)
        if not parts and (scored or has_ended or has_ids):
            parts = [{} if has_ended and not scored else {"content": ""}]
        deltas: list[shapes.ChatDelta] = [
            {"index": output.index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts
        ]
        if scored:
            deltas[0]["logprobs"] = {"content": scored, "refusal": None}
        if has_ids:
            deltas[0]["token_ids"] = output.token_ids
        if has_ended:
            deltas[-1]["finish_reason"], deltas[-1]["stop_reason"] = choice.finish_reason, choice.stop_reason
        return deltas

    def _items(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields the engine's output."""

        async def on_first_output(_: int, item: RequestOutput) -> None:
            self.usage.record(item)
            if self.body.prompt_logprobs is not None:
                found = item.prompt_logprobs or []
                self.scores = await self.service.make_answer(
                    self.job.num_prompt_logprobs, lambda: encoded(prompt_logprobs(found, self.token_texts))
                )

        return self.service.run([self.job], self.head["id"], on_first_output)

    def _logprobs(self, output: CompletionOutput) -> list[shapes.TokenLogprob]:
        if not self.body.logprobs or not output.logprobs:
            return []
        return chat_logprobs(output.token_ids, output.logprobs, self.body.top_logprobs or 0, self.token_texts)
